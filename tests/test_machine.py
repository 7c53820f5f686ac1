import subprocess
import sys
import time
from pathlib import Path

import pytest

from oelm import machine
from oelm.errors import UserError

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages"
)

HEAP_FLAGS = """
def heap_flags():
    mapped = open("/proc/self/smaps").read().split("[heap]")[1:]
    return {flag for part in mapped for flag in part.partition("VmFlags:")[2].splitlines()[0].split()}
"""


def run(code: str) -> str:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@needs_huge_pages
def test_the_heap_asks_for_huge_pages_and_large_buffers_lie_in_it() -> None:
    code = f"""{HEAP_FLAGS}
import ctypes
from oelm.machine import keep_memory
end = ctypes.CDLL(None).sbrk
end.restype = ctypes.c_void_p
begin = end(0)
assert "hg" not in heap_flags()
keep_memory()
assert "hg" in heap_flags()
grown = end(0)
buffer = ctypes.create_string_buffer(256 * 2**20)
middle = ctypes.addressof(buffer) + 128 * 2**20
print(begin < middle < grown == end(0))
"""
    assert run(code) == "True"


@needs_huge_pages
def test_a_process_that_may_not_have_such_room_goes_on_without_it() -> None:
    code = f"""{HEAP_FLAGS}
import resource
from oelm.machine import keep_memory
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
keep_memory()
kept = bytearray(100 * 2**20)
print(len(kept), "hg" in heap_flags())
"""
    assert run(code) == f"{100 * 2**20} False"


def test_a_process_whose_parent_died_before_it_could_ask_to_be_told_leaves_at_once(tmp_path: Path) -> None:
    code = f"""
import os, signal, time
from oelm.machine import leave_with_parent
parent = os.getpid()
if os.fork():
    os._exit(0)
time.sleep(0.3)
leave_with_parent(signal.SIGKILL, parent)
open({str(tmp_path / "left behind")!r}, "w").close()
"""
    run(code)
    time.sleep(1.5)
    assert list(tmp_path.iterdir()) == []


def test_more_threads_than_cores_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, asked in (("1", 1), ("999999", machine.cores()), ("", 0), ("4,2", 0)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert machine.threads_asked() == asked


@pytest.mark.parametrize(("set_by_user", "expected"), [("", "{}/oelm/compiled"), ("/own/place", "/own/place")])
def test_compiled_code_is_kept_in_the_users_cache_unless_they_say_where(monkeypatch, tmp_path, set_by_user, expected):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", set_by_user)
    if not set_by_user:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    machine.keep_compiled()
    assert machine.os.environ["TORCHINDUCTOR_CACHE_DIR"] == expected.format(tmp_path)


def test_a_cache_that_cannot_be_is_left_to_torch(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    machine.keep_compiled()
    assert "TORCHINDUCTOR_CACHE_DIR" not in machine.os.environ


@pytest.mark.parametrize(
    ("asked", "processes", "environment", "expected"),
    [(3, 1, "", 3), (0, 1, "", 8), (0, 2, "", 4), (0, 1, "2", 2), (0, 2, "1", 4), (0, 16, "", 1)],
)
def test_threads_are_those_asked_for_or_a_share_of_the_cores(monkeypatch, asked, processes, environment, expected):
    """torchrun sets the environment's number to 1 unasked: several processes do not hear it."""
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", environment)
    assert machine.threads_for(asked, processes) == expected


def test_threads_that_would_never_come_to_an_end_are_refused(monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 2)
    with pytest.raises(UserError, match="threads 4096: there are 2 cores here"):
        machine.threads_for(4096)
