"""What people look at while runs go on: the progress table, live or once; logs; stopping; comparing curves."""

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from oelm.errors import UserError
from oelm.lab.status import LabWatcher, RunStatus, find_runs, watch_folder
from oelm.train import metrics
from oelm.train.folder import RunFolder

STYLES = {"finished": "green", "running": "bold", "failed": "red", "died": "red", "waiting": "dim", "queued": "dim"}


def make_console() -> Console:
    """As wide as the terminal; wide enough for any table elsewhere."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def show_status(root: Path, watch: bool, as_json: bool) -> None:
    watcher = watch_folder(root)
    console = make_console()
    if as_json:
        print(json.dumps([asdict(status) for status in watcher.look()], indent=2))
        return
    found = watcher.look()
    if not found:
        raise UserError(f"no run below {root}: start one with oelm train or oelm run")
    if not watch:
        console.print(status_table(found))
        return
    with Live(status_table(found), console=console, auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(1)
            live.update(status_table(watcher.look()), refresh=True)


def status_table(found: list[RunStatus]) -> Table:
    """The published progress table. GPU, PID and gap columns appear when a run has one."""
    columns: dict[str, Callable[[RunStatus], str]] = {
        "run": lambda s: s.id,
        "arm": lambda s: s.arm,
        "state": lambda s: s.state,
        "step": lambda s: f"{s.step:,}/{_short(s.max_steps)}",
        "%": lambda s: f"{s.step / s.max_steps:.0%}" if s.max_steps else "",
        "started": lambda s: _clock(s.started),
        "finished": lambda s: _clock(s.finished),
        "elapsed": lambda s: _span(s.elapsed),
        "left": lambda s: _span(s.left),
        "loss": lambda s: _number(s.loss, 3),
        "val PPL": lambda s: _number(s.val_ppl, 2),
        "gap": lambda s: f"{s.gap:+.1%}" if s.gap is not None else "",
        "GPU": lambda s: s.gpu or "",
        "PID": lambda s: str(s.pid or ""),
        "why": lambda s: s.reason,
    }
    optional = {"gap", "GPU", "PID", "why", "left", "finished"}
    left_aligned = {"run", "arm", "state", "why"}
    table = Table(box=None, header_style="bold", pad_edge=False)
    shown = {}
    for heading, cell in columns.items():
        if heading not in optional or any(cell(status) for status in found):
            wraps = heading in ("why", "run")
            table.add_column(heading, justify="left" if heading in left_aligned else "right", no_wrap=not wraps)
            shown[heading] = cell
    for status in found:
        table.add_row(*(cell(status) for cell in shown.values()), style=STYLES.get(status.state, ""))
    return table


@contextmanager
def watching(console: Console, watcher: LabWatcher) -> Iterator[Callable[[], None]]:
    """For a queue: a live table on a terminal, nothing elsewhere (the queue's own lines say it)."""
    if not sys.stdout.isatty():
        yield lambda: None
        return
    last = 0.0
    with Live(status_table(watcher.look()), console=console, auto_refresh=False) as live:

        def look() -> None:
            nonlocal last
            if time.monotonic() - last > 0.5:
                last = time.monotonic()
                live.update(status_table(watcher.look()), refresh=True)

        yield look
        live.update(status_table(watcher.look()), refresh=True)


def show_log(run: Path, follow: bool) -> None:
    """The run's training.log; with `follow`, on and on until the run has left."""
    folder = RunFolder(run)
    folder.config()
    if not folder.log.exists():
        raise UserError(f"{folder.log} is not there yet: the run has not started to train")
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
        os.kill(_holder(folder), signal.SIGTERM)
        alive.append(folder)
    deadline = time.monotonic() + wait
    for folder in alive:
        while folder.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = "still saving" if folder.alive() else f"stopped at step {folder.last_step():,}"
        console.print(f"{folder.path}: {left}")


def _holder(folder: RunFolder) -> int:
    """The process that holds the run's lock: it wrote its number there while holding it, so it cannot be stale."""
    note = folder.lock.read_text()
    pid, host = re.search(r"pid (\d+)", note), re.search(r" on ([^,]+)", note)
    if pid is None:
        raise UserError(f"{folder.lock} does not say which process holds it")
    if host and host[1] != os.uname().nodename:
        raise UserError(f"{folder.path} runs on {host[1]}: stop it there, or with scancel")
    return int(pid[1])


def running_below(root: Path) -> list[Path]:
    return [path for path in find_runs(root) if RunFolder(path).alive()]


def compare_runs(runs: list[Path]) -> None:
    """A table of validation losses at common steps, and the curves as a chart of characters."""
    console = make_console()
    curves: dict[str, dict[int, float]] = {}
    for run in runs:
        RunFolder(run).config()
        curves[run.name] = {
            r["step"]: math.exp(min(r["loss"], 700.0)) for r in metrics.read(RunFolder(run).metrics, "val")
        }
        if not curves[run.name]:
            raise UserError(f"{run} has no validation yet: there is nothing to compare")
    common = sorted(set.intersection(*(set(curve) for curve in curves.values())))
    if not common:
        raise UserError("the runs have no validated step in common: compare runs with the same val_interval")
    shown = common if len(common) <= 12 else [common[round(i * (len(common) - 1) / 11)] for i in range(12)]
    table = Table("step", box=None, header_style="bold", pad_edge=False)
    names = list(curves)
    for name in names:
        table.add_column(f"{name} PPL", justify="right")
    for name in names[1:]:
        table.add_column(f"{name} vs {names[0]}", justify="right")
    for step in shown:
        gaps = (f"{curves[name][step] / curves[names[0]][step] - 1:+.1%}" for name in names[1:])
        table.add_row(f"{step:,}", *(f"{curves[name][step]:.3f}" for name in names), *gaps)
    console.print(table)
    console.print(chart(curves))


def chart(curves: dict[str, dict[int, float]], width: int = 72, height: int = 16) -> str:
    """Curves of perplexity (logarithmic) over steps."""
    marks = "ox+*#@%&"
    points = [(step, math.log(ppl)) for curve in curves.values() for step, ppl in curve.items()]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    grid = [[" "] * width for _ in range(height)]
    for mark, curve in zip(marks * len(curves), curves.values(), strict=False):
        for step, ppl in curve.items():
            column = round((step - left) / max(1, right - left) * (width - 1))
            row = round((high - math.log(ppl)) / max(1e-9, high - low) * (height - 1))
            grid[row][column] = mark
    labels = [f"{math.exp(high):10.2f}", *[" " * 10] * (height - 2), f"{math.exp(low):10.2f}"]
    lines = [f"{label} ┤{''.join(row)}" for label, row in zip(labels, grid, strict=True)]
    lines.append(" " * 11 + "└" + "─" * width)
    lines.append(" " * 12 + f"{left:,}".ljust(width - 10) + f"{right:,}".rjust(10))
    lines.append(" " * 12 + "   ".join(f"{m} {n}" for m, n in zip(marks * len(curves), curves, strict=False)))
    return "\n".join(lines)


def _clock(moment: str | None) -> str:
    return f"{datetime.fromisoformat(moment):%m-%d %H:%M}" if moment else ""


def _span(seconds: float | None) -> str:
    if seconds is None:
        return ""
    whole = round(seconds)
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m" if whole >= 3600 else f"{whole // 60}m {whole % 60:02d}s"


def _number(value: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" if value is not None else ""


def _short(steps: int) -> str:
    return f"{steps // 1000}K" if steps >= 10_000 and steps % 1000 == 0 else f"{steps:,}"
