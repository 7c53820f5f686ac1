"""What became of one run: its folder read once, and what speaks against believing it."""

import zipfile
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from oelm.config import RunConfig
from oelm.lab.score import ACCURACY, Score, score_of
from oelm.lab.status import RunStatus
from oelm.train import metrics
from oelm.train.folder import RunFolder

NUMBERS = (
    "final_val_loss", "best_val_loss", "best_step", "tokens_seen", "epochs", "total_parameters",
    "trainable_parameters", "frozen_parameters", "median_step_seconds", "wall_seconds", "peak_memory_bytes",
    "checkpoint_bytes",
)  # fmt: skip
"""What the summary of a finished run must hold."""
BESIDE = ("test_bpb", "test_f1", "final_val_f1")
"""What it may hold and a report shows beside the score."""


@dataclass(frozen=True)
class Run:
    """One run folder, read once."""

    folder: RunFolder
    config: RunConfig
    status: RunStatus
    summary: dict[str, Any]

    @property
    def id(self) -> str:
        return self.status.id

    @property
    def finished(self) -> bool:
        return self.status.state == "finished"

    @property
    def diverged(self) -> bool:
        """Failed for its numbers, not for its machine: a result, and a bad one."""
        return self.status.state == "failed" and self.summary.get("retry") == "never"

    @property
    def arm(self) -> str:
        return self.config.arm

    @cached_property
    def measure(self) -> Score:
        return score_of(self.config)

    @property
    def has_test(self) -> bool:
        return self.summary.get("test_loss") is not None

    def score(self, split: str) -> float:
        """Of the final step; infinite for a run that diverged."""
        return self.measure.of(self.summary, split)

    @cached_property
    def environment(self) -> list[dict[str, Any]]:
        return self.folder.read_environment()

    @cached_property
    def data(self) -> dict[str, Any]:
        found = self.summary.get("data") or self.folder.read_data()
        return found if isinstance(found, dict) else {}

    @cached_property
    def records(self) -> dict[str, list[dict[str, Any]]]:
        """Metrics by kind; a record without a loss and a time says nothing."""
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for record in metrics.read(self.folder.metrics):
            if _is_number(record.get("loss")) and _is_number(record.get("seconds")):
                found[record["kind"]].append(record)
        return found

    @cached_property
    def step_seconds(self) -> np.ndarray:
        return np.array([record["seconds"] for record in self.records["train"]])

    @cached_property
    def curve(self) -> dict[int, float]:
        """Validation score by step."""
        key, made = self.measure.summary, self.measure.from_record
        return {record["step"]: made(record[key]) for record in self.records["val"] if _is_number(record.get(key))}

    @property
    def _tested(self) -> float | None:
        """The test split's score as it was written when it was measured."""
        key = self.measure.summary
        found = [record[key] for record in self.records["test"] if _is_number(record.get(key))]
        return self.measure.from_record(found[-1]) if found else None

    @cached_property
    def losses(self) -> dict[int, float]:
        """Validation loss by step."""
        return {record["step"]: record["loss"] for record in self.records["val"]}

    @cached_property
    def documents(self) -> np.ndarray | None:
        rows = _two_columns(self.folder.documents, "f")
        return rows if rows is not None and np.isfinite(rows).all() else None

    @cached_property
    def answers(self) -> np.ndarray | None:
        """Rows (label, answer) on the test split; None if they are not those of the summary."""
        rows = _two_columns(self.folder.answers, "i")
        if rows is None or not len(rows) or not ((rows >= 0) & (rows < self.config.labels)).all():
            return None
        return rows if abs((rows[:, 0] == rows[:, 1]).mean() - self.summary.get("test_accuracy", -1)) < 1e-9 else None

    def fault(self) -> str:
        """Why a finished run cannot be believed, in words; "" if nothing speaks against it."""
        if not self.finished:
            return ""
        needed = [f"final_val_{self.measure.summary}", *([f"test_{self.measure.summary}"] if self.has_test else [])]
        beside = [key for key in BESIDE if self.summary.get(key) is not None]
        for key in [*NUMBERS, *needed, *beside]:
            if not _is_number(self.summary.get(key)):
                return f"summary.json: {key} is {self.summary.get(key)!r}"
        if self.measure is ACCURACY and not all(0 <= self.summary[key] <= 1 for key in needed):
            return "summary.json: an accuracy lies between 0 and 1"
        if self.measure is ACCURACY and self.has_test and self.answers is None:
            return f"{self.folder.answers.name} is missing, or not what summary.json says"
        config = self.config
        same = {
            "model_type": config.model_type,
            "dataset": config.dataset,
            "seed": config.seed,
            "steps": config.max_steps,
        }
        for key, value in same.items():
            if self.summary.get(key) != value:
                return f"summary.json says {key} {self.summary.get(key)!r}, config.toml {value!r}"
        if self.config.max_steps not in self.curve or not self.records["train"]:
            return "metrics.jsonl is not whole"
        if not (self.step_seconds > 0).all():
            return "metrics.jsonl: a step took no time"
        measured = {"val": self.curve[config.max_steps], **({"test": self._tested} if self.has_test else {})}
        for split, found in measured.items():
            if found is None or abs(found - self.score(split)) > 1e-6:
                return f"summary.json and metrics.jsonl do not agree on the final {split} {self.measure.summary}"
        kinds = {"edges": dict, "tokens": dict, "tokenizer": str, "tokenizer_hash": str}
        if not all(isinstance(self.data.get(key, kind()), kind) for key, kind in kinds.items()):
            return "summary.json: data is damaged"
        return ""


def _two_columns(path: Path, kind: str) -> np.ndarray | None:
    """A saved array of rows of two floats (f) or integers (i), if that is what lies there."""
    try:
        rows = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    whole = isinstance(rows, np.ndarray) and rows.shape[1:] == (2,) and rows.dtype.kind == kind
    return rows if whole else None


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and -1e300 < value < 1e300
