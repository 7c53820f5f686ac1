"""Where runs are, read from their folders alone: a plain copy, or a folder on NFS, does as well."""

import math
import os
import re
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oelm.config import RunConfig
from oelm.errors import UserError
from oelm.files import without_links
from oelm.lab.plan import PlannedRun, left_plans
from oelm.lab.score import ACCURACY, PERPLEXITY, score_of
from oelm.lab.slurm import queued_jobs
from oelm.train import metrics
from oelm.train.folder import RunFolder

ENDED = ("finished", "stopped", "failed")
"""How a run can say that it ended; one that says nothing, or something else, died."""
RECENT = 50
"""Steps that the time left is judged by."""


@dataclass(frozen=True)
class RunStatus:
    id: str
    arm: str
    state: str
    """waiting, queued (Slurm), running, finished, stopped, failed, died or unreadable."""
    step: int = 0
    max_steps: int = 0
    started: str | None = None
    finished: str | None = None
    elapsed: float | None = None
    """Seconds of training and evaluation, of all parts; pauses do not count."""
    left: float | None = None
    """Seconds, from the recent step times and the validations so far; running runs only."""
    loss: float | None = None
    val_ppl: float | None = None
    val_accuracy: float | None = None
    val_step: int | None = None
    gap: float | None = None
    """Ratio of val PPL to the baseline's of the same data and seed at the same step, less 1; of accuracies, the
    difference."""
    gpu: str | None = None
    pid: int | None = None
    reason: str = ""
    path: str = ""


