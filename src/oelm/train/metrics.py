"""Metrics: an append-only JSONL file in which every step stands once, mirrored to TensorBoard."""

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


class Metrics:
    """Writer for one run. `cut_to` on resume drops what lies behind the checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "ab")  # noqa: SIM115  # lives as long as the run
        from tensorboardX import SummaryWriter

        self._flushed = 0.0
        self._board = SummaryWriter(str(path.parent), flush_secs=10)

    def write(self, kind: str, step: int, **values: float | int | None) -> None:
        self._file.write(json.dumps({"kind": kind, "step": step, **values}).encode() + b"\n")
        if time.monotonic() - self._flushed > 1:  # people watch this file
            self.flush()
        for name in ("loss", "ppl", "bpb", "lr", "grad_norm"):
            if values.get(name) is not None and (kind != "train" or step % 10 == 0):
                self._board.add_scalar(f"{kind}/{name}", values[name], step)

    def flush(self, sync: bool = False) -> None:
        self._file.flush()
        self._flushed = time.monotonic()
        if sync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        self._board.close()


def perplexity(loss: float) -> float:
    """Of a loss in nats; one beyond all bounds stays a number."""
    return math.exp(min(loss, 700.0))


def macro_f1(labels: "np.ndarray", answers: "np.ndarray", classes: int) -> float:
    """Mean over the classes of the harmonic mean of precision and recall; a class never met nor told counts 0."""
    import numpy as np

    hits = np.bincount(labels[labels == answers], minlength=classes)
    both = np.bincount(labels, minlength=classes) + np.bincount(answers, minlength=classes)
    return float(np.mean(2 * hits / np.maximum(both, 1)))


def cut_to(path: Path, step: int, evaluated: bool) -> None:
    """Drop every record behind a checkpoint, and a last line that was cut off in the middle.

    Behind it lies what has a later step and, if the evaluation of `step` was not done, what it had
    already written.
    """
    if not path.exists():
        return
    keep = 0
    with open(path, "rb+") as file:
        for line in file:
            record = parse(line)
            if record is None or record["step"] > step:
                break
            if record["step"] == step and record["kind"] != "train" and not evaluated:
                break
            keep += len(line)
        file.truncate(keep)


def whole_until(path: Path) -> int:
    """The last step up to which every training step stands in the file, once and in order."""
    step = 0
    for record in read(path, "train"):
        if record["step"] != step + 1 or not isinstance(record.get("seconds"), float):
            break
        step += 1
    return step


def read(path: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """Whole records of a metrics file, of one kind or all; a line still being written is left out."""
    try:
        with open(path, "rb") as file:
            for line in file:
                record = parse(line)
                if record is not None and kind in (None, record["kind"]):
                    yield record
    except FileNotFoundError:
        return


def parse(line: bytes) -> dict[str, Any] | None:
    """A whole record with its kind and step, or None."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
        whole = isinstance(record, dict) and isinstance(record.get("step"), int)
        whole = whole and isinstance(record.get("kind"), str)
        return record if whole else None
    except (ValueError, RecursionError):
        return None
