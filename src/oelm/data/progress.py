"""What `oelm prepare` shows: a bar with rate and time left on a terminal, now and then a line elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from oelm.data.prepare import Progress as ProgressCall
from oelm.data.tokens import SPLITS, data_root
from oelm.tables import table

SECONDS_BETWEEN_LINES = 10


@contextmanager
def progress_bar(quiet: bool = False) -> Iterator[ProgressCall]:
    console = Console(stderr=True)
    if quiet or not sys.stderr.isatty():
        yield _lines(quiet)
        return
    columns = (TextColumn("{task.description}"), BarColumn(None), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        tasks: dict[str, Any] = {}

        def show(doing: str, done: int, total: int) -> None:
            if doing not in tasks:
                tasks[doing] = bar.add_task(doing, total=total)
            bar.update(tasks[doing], completed=done)

        yield show


def _lines(quiet: bool) -> ProgressCall:
    begin = last = time.monotonic()

    def show(doing: str, done: int, total: int) -> None:
        nonlocal last
        if quiet or time.monotonic() - last < SECONDS_BETWEEN_LINES:
            return
        last = time.monotonic()
        rate = done / (last - begin) / 1e6
        print(f"{doing}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {rate:,.1f} MB/s", file=sys.stderr, flush=True)

    return show


def show_meta(meta: dict[str, Any], out: Path | None) -> None:
    kinds = ("documents", "tokens", "bytes")
    console = Console(highlight=False)
    rows = [[split, *(f"{meta['splits'][split][key]:,}" for key in kinds)] for split in SPLITS]
    console.print(table(("split", *kinds), rows))
    console.print(
        f"{meta['tokenizer']} ({meta['vocab_size']:,} tokens, {meta['dtype']}) in {out or data_root() / meta['name']}",
        markup=False,
    )
    for split, share in meta["drawn_from_train"].items():
        console.print(f"{split} was drawn from the training documents ({share:.1%} of them)")
    if meta["dropped_from_train_or_test"]:
        console.print(f"{meta['dropped_from_train_or_test']:,} documents stood in another split too and were dropped")
    if "labels" in meta:
        for i, label in enumerate(meta["labels"]):
            counts = ", ".join(f"{split} {meta['splits'][split]['labels'][i]:,}" for split in SPLITS)
            console.print(f"label {i} = {label}: {counts}", markup=False)
        if meta["left_out"]:
            many = 20 * sum(meta["left_out"].values()) > sum(meta["splits"][split]["documents"] for split in SPLITS)
            console.print(f"{'WARNING: ' if many else ''}left out: {meta['left_out_shown']}", markup=False)
