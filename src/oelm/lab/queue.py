"""The queue: one process per run, a few side by side; finished runs are skipped, unfinished ones resumed.

The queue has no state of its own. What is to be done, what came of a run, whether somebody else is at
it: all is read from the run folders, so a killed queue that is started again loses nothing, and the
folder's lock keeps any run from being done twice.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from oelm.files import is_locked, lock_file
from oelm.lab.gpus import GpuPool
from oelm.lab.plan import Plan, PlannedRun
from oelm.lab.score import score_in
from oelm.machine import cores, leave_with_parent

POLL_SECONDS = 0.2
MARK = ".queue-"
"""A file of this name and the process number lies beside the runs, locked while the queue is at work."""
MAX_CRASHES = 3
"""Times a run may die without having come further before the queue gives it up."""
ASKED_TO_LEAVE = {128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGUSR1, -signal.SIGTERM}
STOP_SECONDS = 60.0
"""How long runs may take to save when the queue is stopped."""


@dataclass
class Worker:
    run: PlannedRun
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    gpus: list[int]
    started: float

    def outcome(self) -> dict[str, Any]:
        """What this process wrote about the run's end; nothing if it died before it could."""
        try:
            written = self.run.folder.summary.stat().st_mtime
        except OSError:
            return {}
        return (self.run.folder.read_summary() or {}) if written >= self.started else {}

    def last_words(self) -> str:
        """Why it ended, in one line."""
        text = self._said()
        own = re.findall(r"^oelm: (?:error: )?(.*)$", text, re.M)
        if own:
            return own[0]
        last = (text.strip().splitlines() or ["no message"])[-1].strip()
        return self.first_to_die() or f"{last} (exit code {self.process.returncode})"

    def first_to_die(self) -> str:
        """Under torchrun, the process that died first and took the others along; "" if they were asked to leave."""
        said = self._said()
        report = said[max(0, said.find("Failures:")) :] if "Root Cause" in said else ""
        deaths = re.findall(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", report, re.S)
        # One that was killed took along those that then failed, in whatever order torchrun saw them.
        causes = sorted((int(code) >= 0, -i, rank, code) for i, (rank, code) in enumerate(deaths))
        causes = [cause for cause in causes if int(cause[3]) not in ASKED_TO_LEAVE]
        return f"the process of rank {causes[0][2]} ended with exit code {causes[0][3]}" if causes else ""

    def _said(self) -> str:
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")


@dataclass
class Queue:
    """Runs what a plan still needs, `slots` at a time (or as many as GPUs can be had)."""

    plan: Plan
    slots: int
    gpus: GpuPool | None = None
    only: list[PlannedRun] | None = None
    say: Callable[[str], None] = lambda line: None
    working: list[Worker] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    _crashes: Counter[str] = field(default_factory=Counter)
    _crashed_at: dict[str, int] = field(default_factory=dict)
    _stopped: set[str] = field(default_factory=set)
    _micro_batch: dict[str, int] = field(default_factory=dict)
    _waiting_for: str = ""
    _began: float = field(default_factory=time.time)
    _noted: dict[str, float] = field(default_factory=dict)
    """When the last process of a run had ended here: what its folder said until then is dealt with."""

    def run(self, watch: Callable[[], None] = lambda: None) -> dict[str, str]:
        """Until nothing is left to do; returns the reason of each run that failed. Ctrl-C or SIGTERM ends it."""
        old = signal.signal(signal.SIGTERM, _interrupt)
        place = (self.only or self.plan.runs)[0].folder.path.parent
        mark = place / f"{MARK}{os.getpid()}"
        try:
            place.mkdir(parents=True, exist_ok=True)
            for litter in [m for m in place.glob(f"{MARK}*") if not is_locked(m)]:  # of queues that were killed
                litter.unlink(missing_ok=True)
            with lock_file(mark, "", f"pid {os.getpid()} on {os.uname().nodename}", remove=True):
                self._work(watch)
        except KeyboardInterrupt:
            self.stop()
            raise
        finally:
            signal.signal(signal.SIGTERM, old)
        return self.failures

    def _work(self, watch: Callable[[], None]) -> None:
        while self.working or self._todo():
            if len(self.working) < self.slots:  # else there is nothing to look for, and looking reads every run
                self._start_what_fits()
            for worker in [w for w in self.working if w.process.poll() is not None]:
                self._take_note(worker)
            watch()
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Ask every run to save and leave; what has not after a minute is killed (and can be resumed)."""
        for worker in self.working:
            worker.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self.working:
            try:
                worker.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(worker.process.pid, signal.SIGKILL)
                worker.process.wait()

    def _todo(self) -> list[PlannedRun]:
        """Runs that are neither finished nor given up nor already being worked on by this queue."""
        runs = self.plan.runs if self.only is None else self.only
        busy = {worker.run.id for worker in self.working} | self.failures.keys() | self._stopped
        return [run for run in runs if run.id not in busy and not self._over(run)]

    def _over(self, run: PlannedRun) -> bool:
        """Finished; or diverged, before or in another queue; or asked to stop by somebody since this queue began."""
        summary, since = run.folder.read_summary() or {}, self._noted.get(run.id, self._began)
        if summary.get("retry") == "never":
            self._give_up(run, f"{summary.get('reason')} (to try it again, remove {run.folder.path})")
        elif summary.get("state") == "stopped" and run.folder.summary.stat().st_mtime > since:
            self._stopped.add(run.id)
            self.say(f"{run.id}: stopped by somebody, left alone")
        return run.id in self.failures or run.id in self._stopped or summary.get("state") == "finished"

    def _give_up(self, run: PlannedRun, reason: str) -> None:
        self.failures[run.id] = reason
        self.plan.given_up.add(run.id)
        self.say(f"{run.id}: FAILED: {reason}")

    def _start_what_fits(self) -> None:
        for run in self._todo():
            if len(self.working) >= self.slots:
                return
            if run.folder.alive():  # another queue, or a run that is still leaving
                continue
            gpus = self._gpus_for(run)
            if gpus is None:
                return
            self.working.append(self._start(run, gpus))

    def _gpus_for(self, run: PlannedRun) -> list[int] | None:
        if self.gpus is None:
            return []
        taken = self.gpus.take(run.processes)
        reason = "" if taken else "waiting for " + "; ".join(self.gpus.waiting_for or ["enough free GPUs"])
        if reason and re.sub(r"\d+ of", "", reason) != re.sub(r"\d+ of", "", self._waiting_for):
            self.say(f"{run.id}: {reason}")
        self._waiting_for = reason
        return taken

    def _start(self, run: PlannedRun, gpus: list[int]) -> Worker:
        threads = max(1, cores() // self.slots // run.processes)
        settings = {"threads": threads, **run.settings}
        if run.id in self._micro_batch:
            settings["micro_batch"] = self._micro_batch[run.id]
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the worker
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        begin, queue = time.time(), os.getpid()
        process = subprocess.Popen(
            train_command(run, settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the queue alone, which then asks its runs to leave
            preexec_fn=lambda: leave_with_parent(signal.SIGTERM, queue),
        )
        where = f" on GPU {','.join(map(str, gpus))}" if gpus else ""
        self.say(f"{run.id}: {'resumed' if run.folder.last_step() else 'started'}{where} (pid {process.pid})")
        return Worker(run, process, errors, gpus, begin)

    def _take_note(self, worker: Worker) -> None:
        """A process ended: the run folder says whether the run did, and if not, whether to try again."""
        run = worker.run
        self.working.remove(worker)
        self._noted[run.id] = time.time()
        if self.gpus:
            self.gpus.give_back(worker.gpus)
        summary = worker.outcome()
        state, code = summary.get("state"), worker.process.returncode
        if state == "finished":
            score = score_in(summary)
            self.say(f"{run.id}: finished, val {score.label} {score.text(score.of(summary, 'val'))}")
        elif (state == "stopped" or code in ASKED_TO_LEAVE) and not worker.first_to_die():
            self._stopped.add(run.id)
            self.say(f"{run.id}: stopped at step {run.folder.last_step():,}, as asked")
        elif code == 2 and (run.folder.alive() or run.folder.finished()):
            self.say(f"{run.id}: another process has taken it")
        elif code == 2 or (state == "failed" and summary.get("retry") in (None, "", "never")):
            self._give_up(run, summary.get("reason") or worker.last_words())
        else:
            self._try_again(worker, summary)

    def _try_again(self, worker: Worker, summary: dict[str, object]) -> None:
        run, reason = worker.run, worker.first_to_die() or str(summary.get("reason") or worker.last_words())
        if run.folder.last_step() > self._crashed_at.get(run.id, 0):
            self._crashes[run.id] = 0  # it had come further since
        self._crashed_at[run.id] = run.folder.last_step()
        self._crashes[run.id] += 1
        if summary.get("retry") == "smaller":
            config = run.config
            micro = self._micro_batch.get(run.id, config.micro_batch or config.batch_size)
            if micro % 2:
                self._give_up(run, f"out of memory even with a micro-batch of {micro}")
                return
            self._micro_batch[run.id] = micro // 2
            self.say(f"{run.id}: out of memory: trying again with micro-batches of {micro // 2} instead of {micro}")
        elif self._crashes[run.id] > MAX_CRASHES:
            self._give_up(run, f"died {self._crashes[run.id]} times; the last time: {reason}")
        else:
            self.say(f"{run.id}: died ({reason}); trying again ({self._crashes[run.id]} of {MAX_CRASHES})")


def train_command(run: PlannedRun, settings: dict[str, object]) -> list[str]:
    """`oelm train`, under torchrun on a free port when the run has several processes."""
    launcher = ["-m", "oelm"]
    if run.processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={run.processes}", *launcher]
    flags = [f"--{key}={value}" for key, value in settings.items()]
    return [sys.executable, *launcher, "train", "--resume=auto", *flags]


def running_queues(root: Path) -> list[int]:
    """Process numbers of the queues at work on this machine in `root` or below."""
    found = []
    for mark in (path for depth in ("", "*/", "*/*/") for path in root.glob(f"{depth}{MARK}*")):
        note = mark.read_text(errors="replace")
        if is_locked(mark) and note.endswith(f" on {os.uname().nodename}"):
            found.append(int(mark.name.removeprefix(MARK)))
    return found


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
