"""What people look at while runs go on: the progress table, live or once; logs; stopping."""

import json
import os
import signal
import sys
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.live import Live
from rich.table import Table

from oelm.errors import UserError
from oelm.lab.queue import running_queues
from oelm.lab.score import signed
from oelm.lab.status import LabWatcher, RunStatus, find_runs
from oelm.machine import when
from oelm.tables import fitting
from oelm.train.folder import RunFolder

STYLES = {
    "finished": "green",
    "running": "bold",
    "failed": "red",
    "died": "red",
    "unreadable": "red",
    "waiting": "dim",
    "queued": "dim",
}


class _PipedConsole(Console):
    def on_broken_pipe(self) -> NoReturn:
        """A reader that has seen enough is not a verdict: rich would leave with 1, which means FAIL."""
        raise BrokenPipeError


def make_console() -> Console:
    """As wide as the terminal; wide enough for any table elsewhere."""
    return _PipedConsole(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)


def show_status(root: Path, watch: bool, as_json: bool) -> None:
    watcher = LabWatcher(root)
    console = make_console()
    found = watcher.look()
    if as_json:
        print(json.dumps([asdict(status) for status in found], indent=2))
        return
    if not found:
        raise UserError(f"no run below {root}: start one with oelm train or oelm run")
    if not watch:
        console.print(status_table(found, console.width))
        return
    with quiet_keys(), Live(live_table(found, console), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(1)
            live.update(live_table(watcher.look(), console), refresh=True)


COLUMNS: dict[str, Callable[[RunStatus], str]] = {
    "run": lambda s: s.id if len(s.id) <= LONGEST_NAME else s.id[: LONGEST_NAME - 1] + "…",
    "arm": lambda s: s.arm,
    "state": lambda s: s.state,
    "step": lambda s: f"{s.step:,}/{_short(s.max_steps) if s.max_steps else '?'}",
    "%": lambda s: f"{s.step / s.max_steps:.0%}" if s.max_steps else "",
    "started": lambda s: when(s.started)[-11:],
    "finished": lambda s: when(s.finished)[-11:],
    "elapsed": lambda s: _span(s.elapsed),
    "left": lambda s: _span(s.left),
    "loss": lambda s: _number(s.loss, 3),
    "val PPL": lambda s: _number(s.val_ppl, 2),
    "val acc": lambda s: f"{s.val_accuracy:.2%}" if s.val_accuracy is not None else "",
    "gap": lambda s: _gap(s),
    "GPU": lambda s: s.gpu or "",
    "PID": lambda s: str(s.pid or ""),
    "why": lambda s: s.reason if s.state != "stopped" else "",
}
LONGEST_NAME = 60
OPTIONAL = ("val acc", "gap", "GPU", "PID", "why", "left", "finished")
"""Shown when a run has one."""
LEAST_REASON = 14
"""Columns that a reason takes, at least: it is wrapped."""
LESSER = ("PID", "started", "elapsed", "finished", "%", "arm", "GPU", "loss", "left", "step")
"""Left out, in this order, where the terminal is too narrow."""


def status_table(found: list[RunStatus], width: int = 200) -> Table:
    """The published progress table, as wide as it may be."""
    cells = {heading: [cell(status) for status in found] for heading, cell in COLUMNS.items()}
    shown = [heading for heading in COLUMNS if heading not in OPTIONAL or any(cells[heading])]
    if "val acc" in shown and not any(cells["val PPL"]):
        shown.remove("val PPL")
    widths = {heading: max(len(heading), *map(len, cells[heading])) for heading in shown}
    if "why" in shown:
        widths["why"] = LEAST_REASON
    shown = fitting(widths, LESSER, width)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in shown:
        left = heading in ("run", "arm", "state", "why")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "why",
                         overflow="ellipsis" if heading == "run" else "fold")  # fmt: skip
    for row, status in enumerate(found):
        table.add_row(*(cells[heading][row] for heading in shown), style=STYLES.get(status.state, ""))
    return table


