"""The queue: one process per run, a few side by side, finished runs skipped and unfinished ones resumed."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from oelm.lab.plan import Plan, PlannedRun
from oelm.machine import cores
from oelm.train.folder import RunFolder

POLL_SECONDS = 0.25


@dataclass
class Worker:
    run: PlannedRun
    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def last_words(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.process.returncode}"


def run_queue(plan: Plan, slots: int, watch: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Run what is not finished, `slots` at a time; returns the reason of each run that failed.

    One failure does not stop the others. Ctrl-C asks every run to save and leave; started again, the
    queue goes on where it was.
    """
    waiting = [run for run in plan.runs if not RunFolder(run.config.folder).finished()]
    threads = max(1, cores() // slots)
    working: list[Worker] = []
    failures: dict[str, str] = {}
    try:
        while waiting or working:
            while waiting and len(working) < slots:
                working.append(_start(waiting.pop(0), threads))
            for worker in [w for w in working if w.process.poll() is not None]:
                working.remove(worker)
                if worker.process.returncode:
                    failures[worker.run.id] = worker.last_words()
            watch()
            time.sleep(POLL_SECONDS)
    except BaseException:
        for worker in working:
            worker.process.send_signal(signal.SIGTERM)
        for worker in working:
            worker.process.wait()
        raise
    return failures


def _start(run: PlannedRun, threads: int) -> Worker:
    settings = {"threads": threads, **run.settings}
    flags = [f"--{key}={value}" for key, value in settings.items()]
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the worker
    process = subprocess.Popen(
        [sys.executable, "-m", "oelm", "train", "--resume", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        start_new_session=True,  # Ctrl-C reaches the queue alone, which then asks its runs to leave
    )
    return Worker(run, process, errors)
