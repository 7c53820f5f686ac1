"""A folder of runs as a study: which runs may be compared, and which learning rate speaks for each arm.

Runs are put side by side only within a `Setting`: the same data and tokenizer, model shape, batch, steps and
optimizer, so that two runs of one seed saw the same batches. What differs inside is the arm, the
learning rate and the seed.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from oelm.arms import ARMS
from oelm.config import ARM_KEYS, OPERATIONAL, RunConfig
from oelm.errors import UserError
from oelm.lab.plan import Plan, left_plans
from oelm.lab.status import LabWatcher, RunStatus
from oelm.train import metrics
from oelm.train.folder import RunFolder

VARIED = {"model_type", *ARM_KEYS, "max_lr", "seed", "preset", "val_interval", "vocab_size", "batch_size", "processes"}
"""What may differ between runs of one setting (the batch counts as a whole)."""


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
        """The arm's name; what was changed about it stands behind."""
        usual = ARMS[self.config.model_type].fields()
        changed = [f"{key}={getattr(self.config, key)}" for key in ARM_KEYS if getattr(self.config, key) != usual[key]]
        return "+".join([self.config.model_type, *changed])

    @property
    def trained(self) -> bool:
        return self.config.freeze == "none"

    @property
    def val_loss(self) -> float:
        """Of the final step; infinite for a run that diverged."""
        return self.summary.get("final_val_loss", math.inf)

    @property
    def loss(self) -> float:
        """What is compared: the final step on the test split, or on validation where there is no test split."""
        found = self.summary.get("test_loss")
        return self.val_loss if found is None else found

    @cached_property
    def environment(self) -> list[dict[str, Any]]:
        return self.folder.read_environment()

    @cached_property
    def data(self) -> dict[str, Any]:
        return self.summary.get("data") or self.folder.read_data()

    @cached_property
    def records(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for record in metrics.read(self.folder.metrics):
            found[record["kind"]].append(record)
        return found

    @cached_property
    def step_seconds(self) -> np.ndarray:
        return np.array([record["seconds"] for record in self.records["train"]])

    @cached_property
    def curve(self) -> dict[int, float]:
        """Validation loss by step."""
        return {record["step"]: record["loss"] for record in self.records["val"]}

    @cached_property
    def documents(self) -> np.ndarray | None:
        try:
            return np.load(self.folder.documents, allow_pickle=False)
        except (OSError, ValueError):
            return None


@dataclass
class Arm:
    """All runs of one arm in one setting."""

    name: str
    by_rate: dict[float, dict[int, Run]] = field(default_factory=lambda: defaultdict(dict))
    """Finished and diverged runs, by learning rate and seed."""

    @property
    def rates(self) -> list[float]:
        return sorted(self.by_rate)

    @cached_property
    def rate_losses(self) -> dict[float, float]:
        """Final validation loss by learning rate, over the seeds that all rates have."""
        shared = set.intersection(*(set(by_seed) for by_seed in self.by_rate.values())) if self.by_rate else set()
        return {
            rate: float(np.mean([by_seed[seed].val_loss for seed in shared or by_seed]))
            for rate, by_seed in sorted(self.by_rate.items())
        }

    @cached_property
    def rate(self) -> float | None:
        """The learning rate that speaks for the arm: the lowest final validation loss."""
        best = min(self.rate_losses, key=lambda rate: self.rate_losses[rate], default=None)
        return best if best is not None and self.rate_losses[best] < math.inf else None

    @property
    def at_edge(self) -> bool:
        return len(self.by_rate) > 1 and self.rate in (self.rates[0], self.rates[-1])

    @property
    def runs(self) -> dict[int, Run]:
        """The runs at the chosen learning rate that finished, by seed."""
        at_rate = self.by_rate.get(self.rate, {}) if self.rate is not None else {}
        return {seed: run for seed, run in sorted(at_rate.items()) if run.finished}

    @property
    def any_run(self) -> Run:
        return next(run for by_seed in self.by_rate.values() for run in by_seed.values())

    @property
    def losses(self) -> dict[int, float]:
        return {seed: run.loss for seed, run in self.runs.items()}

    @property
    def perplexity(self) -> float:
        """Geometric mean over seeds."""
        return math.exp(float(np.mean(list(self.losses.values()))))


@dataclass
class Setting:
    """Runs that may be compared with each other."""

    values: dict[str, Any]
    arms: dict[str, Arm] = field(default_factory=dict)
    name: str = ""
    """The data set, with what else distinguishes this setting from the others of the study."""

    @property
    def judged(self) -> dict[str, Arm]:
        """Arms with a finished run at their chosen learning rate."""
        return {name: arm for name, arm in self.arms.items() if arm.runs}


@dataclass
class Study:
    root: Path
    runs: list[Run]
    settings: list[Setting]
    statuses: list[RunStatus]
    """Of all runs that exist or were planned."""
    plans: list[Plan]
    baseline: str
    criterion: float

    @property
    def unfinished(self) -> bool:
        ended = sum(s.state in ("finished", "failed") for s in self.statuses)
        return ended < max(len(self.statuses), sum(plan.total for plan in self.plans))


def load_study(root: Path, baseline: str = "", criterion: float = 0.0) -> Study:
    """Read every run below `root`; the plans that were left there say what was meant to be run."""
    if not root.is_dir():
        raise UserError(f"no such folder: {root}")
    plans = left_plans(root)
    baseline = baseline or next((plan.baseline for plan in plans), "baseline")
    criterion = criterion or next((plan.criterion for plan in plans), 1.05)
    if not 0.5 < criterion < 2:
        raise UserError(f"--criterion {criterion:g}: take a ratio of perplexities such as 1.05")
    statuses = LabWatcher(root, baseline=baseline).look()
    if not statuses:
        raise UserError(f"no run below {root}: start one with oelm train or oelm run")
    runs = []
    for status in statuses:
        folder = RunFolder(Path(status.path))
        if folder.config_file.exists() and status.state != "unreadable":
            runs.append(Run(folder, folder.config(), status, folder.read_summary() or {}))
    return Study(root, runs, _settings(runs, baseline), statuses, plans, baseline, criterion)


def _settings(runs: Iterable[Run], baseline: str) -> list[Setting]:
    found: dict[str, Setting] = {}
    for run in runs:
        values = _setting_of(run)
        setting = found.setdefault(repr(values), Setting(values))
        arm = setting.arms.setdefault(run.arm, Arm(run.arm))
        if not (run.finished or run.diverged):
            continue
        by_seed = arm.by_rate[run.config.max_lr]
        if run.config.seed in by_seed:
            other = by_seed[run.config.seed]
            raise UserError(
                f"{other.folder.path} and {run.folder.path} are the same arm, learning rate and seed: move one away"
            )
        by_seed[run.config.seed] = run
    settings = sorted(found.values(), key=lambda setting: (baseline not in setting.arms, setting.values["dataset"]))
    for setting in settings:
        setting.arms = dict(
            sorted(
                setting.arms.items(),
                key=lambda item: (item[0] != baseline, list(ARMS).index(item[0].partition("+")[0])),
            )
        )
        others = [s for s in settings if s is not setting and s.values["dataset"] == setting.values["dataset"]]
        setting.name = ", ".join([setting.values["dataset"], *differences(setting, others)])
    return settings


def _setting_of(run: Run) -> dict[str, Any]:
    values = {k: v for k, v in run.config.model_dump().items() if k not in OPERATIONAL and k not in VARIED}
    return {**values, "windows_per_step": run.config.windows_per_step, "data": run.data}


def differences(setting: Setting, others: list[Setting]) -> list[str]:
    """What distinguishes a setting from others, in words: num_layers 8, other data."""
    keys = [key for key, value in setting.values.items() if any(value != o.values[key] for o in others)]
    return ["other data" if key == "data" else f"{key} {setting.values[key]}" for key in keys]
