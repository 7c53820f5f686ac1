"""The machine that a run is on: its cores, and what must stay the same for equal bits."""

import os
import platform
import socket
import time
from datetime import datetime
from typing import Any

import psutil


def cores() -> int:
    """CPU cores that this process may use: fewer than the machine has in a container or under Slurm."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def describe() -> dict[str, Any]:
    """Where a part of a run was computed; the promise of equal bits holds while this stays the same."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": psutil.Process().create_time(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": cores(),
        "started": now(),
        "clock": time.time(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.processor()
    except OSError:
        return platform.processor()
