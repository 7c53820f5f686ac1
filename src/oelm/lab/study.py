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
from oelm.lab.outcome import Run
from oelm.lab.plan import LEAST_CRITERION, MOST_CRITERION, Plan, left_plans
from oelm.lab.score import PERPLEXITY, Score
from oelm.lab.status import LabWatcher, RunStatus
from oelm.train.folder import RunFolder

VARIED = {"model_type", "label", *ARM_KEYS, "max_lr", "seed", "preset", "val_interval", "batch_size", "processes",
          "num_epochs"}  # fmt: skip
"""What may differ between runs of one setting (the batch counts as a whole, and the length in steps)."""


@dataclass(eq=False)
class Arm:
    """All runs of one arm in one setting."""

    name: str
    config: RunConfig
    """Of one of its runs: what the arm itself decides is the same for all."""
    by_rate: dict[float, dict[int, Run]] = field(default_factory=lambda: defaultdict(dict))
    """Finished and diverged runs, by learning rate and seed."""
    split: str = "test"
    """What is compared; the same for all arms of a setting."""
    partners: set[int] | None = None
    """Seeds that the baseline has; None: there is no baseline, or this is it."""

    @property
    def trained(self) -> bool:
        return self.config.trains_qk

    @property
    def rates(self) -> list[float]:
        return sorted(self.by_rate)

    @cached_property
    def rate_scores(self) -> dict[float, float]:
        """Final validation score by learning rate, over the seeds that all rates have."""
        return {
            rate: float(np.mean([by_seed[seed].score("val") for seed in self.rate_seeds or by_seed]))
            for rate, by_seed in sorted(self.by_rate.items())
        }

    @cached_property
    def rate_seeds(self) -> set[int]:
        return set.intersection(*(set(by_seed) for by_seed in self.by_rate.values())) if self.by_rate else set()

    @cached_property
    def rate(self) -> float | None:
        """The learning rate that speaks for the arm: where fewest runs diverge, the best final validation score."""

        def badness(rate: float) -> tuple[int, float]:
            found = self.by_rate[rate].items()
            scores = [run.score("val") for seed, run in found if seed in (self.rate_seeds or {seed})]
            kept = [score for score in scores if score < math.inf]
            return len(scores) - len(kept), float(np.mean(kept)) if kept else math.inf

        best = min(self.rate_scores, key=badness, default=None)
        return best if best is not None and badness(best)[1] < math.inf else None

    @property
    def lost(self) -> list[int]:
        """Seeds that diverged at the chosen learning rate."""
        return sorted(seed for seed, run in self._at_rate.items() if run.diverged)

    @property
    def diverged(self) -> bool:
        """No run of it came to an end at any learning rate."""
        ended = [run for by_seed in self.by_rate.values() for run in by_seed.values()]
        return bool(ended) and all(run.diverged for run in ended)

    @property
    def seeds(self) -> set[int]:
        """Of all runs that ended, at any learning rate."""
        return {seed for by_seed in self.by_rate.values() for seed in by_seed}

    @property
    def at_edge(self) -> bool:
        return len(self.by_rate) > 1 and self.rate in (self.rates[0], self.rates[-1])

    @property
    def runs(self) -> dict[int, Run]:
        """The finished runs at the chosen learning rate, by seed, of the seeds that the baseline has too."""
        finished = {seed: run for seed, run in sorted(self._at_rate.items()) if run.finished}
        return {seed: run for seed, run in finished.items() if self.partners is None or seed in self.partners}

    @property
    def unpaired(self) -> list[int]:
        """Seeds that finished at the chosen learning rate and that the baseline does not have."""
        return [seed for seed, run in sorted(self._at_rate.items()) if run.finished and seed not in self.runs]

    @property
    def _at_rate(self) -> dict[int, Run]:
        return self.by_rate.get(self.rate, {}) if self.rate is not None else {}

    def finished(self) -> list[Run]:
        return [run for by_seed in self.by_rate.values() for run in by_seed.values() if run.finished]

    @property
    def scores(self) -> dict[int, float]:
        return {seed: run.score(self.split) for seed, run in self.runs.items()}

    @property
    def score(self) -> float:
        """Mean over seeds (of losses: the perplexity's geometric mean)."""
        return float(np.mean(list(self.scores.values())))


@dataclass
class Setting:
    """Runs that may be compared with each other."""

    values: dict[str, Any]
    arms: dict[str, Arm] = field(default_factory=dict)
    name: str = ""
    """The data set, with what else distinguishes this setting from the others of the study."""
    split: str = "test"
    """What is compared: test where every finished run has a test loss, else val for all."""
    mixed: bool = False
    """Only some of the runs have a test loss."""

    @property
    def judged(self) -> dict[str, Arm]:
        """Arms with a finished run at their chosen learning rate."""
        return {name: arm for name, arm in self.arms.items() if arm.runs}

    @property
    def ended(self) -> dict[str, Arm]:
        """These, and the arms of which every run diverged."""
        return {name: arm for name, arm in self.arms.items() if arm.runs or arm.diverged}


