"""Where runs are, read from their folders alone."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oelm.config import RunConfig
from oelm.train.folder import RunFolder

TAIL_BYTES = 64 << 10


@dataclass(frozen=True)
class RunStatus:
    state: str
    """waiting, running, finished, stopped, failed or died."""
    step: int = 0
    loss: float | None = None
    val_ppl: float | None = None
    reason: str = ""


def status(config: RunConfig) -> RunStatus:
    folder = RunFolder(config.folder)
    if not folder.config_file.exists():
        return RunStatus("waiting")
    records = _tail(folder.metrics)
    newest = {record["kind"]: record for record in records}
    train, val = newest.get("train", {}), newest.get("val", {})
    summary = folder.read_summary() or {}
    state = "running" if folder.alive() else summary.get("state", "died")
    return RunStatus(state, train.get("step", 0), train.get("loss"), val.get("ppl"), summary.get("reason", ""))


def _tail(path: Path) -> list[dict[str, Any]]:
    """The last records of a metrics file, however long it is."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")[1 if size > TAIL_BYTES else 0 : -1]
        return [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return []
