"""Where runs are, read from their folders alone: a plain copy, or a folder on NFS, does as well."""

import json
import math
import os
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from oelm.config import RunConfig
from oelm.errors import UserError
from oelm.train.folder import RunFolder

RECENT = 50
"""Steps that the time left is judged by."""


@dataclass(frozen=True)
class RunStatus:
    id: str
    arm: str
    state: str
    """waiting, queued (Slurm), running, finished, stopped, failed or died."""
    step: int = 0
    max_steps: int = 0
    started: str | None = None
    finished: str | None = None
    elapsed: float | None = None
    """Seconds since the first start."""
    left: float | None = None
    """Seconds, from the recent step times; running runs only."""
    loss: float | None = None
    val_ppl: float | None = None
    val_step: int | None = None
    gap: float | None = None
    """Ratio of val PPL to the baseline's of the same data and seed at the same step, less 1."""
    gpu: str | None = None
    pid: int | None = None
    reason: str = ""


class RunWatcher:
    """Follows one run folder; a second look reads only what was appended since the first."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.id = path.name
        self._offset = 0
        self._config: RunConfig | None = None
        self.train: dict[str, Any] = {}
        self.val: dict[int, float] = {}
        self.recent: list[float] = []

    @property
    def config(self) -> RunConfig | None:
        if self._config is None and self.folder.config_file.exists():
            self._config = self.folder.config()
        return self._config

    def look(self) -> RunStatus:
        config = self.config
        if config is None:
            return RunStatus(self.id, "", "waiting")
        self._read_metrics()
        summary = self.folder.read_summary() or {}
        alive = self.folder.alive()
        state = "running" if alive else summary.get("state", "died")
        last = self._last_part()
        started = self._first_start()
        ended = summary.get("finished") or summary.get("ended") if not alive else None
        seconds = sum(self.recent) / len(self.recent) if self.recent else None
        steps_left = config.max_steps - self.train.get("step", 0)
        device = str(last.get("visible_gpus") or "") if str(last.get("device", "")).startswith("cuda") else ""
        return RunStatus(
            id=self.id,
            arm=config.model_type,
            state=state,
            step=self.train.get("step", 0),
            max_steps=config.max_steps,
            started=started,
            finished=ended if state == "finished" else None,
            elapsed=_between(started, ended or (self._last_sign() if not alive else None)),
            left=seconds * steps_left if alive and seconds else None,
            loss=self.train.get("loss"),
            val_ppl=_ppl(self.val[max(self.val)]) if self.val else None,
            val_step=max(self.val, default=None),
            gpu=device or None,
            pid=last.get("pid") if alive else None,
            reason=summary.get("reason", "") if not alive else "",
        )

    def _read_metrics(self) -> None:
        try:
            with open(self.folder.metrics, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._offset:  # cut back by a resume
                    self._offset, self.train, self.val, self.recent = 0, {}, {}, []
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.splitlines()
        for index, line in enumerate(lines):
            if b'"train"' in line[:20] and index < len(lines) - RECENT - 5:
                continue  # only the last few training records matter
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record["kind"] == "train":
                self.train = record
                self.recent = [*self.recent[1 - RECENT :], record["seconds"]]
            elif record["kind"] == "val":
                self.val[record["step"]] = record["loss"]

    def _parts(self) -> list[dict[str, Any]]:
        return self.folder.read_environment()

    def _first_start(self) -> str | None:
        parts = self._parts()
        return parts[0]["started"] if parts else None

    def _last_part(self) -> dict[str, Any]:
        return (self._parts() or [{}])[-1]

    def _last_sign(self) -> str | None:
        """When a run that died last wrote something."""
        try:
            written = self.folder.metrics.stat().st_mtime
        except OSError:
            return None
        return datetime.fromtimestamp(written).astimezone().isoformat(timespec="seconds")


class LabWatcher:
    """Follows all run folders below a folder, and the runs of a plan that have no folder yet."""

    def __init__(self, root: Path, expected: list[Path] | None = None, baseline: str = "baseline") -> None:
        self.root, self.expected, self.baseline = root, expected, baseline
        self._runs: dict[Path, RunWatcher] = {}

    def look(self) -> list[RunStatus]:
        for path in self.expected if self.expected is not None else find_runs(self.root):
            self._runs.setdefault(path, RunWatcher(path))
        queued = _slurm_jobs(self.root)
        found = [self._with_job(watcher.look(), queued) for watcher in self._runs.values()]
        return [self._with_gap(path, status) for path, status in zip(self._runs, found, strict=True)]

    def _with_job(self, status: RunStatus, queued: dict[str, str]) -> RunStatus:
        if status.state in ("waiting", "stopped", "died") and status.id in queued:
            return RunStatus(**{**asdict(status), "state": "queued", "reason": queued[status.id]})
        return status

    def _with_gap(self, path: Path, status: RunStatus) -> RunStatus:
        """Against the baseline run of the same data, seed, steps and batch, at the newest step that both validated."""
        watcher = self._runs[path]
        if watcher.config is None or status.arm == self.baseline or not watcher.val:
            return status
        key = _pair_key(watcher.config)
        for other in self._runs.values():
            if other.config and other.config.model_type == self.baseline and _pair_key(other.config) == key:
                common = watcher.val.keys() & other.val.keys()
                if common:
                    step = max(common)
                    gap = math.exp(watcher.val[step] - other.val[step]) - 1
                    return RunStatus(**{**asdict(status), "gap": gap})
        return status


def _pair_key(config: RunConfig) -> tuple[Any, ...]:
    return (config.dataset, config.data_path, config.seed, config.max_steps, config.tokens_per_step, config.seq_len)


def find_runs(root: Path) -> list[Path]:
    """Run folders at or below `root`, three levels deep."""
    if (root / "config.toml").is_file():
        return [root]
    found = [path.parent for depth in ("*", "*/*", "*/*/*") for path in root.glob(f"{depth}/config.toml")]
    return sorted(found)


def watch_folder(root: Path) -> LabWatcher:
    if not root.is_dir():
        raise UserError(f"no such folder: {root}")
    return LabWatcher(root)


def _slurm_jobs(root: Path) -> dict[str, str]:
    """Runs that Slurm still has in its queue, by id; empty without Slurm jobs below `root`."""
    from oelm.lab.slurm import queued_jobs

    return queued_jobs(root)


def _between(start: str | None, end: str | None) -> float | None:
    if start is None:
        return None
    until = datetime.fromisoformat(end) if end else datetime.now().astimezone()
    return max(0.0, (until - datetime.fromisoformat(start)).total_seconds())


def _ppl(loss: float) -> float:
    return math.exp(min(loss, 700.0))
