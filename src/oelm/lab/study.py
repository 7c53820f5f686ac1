"""A folder of runs as a study: which runs may be compared, and which learning rate speaks for each arm.

Runs are put side by side only within a `Setting`: the same data and tokenizer, model shape, batch, steps and
optimizer, so that two runs of one seed saw the same batches. What differs inside is the arm, the
learning rate and the seed.
"""

import math
import zipfile
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
from oelm.lab.plan import LEAST_CRITERION, MOST_CRITERION, Plan, left_plans
from oelm.lab.score import ACCURACY, PERPLEXITY, Score, score_of
from oelm.lab.status import LabWatcher, RunStatus
from oelm.train import metrics
from oelm.train.folder import RunFolder

VARIED = {"model_type", "label", *ARM_KEYS, "max_lr", "seed", "preset", "val_interval", "batch_size", "processes"}
"""What may differ between runs of one setting (the batch counts as a whole)."""
NUMBERS = (
    "final_val_loss", "best_val_loss", "best_step", "tokens_seen", "epochs", "total_parameters",
    "trainable_parameters", "frozen_parameters", "median_step_seconds", "wall_seconds", "peak_memory_bytes",
    "checkpoint_bytes",
)  # fmt: skip
"""What the summary of a finished run must hold."""


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

    @cached_property
    def losses(self) -> dict[int, float]:
        """Validation loss by step."""
        return {record["step"]: record["loss"] for record in self.records["val"]}

    @cached_property
    def documents(self) -> np.ndarray | None:
        try:
            rows = np.load(self.folder.documents, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        whole = isinstance(rows, np.ndarray) and rows.ndim == 2 and rows.shape[1] == 2 and rows.dtype.kind == "f"
        return rows if whole and np.isfinite(rows).all() else None

    @cached_property
    def answers(self) -> np.ndarray | None:
        """Rows (label, answer) on the test split; None if they are not those of the summary."""
        try:
            rows = np.load(self.folder.answers, allow_pickle=False)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            return None
        whole = isinstance(rows, np.ndarray) and rows.ndim == 2 and rows.shape[1:] == (2,) and rows.dtype.kind == "i"
        if not whole or not len(rows) or not ((rows >= 0) & (rows < self.config.labels)).all():
            return None
        return rows if abs((rows[:, 0] == rows[:, 1]).mean() - self.summary.get("test_accuracy", -1)) < 1e-9 else None

    def fault(self) -> str:
        """Why a finished run cannot be believed, in words; "" if nothing speaks against it."""
        if not self.finished:
            return ""
        for key in NUMBERS:
            if not _is_number(self.summary.get(key)):
                return f"summary.json: {key} is {self.summary.get(key)!r}"
        needed = [f"final_val_{self.measure.summary}", *([f"test_{self.measure.summary}"] if self.has_test else [])]
        for key in needed:
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
        if not all(isinstance(self.data.get(key, {}), dict) for key in ("edges", "tokens")):
            return "summary.json: data is damaged"
        return ""


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
    def unfinished(self) -> bool:
        ended = sum(s.state in ("finished", "failed") for s in self.statuses)
        return ended < max(len(self.statuses), sum(plan.total for plan in self.plans))


def load_study(root: Path, baseline: str = "", criterion: float | None = None) -> Study:
    """Read every run below `root`; the plans that were left there say what was meant to be run."""
    if not root.is_dir():
        raise UserError(f"no such folder: {root}")
    plans = left_plans(root)
    baseline = baseline or _agreed("baseline", [plan.baseline for plan in plans], "baseline")
    given = criterion if criterion is not None else _agreed("criterion", [plan.criterion for plan in plans], None)
    if given is not None and not LEAST_CRITERION < given < MOST_CRITERION:
        raise UserError(f"--criterion {given:g}: take a ratio of perplexities such as 1.05, or points of accuracy")
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
    bar = given if given is not None else score.criterion
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


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