def live_table(found: list[RunStatus], console: Console) -> Table:
    """As many rows as the screen has; runs that are over, then those that wait, give way to what goes on."""
    room = console.height - 4
    dispensable = [s for state in ("finished", "stopped", "waiting", "queued") for s in found if s.state == state]
    hidden = dispensable[: max(0, len(found) - room)]
    table = status_table([s for s in found if s not in hidden], console.width)
    if hidden:
        counts = Counter(status.state for status in hidden)
        table.caption = "and " + ", ".join(f"{count} {state}" for state, count in counts.items())
        table.caption_justify = "left"
    return table


@contextmanager
def quiet_keys() -> Iterator[None]:
    """Keep the terminal from writing ^C into a live table."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextmanager
def watching(console: Console, watcher: LabWatcher) -> Iterator[Callable[[], None]]:
    """For a queue: a live table on a terminal, below the queue's own lines; elsewhere the lines alone."""
    if not sys.stdout.isatty():
        yield lambda: None
        return
    last = 0.0
    with quiet_keys(), Live(live_table(watcher.look(), console), console=console, auto_refresh=False) as live:

        def look() -> None:
            nonlocal last
            if time.monotonic() - last > 0.5:
                last = time.monotonic()
                live.update(live_table(watcher.look(), console), refresh=True)

        try:
            yield look
        finally:
            live.update(live_table(watcher.look(), console), refresh=True)


def show_log(run: Path, follow: bool) -> None:
    """The run's training.log; with `follow`, on and on until the run has left."""
    folder = RunFolder(run)
    folder.config()
    if not folder.log.exists():
        state = "it was packed without its log" if folder.finished() else "the run has not started to train"
        raise UserError(f"{folder.log} is not there: {state}")
    with open(folder.log, encoding="utf-8", errors="replace") as file:
        while True:
            text = file.read()
            sys.stdout.write(text)
            sys.stdout.flush()
            if not follow or (not text and not folder.alive()):
                return
            time.sleep(0.2)


def stop_runs(runs: list[Path], wait: float = 60.0) -> None:
    """Ask runs to save and leave, and wait until they have."""
    console = make_console()
    alive = []
    for run in runs:
        folder = RunFolder(run)
        folder.config()
        if not folder.alive():
            console.print(f"{run}: not running")
            continue
        pid, host = folder.holder()
        if pid is None:
            raise UserError(f"{folder.lock} does not say which process holds it")
        if host != os.uname().nodename:
            raise UserError(f"{folder.path} runs on {host}: stop it there, or with scancel")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        alive.append(folder)
    deadline = time.monotonic() + wait
    for folder in alive:
        while folder.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = "still saving" if folder.alive() else f"stopped at step {folder.last_step():,}"
        console.print(f"{folder.path}: {left}")


def stop_everything(roots: list[Path]) -> None:
    """Every queue and every run below `roots`; queues first, so that they start nothing new."""
    for root in roots:
        find_runs(root)  # refuses what is no folder before anything is stopped
    queues = [queue for root in roots for queue in running_queues(root)]
    for pid in queues:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            make_console().print(f"queue {pid}: asked to stop")
    runs = [path for root in roots for path in find_runs(root) if RunFolder(path).alive()]
    stop_runs(runs)
    if not queues and not runs:
        print(f"nothing is running below {', '.join(map(str, roots))}")


def _span(seconds: float | None) -> str:
    if seconds is None:
        return ""
    whole = round(seconds)
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m" if whole >= 3600 else f"{whole // 60}m {whole % 60:02d}s"


def _gap(status: RunStatus) -> str:
    if status.gap is None:
        return ""
    unit = "%" if status.val_accuracy is None else " points"
    return f"{signed(100 * status.gap)}{unit}"


def _number(value: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" if value is not None else ""


def _short(steps: int) -> str:
    return f"{steps // 1000}K" if steps >= 10_000 and steps % 1000 == 0 else f"{steps:,}"
