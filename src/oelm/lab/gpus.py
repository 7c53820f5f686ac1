"""GPUs that other people use too: which are free, and a lease so that two queues never take the same one.

NVML is asked in one place (`read_gpus`); everything else works on what it returned.
"""

import fcntl
import getpass
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from oelm.errors import UserError

MAX_MEMORY_SHARE = 0.05
MAX_UTILISATION = 10
"""Per cent; a GPU above either is somebody's."""
QUIET_SECONDS = 30.0


@dataclass(frozen=True)
class Gpu:
    """One reading of one GPU."""

    index: int
    uuid: str
    memory_share: float
    utilisation: int
    users: tuple[str, ...] = ()
    """Who has processes on it."""

    @property
    def quiet(self) -> bool:
        return self.memory_share <= MAX_MEMORY_SHARE and self.utilisation <= MAX_UTILISATION


def read_gpus() -> list[Gpu]:
    """All GPUs of the machine as NVML sees them now; none without a driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    found = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError):  # a GPU that fell off the bus is not free; the others may be
                found.append(_read_gpu(pynvml, index))
    finally:
        pynvml.nvmlShutdown()
    return found


def _read_gpu(pynvml, index: int) -> Gpu:  # type: ignore[no-untyped-def]  # the driver's own module
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    users = set()
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        with suppress(psutil.Error):
            users.add(psutil.Process(process.pid).username())
    utilisation = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    return Gpu(index, str(uuid), memory.used / memory.total, utilisation, tuple(sorted(users)))


@dataclass
class GpuPool:
    """The GPUs a queue may take: when quiet for long enough, and one lease at a time."""

    allowed: list[int] | None
    """None: any of the machine's."""
    read: Callable[[], list[Gpu]] = read_gpus
    clock: Callable[[], float] = time.monotonic
    quiet_seconds: float = QUIET_SECONDS
    leases: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / "oelm-gpu-leases")
    _quiet_since: dict[str, float] = field(default_factory=dict)
    _held: dict[int, tuple[str, IO[str]]] = field(default_factory=dict)
    waiting_for: list[str] = field(default_factory=list)
    """What the last `take` waited for, in words."""

    def __post_init__(self) -> None:
        known = [gpu.index for gpu in self.read()]
        for index in self.allowed or []:
            if index not in known:
                have = ", ".join(map(str, known)) or "none"
                raise UserError(f"--gpus {index}: there is no such GPU here; this machine has: {have}")
        if self.allowed is None and not known:
            raise UserError("--gpus auto: no GPU was found here; leave it out to use CPU slots")
        self.count = len(known) if self.allowed is None else len(set(self.allowed))

    def take(self, count: int) -> list[int] | None:
        """Lease `count` GPUs that have been quiet long enough, or none at all; ask again later for more."""
        now, candidates, self.waiting_for = self.clock(), [], []
        for gpu in self.read():
            if self.allowed is not None and gpu.index not in self.allowed:
                continue
            if gpu.index in self._held:
                continue
            if not gpu.quiet:
                self._quiet_since.pop(gpu.uuid, None)
                who = f" by {', '.join(gpu.users)}" if gpu.users else ""
                self.waiting_for.append(
                    f"GPU {gpu.index} (used{who}: {gpu.memory_share:.0%} memory, {gpu.utilisation} % busy)"
                )
                continue
            quiet = now - self._quiet_since.setdefault(gpu.uuid, now)
            if quiet < self.quiet_seconds:
                self.waiting_for.append(f"GPU {gpu.index} (quiet for {quiet:.0f} of {self.quiet_seconds:.0f} s)")
            else:
                candidates.append(gpu)
        taken: list[int] = []
        for gpu in candidates:
            if len(taken) < count and self._lease(gpu):
                taken.append(gpu.index)
        if len(taken) == count:
            return taken
        self._release(taken)
        return None

    def give_back(self, indices: list[int]) -> None:
        """End the lease of GPUs that a run was on: they must be quiet anew before they are taken again."""
        for index in indices:
            self._quiet_since.pop(self._held[index][0], None)
        self._release(indices)

    def _release(self, indices: list[int]) -> None:
        for index in indices:
            _, lease = self._held.pop(index)
            with suppress(OSError):
                os.ftruncate(lease.fileno(), 0)
            lease.close()

    def _lease(self, gpu: Gpu) -> bool:
        """A lock file per GPU, shared by everybody on the machine; the kernel drops it with the queue."""
        self.leases.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            self.leases.chmod(0o1777)
        path = self.leases / gpu.uuid.replace("/", "_")
        old = os.umask(0)
        try:
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
            file = os.fdopen(os.open(path, os.O_RDWR), "r+")  # kernels may refuse O_CREAT on what another user made
        except OSError:
            self.waiting_for.append(f"GPU {gpu.index} (its lease {path} cannot be opened)")
            return False
        finally:
            os.umask(old)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.waiting_for.append(f"GPU {gpu.index} (leased by {file.read(100).strip() or 'another queue'})")
            file.close()
            return False
        file.truncate(0)
        file.write(f"{getpass.getuser()}, pid {os.getpid()}")
        file.flush()
        self._held[gpu.index] = (gpu.uuid, file)
        return True


def parse_gpus(text: str) -> list[int] | None:
    """`auto` or `2,3`."""
    if text == "auto":
        return None
    try:
        numbers = [int(word) for word in text.split(",")]
        if min(numbers) < 0:
            raise ValueError
        return numbers
    except ValueError:
        raise UserError(f"--gpus {text}: give auto or numbers such as 2,3") from None
