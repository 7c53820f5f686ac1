"""The machine that a run is on: its cores, and what must stay the same for equal bits."""

import ctypes
import gc
import hashlib
import mmap
import os
import platform
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from oelm.errors import UserError

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Names of malloc.h."""
USUAL_TOP_PAD = 128 * 1024
CROWDED = 16
"""Threads to a core that are too many."""
HEAP_ROOM = 2**31 - 2**21
"""The most that mallopt takes, an int."""


def cores() -> int:
    """CPU cores that this process may use: fewer than the machine has in a container or under Slurm."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def threads_asked() -> int:
    """What the environment wants of OpenMP, as far as there are cores; 0: nothing. (torchrun sets it to 1 unasked.)"""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(said), cores()) if said.isdecimal() else 0


def threads_for(asked: int, processes: int = 1) -> int:
    """CPU threads of each of `processes` on this machine: what is asked for, else what the environment wants of one
    alone, else their share of the cores. Far more threads than cores never come to an end."""
    if asked > CROWDED * cores():
        raise UserError(f"threads {asked}: there are {cores()} cores here; leave --threads out to use them all")
    return asked or (threads_asked() if processes == 1 else 0) or max(1, cores() // processes)


def place_in_world() -> tuple[int, int]:
    """(rank, number of processes) as torchrun's environment says; alone without it."""
    try:
        size = int(os.environ.get("WORLD_SIZE", 1))
        rank = int(os.environ["RANK"]) if size > 1 else 0
        if not 0 <= rank < size:
            raise ValueError
    except (KeyError, ValueError):
        raise UserError("WORLD_SIZE and RANK in the environment do not fit together: start with torchrun") from None
    return rank, size


def wait_politely() -> None:
    """Have idle threads sleep soon instead of spinning: on shared cores spinning costs more than it saves.

    Must be called before torch is imported. A pocket step with two threads, beside two busy processes, took
    1.17 s without and 0.51 s with it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def tune() -> None:
    """What a process that trains asks of its allocator and its interpreter."""
    keep_memory()
    collect_seldom()


def keep_memory() -> None:
    """Have the allocator keep what is freed (glibc): each step takes the same buffers again.

    By default every large buffer goes back to the kernel, which hands it out as pages that must be faulted in
    and zeroed. A step of medium-512 took 4.65 s instead of 5.09 s, one of pocket 138 ms instead of 150 ms.
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
        libc.mallopt(M_MMAP_MAX, 0)
        _ask_for_huge_pages(libc)


def collect_seldom() -> None:
    """Have Python look for garbage in cycles a hundred times less often than by default.

    A step makes thousands of objects and leaves none of them behind. One of pocket takes 0.99 of its time.
    """
    gc.set_threshold(70_000)


def keep_compiled() -> None:
    """Have torch.compile keep its code where the next run finds it: torch's own place is the temporary folder."""
    with suppress(OSError, RuntimeError):  # no home, or no right to write there
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oelm" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """Let the heap grow once by HEAP_ROOM, of addresses and not yet of memory, and ask for it to be in huge pages.

    A step of medium-512 then takes about 0.96, one of pocket 0.99 of its time. Where there is no such room, or
    nobody gets huge pages, all stays as it is.
    """
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    libc.sbrk.argtypes, libc.malloc.argtypes = [ctypes.c_ssize_t], [ctypes.c_size_t]
    libc.free.argtypes, libc.madvise.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    begin = libc.sbrk(0)
    libc.mallopt(M_TOP_PAD, HEAP_ROOM)
    libc.free(libc.malloc(HEAP_ROOM // 16))
    libc.mallopt(M_TOP_PAD, USUAL_TOP_PAD)
    begin, size = begin + -begin % mmap.PAGESIZE, libc.sbrk(0) - begin
    if size >= HEAP_ROOM:
        libc.madvise(begin, size - mmap.PAGESIZE, mmap.MADV_HUGEPAGE)


def leave_with_parent(number: int, parent: int = 0) -> None:
    """Have the kernel send this process a signal when its parent dies, however it dies (Linux).

    Of one that has died already the kernel says nothing: then this process, if it knows its `parent`, leaves at once.
    """
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if parent and os.getppid() != parent:
            os._exit(128 + number)


def host_id(part: dict[str, Any]) -> str:
    """What tells the machine of a run's part from others without naming it; "" if it is not known."""
    name = str(part.get("host", ""))
    return str(part.get("host_id") or (hashlib.sha256(name.encode()).hexdigest()[:8] if name else ""))


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def when(moment: str | None) -> str:
    """A moment that `now` wrote down, for people: 2026-01-02 03:04."""
    try:
        return f"{datetime.fromisoformat(moment):%Y-%m-%d %H:%M}" if moment else ""
    except (TypeError, ValueError):
        return "?"


def describe() -> dict[str, Any]:
    """Where a part of a run was computed; the promise of equal bits holds while this stays the same."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": psutil.Process().create_time(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": cores(),
        "started": now(),
        "clock": time.time(),
    }


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.processor()
    except OSError:
        return platform.processor()


def git_commit(folder: Path) -> str | None:
    """Of the checkout that the folder is in, if it is in one."""
    try:
        words = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        return subprocess.run(words, capture_output=True, text=True, timeout=5).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
