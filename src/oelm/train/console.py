"""What a run says: lines in training.log and on the terminal, and a progress bar on a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Reporter:
    """The leading process's voice; the others are silent."""

    def __init__(self, log: Path | None) -> None:
        self._log = open(log, "a", encoding="utf-8") if log else None  # noqa: SIM115  # lives as long as the run
        self._console = Console(highlight=False, soft_wrap=True) if log else None
        self._progress: Progress | None = None

    def say(self, text: str) -> None:
        if self._log and self._console:
            self._log.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n")
            self._log.flush()
            self._console.print(text, markup=False)

    @contextmanager
    def bar(self, total: int, start: int) -> Iterator[None]:
        """A progress bar while inside, on a terminal only."""
        if not self._console or not sys.stdout.isatty():
            yield
            return
        columns = ("{task.completed:,}/{task.total:,}", "{task.fields[note]}")
        with Progress(
            BarColumn(None), *(TextColumn(c) for c in columns), TimeElapsedColumn(), TimeRemainingColumn(),
            console=self._console, refresh_per_second=4,
        ) as self._progress:  # fmt: skip
            self._task = self._progress.add_task("train", total=total, completed=start, note="")
            yield
        self._progress = None

    def advance(self, step: int, note: str) -> None:
        if self._progress:
            self._progress.update(self._task, completed=step, note=note)

    def waits_for(self, what: str) -> None:
        """Have the bar say what is done while no step is."""
        if self._progress:
            self._progress.update(self._task, note=what)

    def close(self) -> None:
        if self._log:
            self._log.close()
