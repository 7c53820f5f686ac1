import subprocess
import sys
import time
from pathlib import Path

import pytest

from oelm import machine

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