class RunWatcher:
    """Follows one run folder; a second look reads only what was appended since the first."""

    def __init__(self, path: Path, name: str = "", planned: RunConfig | None = None) -> None:
        self.folder, self.planned = RunFolder(path), planned
        self.id = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", name or path.name)
        self._offset = 0
        self.known: RunConfig | None = None
        """Its config, once it could be read."""
        self.train: dict[str, Any] = {}
        self.val: dict[int, float] = {}
        self.recent: list[float] = []
        self.worked = 0.0
        self.val_seconds: list[float] = []

    def look(self) -> RunStatus:
        """Where the run is; a folder with damaged files is said to be unreadable and stops nobody from looking."""
        try:
            return self._look()
        except (UserError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, UserError) else str(error)
            return RunStatus(self.id, "", "unreadable", reason=reason, path=str(self.folder.path))

    def _look(self) -> RunStatus:
        if self.known is None and self.folder.config_file.exists():
            self.known = self.folder.config()
        config = self.known
        if config is None:
            arm, steps = (
                (self.planned.arm, 0 if self.planned.num_epochs else self.planned.max_steps)
                if self.planned
                else ("", 0)
            )
            return RunStatus(self.id, arm, "waiting", max_steps=steps, path=str(self.folder.path))
        self._read_metrics()
        summary = self.folder.read_summary() or {}
        alive = self.folder.alive()
        state = "running" if alive else next((end for end in ENDED if end == summary.get("state")), "died")
        parts = self.folder.read_environment() or [{}]
        score = score_of(config)
        last_score = score.shown(self.val[max(self.val)]) if self.val else 0.0
        ended = summary.get("finished") or summary.get("ended") if not alive else None
        return RunStatus(
            id=self.id,
            arm=config.arm,
            state=state,
            step=self.train.get("step", 0),
            max_steps=config.max_steps,
            started=parts[0].get("started"),
            finished=ended if state == "finished" else None,
            elapsed=self.worked,
            left=self._left(config) if alive else None,
            loss=self.train.get("loss"),
            val_ppl=last_score if self.val and score is PERPLEXITY else None,
            val_accuracy=last_score / 100 if self.val and score is ACCURACY else None,
            val_step=max(self.val, default=None),
            gpu=str(parts[-1].get("visible_gpus") or "") or None,
            pid=self.folder.holder()[0] if alive else None,
            reason=str(summary.get("reason", "")) if not alive else "",
            path=str(self.folder.path),
        )

    def _left(self, config: RunConfig) -> float | None:
        if not self.recent:
            return None
        steps = config.max_steps - self.train.get("step", 0)
        validations = math.ceil(steps / config.val_interval) * (statistics.fmean(self.val_seconds or [0.0]))
        return steps * statistics.fmean(self.recent) + validations

    def _read_metrics(self) -> None:
        try:
            with open(self.folder.metrics, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._offset:  # cut back by a resume
                    self._offset, self.train, self.val, self.recent = 0, {}, {}, []
                    self.worked, self.val_seconds = 0.0, []
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.worked += sum(filter(math.isfinite, map(float, re.findall(rb'"seconds": ([\d.e-]+)', whole))))
        lines = whole.splitlines()
        for index, line in enumerate(lines):
            if b'"train"' in line[:20] and index < len(lines) - RECENT - 5:
                continue  # only the last few training records matter
            record = metrics.parse(line + b"\n")
            if record is None or not isinstance(record.get("loss"), float | int):
                continue
            if record["kind"] == "train":
                self.train = record
                self.recent = [*self.recent[1 - RECENT :], record["seconds"]]
            elif record["kind"] == "val":
                score = score_of(self.known) if self.known else PERPLEXITY
                if isinstance(record.get(score.summary), float | int):
                    self.val[record["step"]] = score.from_record(record[score.summary])
                self.val_seconds.append(record.get("seconds", 0.0))


class LabWatcher:
    """Follows all run folders below a folder, and the runs of a plan that have no folder yet."""

    def __init__(self, root: Path, planned: list[PlannedRun] | None = None, baseline: str = "baseline") -> None:
        """Without `planned`, what the plans left below `root` name, and whatever other run lies there."""
        self.root, self.planned, self.baseline = root, planned, baseline
        self._plans = left_plans(root) if planned is None else []
        self._runs: dict[Path, RunWatcher] = {}

    def look(self) -> list[RunStatus]:
        for run in self.planned or [run for plan in self._plans for run in plan.runs]:
            if run.folder.path not in self._runs:
                self._runs[run.folder.path] = RunWatcher(run.folder.path, self._name(run.folder.path), run.config)
        for path in find_runs(self.root) if self.planned is None else []:
            self._runs.setdefault(path, RunWatcher(path, self._name(path)))
        for path in [path for path, watcher in self._runs.items() if watcher.planned is None and not path.exists()]:
            del self._runs[path]
        queued = queued_jobs(self.root)
        found = [self._with_job(watcher.look(), queued) for watcher in self._runs.values()]
        return [self._with_gap(path, status) for path, status in zip(self._runs, found, strict=True)]

    def _name(self, path: Path) -> str:
        below = path != self.root and path.is_relative_to(self.root)
        return str(path.relative_to(self.root)) if below else path.name

    def _with_job(self, status: RunStatus, queued: dict[Path, str]) -> RunStatus:
        job = queued.get(Path(status.path).absolute())
        if status.state in ("waiting", "stopped", "died") and job is not None:
            return replace(status, state="queued", reason=job)
        return status

    def _with_gap(self, path: Path, status: RunStatus) -> RunStatus:
        """Against the baseline run of the same data, seed, steps and batch, at the newest step that both validated.

        With several such baselines, against the one of the same learning rate.
        """
        watcher = self._runs[path]
        mine = watcher.known
        if mine is None or status.arm == self.baseline or not watcher.val:
            return status
        pairs = [
            other
            for other in self._runs.values()
            if other.known and other.known.arm == self.baseline and _pair_key(other.known) == _pair_key(mine)
        ]
        same_rate = [other for other in pairs if other.known and other.known.max_lr == mine.max_lr]
        for other in same_rate or (pairs if len(pairs) == 1 else []):
            common = watcher.val.keys() & other.val.keys()
            if common:
                gap = score_of(mine).change(watcher.val[max(common)] - other.val[max(common)]) / 100
                return replace(status, gap=gap)
        return status


def _pair_key(config: RunConfig) -> tuple[Any, ...]:
    """What two runs must share to be set against each other on the way."""
    kept = ("dataset", "data_path", "seed", "max_steps", "tokens_per_step", "seq_len", "vocab_size", "d_model",
            "num_layers", "num_heads", "d_ff", "dropout", "schedule", "warmup_steps", "weight_decay")  # fmt: skip
    return tuple(getattr(config, key) for key in kept)


def find_runs(root: Path) -> list[Path]:
    """Run folders at or below `root`, three levels deep."""
    if not root.is_dir():
        raise UserError(f"no such folder: {root}")
    if (root / "config.toml").is_file():
        return [root]
    found = sorted(path.parent for depth in ("*", "*/*", "*/*/*") for path in root.glob(f"{depth}/config.toml"))
    return without_links(root, found)