@dataclass
class Study:
    root: Path
    runs: list[Run]
    settings: list[Setting]
    statuses: list[RunStatus]
    """Of all runs that exist or were planned."""
    damaged: dict[str, str]
    """Run folders that are left out, and why."""
    plans: list[Plan]
    baseline: str
    criterion: float
    score: Score = PERPLEXITY

    @property
    def ended(self) -> int:
        return sum(s.state in ("finished", "failed") for s in self.statuses)

    @property
    def total(self) -> int:
        """Runs that exist or were planned, with those that wait for a choice."""
        return len(self.statuses) + sum(plan.total - len(plan.runs) for plan in self.plans)

    @property
    def unfinished(self) -> bool:
        return self.ended < self.total


def load_study(root: Path, baseline: str = "", criterion: float | None = None) -> Study:
    """Read every run below `root`; the plans that were left there say what was meant to be run."""
    plans = left_plans(root)
    baseline = baseline or _agreed("baseline", [plan.baseline for plan in plans], "baseline")
    statuses = LabWatcher(root, baseline=baseline).look()
    if not statuses:
        raise UserError(f"no run below {root}: start one with oelm train or oelm run")
    runs, damaged = [], {}
    for status in statuses:
        folder = RunFolder(Path(status.path))
        if status.state == "unreadable":
            damaged[status.id] = status.reason
        elif folder.config_file.exists():
            run = Run(folder, folder.config(), status, folder.read_summary() or {})
            fault = run.fault()
            if fault:
                damaged[run.id] = fault
            else:
                runs.append(run)
    measures = {run.measure for run in runs}
    if len(measures) > 1:
        raise UserError(f"below {root} are language models and classifiers: judge their folders apart")
    score = next(iter(measures), PERPLEXITY)
    planned = [score.criterion if plan.criterion is None else plan.criterion for plan in plans]
    bar = criterion if criterion is not None else _agreed("criterion", planned, score.criterion)
    if not LEAST_CRITERION < bar < MOST_CRITERION:
        raise UserError(f"--criterion {bar:g}: take a ratio of perplexities such as 1.05, or points of accuracy")
    return Study(root, runs, _settings(runs, baseline), statuses, damaged, plans, baseline, bar, score)


def _agreed(what: str, values: list[Any], default: Any) -> Any:
    if len(set(values)) > 1:
        raise UserError(f"the plans here do not agree on the {what} ({', '.join(map(str, values))}): give --{what}")
    return values[0] if values else default


def _settings(runs: Iterable[Run], baseline: str) -> list[Setting]:
    found: dict[str, Setting] = {}
    for run in runs:
        values = _setting_of(run)
        setting = found.setdefault(repr(values), Setting(values))
        arm = setting.arms.setdefault(run.arm, Arm(run.arm, run.config))
        differs = next((key for key in ARM_KEYS if getattr(arm.config, key) != getattr(run.config, key)), None)
        if differs:
            raise UserError(f"two arms are called {run.arm} and differ in {differs}: give one another label")
        if not (run.finished or run.diverged):
            continue
        by_seed = arm.by_rate[run.config.max_lr]
        if run.config.seed in by_seed:
            other = by_seed[run.config.seed]
            raise UserError(
                f"{other.folder.path} and {run.folder.path} are the same arm, learning rate and seed: move one away"
            )
        by_seed[run.config.seed] = run
    order = list(ARMS)
    settings = sorted(found.values(), key=lambda setting: (baseline not in setting.arms, setting.values["dataset"]))
    for setting in settings:
        setting.arms = dict(
            sorted(
                setting.arms.items(),
                key=lambda item: (item[0] != baseline, order.index(item[1].config.model_type), item[0]),
            )
        )
        tested = {run.has_test for arm in setting.arms.values() for run in arm.finished()}
        setting.split, setting.mixed = "test" if tested == {True} else "val", len(tested) > 1
        for arm in setting.arms.values():
            arm.split = setting.split
            if baseline in setting.arms and arm.name != baseline:
                arm.partners = set(setting.arms[baseline].runs)
        others = [s for s in settings if s is not setting and s.values["dataset"] == setting.values["dataset"]]
        setting.name = ", ".join([setting.values["dataset"], *differences(setting, others)])
    return settings


def _setting_of(run: Run) -> dict[str, Any]:
    values = {k: v for k, v in run.config.model_dump().items() if k not in OPERATIONAL and k not in VARIED}
    return {**values, "windows_per_step": run.config.windows_per_step, "data": run.data}


def differences(setting: Setting, others: list[Setting]) -> list[str]:
    """What distinguishes a setting from others, in words: num_layers 8, tokenizer gpt2."""
    keys = [key for key, value in setting.values.items() if any(value != o.values[key] for o in others)]
    return [f"{key} {setting.values[key]}" for key in keys if key != "data"] + (
        [_data_name(setting.values["data"], [o.values["data"] for o in others])] if "data" in keys else []
    )


def _data_name(data: dict[str, Any], others: list[dict[str, Any]]) -> str:
    names = {str(other.get("tokenizer")) for other in others}
    if data.get("tokenizer") and names != {data["tokenizer"]}:
        return f"tokenizer {data['tokenizer']}"
    digest = str(data.get("source_hash") or data.get("tokenizer_hash") or "unknown")
    return f"data {digest[:8]}"
