"""Plans: a TOML file that names many runs.

    out = "outputs/pocket"        where the run folders go; default outputs/<name of the plan>
    [defaults]                    settings of every run, by the names of the flags
    preset = "pocket"
    [matrix]                      every combination becomes a run; several, each multiplied alone, are [[matrix]]
    model_type = ["baseline", "oelm_v2"]
    max_lr = [1e-3, 2e-3, 4e-3]
    seed = [1, 2, 3]
    [select]                      first all learning rates with one seed, then the other seeds at the best
    setting = "max_lr"
    seed = 1
    [arms.shifted]                an arm of the plan's own: any settings of an arm, and what it builds upon
    arm = "oelm_sliced"
    key_shift = 1.0
    [[run]]                       a run of its own; `id` names its folder, unless it has an out_dir
    id = "GPT-01"
    [verdict]
    baseline = "baseline"
    criterion = 1.05

Besides settings, defaults, matrix and runs may say `gpus_per_run` (2 or more: torchrun), and `arm` for
`model_type`.
"""

import itertools
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import tomli_w

from oelm.arms import ARMS
from oelm.config import ARM_KEYS, LENGTHS, RunConfig, load_toml, overlay, resolve
from oelm.errors import UserError, nearest
from oelm.files import without_links, write_atomic
from oelm.lab.score import score_in
from oelm.train.folder import RunFolder

MAX_RUNS = 10_000
LEAST_CRITERION, MOST_CRITERION = 0.5, 2.0
COPY = ".plan.toml"
TABLES = ("out", "defaults", "arms", "matrix", "select", "run", "verdict")


@dataclass(frozen=True)
class PlannedRun:
    id: str
    settings: dict[str, Any]
    """What the plan says of the run; presets and arms fill in the rest."""
    processes: int = 1

    @cached_property
    def config(self) -> RunConfig:
        return resolve({}, {**self.settings, "processes": self.processes})

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.settings["out_dir"]))


@dataclass(frozen=True)
class Choice:
    """Runs that differ in one setting, of which the best on validation is kept, with its other seeds."""

    setting: str
    candidates: list[PlannedRun]
    followers: dict[Any, list[PlannedRun]]
    """By the value of the setting."""

    def best(self, given_up: Collection[str] = ()) -> PlannedRun | None:
        """The candidate with the best final validation score, once all have ended; None before, or if all failed."""
        if not self.ended(given_up):
            return None
        summaries = [run.folder.read_summary() or {} for run in self.candidates]
        scores = [score_in(summary).of(summary, "val") for summary in summaries]
        return self.candidates[scores.index(min(scores))] if min(scores) < math.inf else None

    def ended(self, given_up: Collection[str] = ()) -> bool:
        """All candidates have finished or failed."""
        for run in self.candidates:
            summary = run.folder.read_summary() or {}
            failed = summary.get("state") == "failed" and summary.get("retry") in (None, "", "never")
            if not (failed or summary.get("state") == "finished" or run.id in given_up):
                return False
        return True


@dataclass(frozen=True)
class Plan:
    fixed: list[PlannedRun]
    choices: list[Choice] = field(default_factory=list)
    baseline: str = "baseline"
    criterion: float | None = None
    """None: as usual for the task. Else the largest ratio of perplexities, arm to baseline, that passes."""
    given_up: set[str] = field(default_factory=set)
    """Runs that a queue will not try again."""
    out: Path = Path()
    """Where the run folders lie."""
    name: str = ""
    content: dict[str, Any] = field(default_factory=dict)
    """The plan as TOML tables, with what was set for every run."""

    def leave_copy(self) -> None:
        """Put the plan beside its runs, so that the folder alone tells what was meant to be run."""
        self.out.mkdir(parents=True, exist_ok=True)
        write_atomic(self.out / f"{self.name}{COPY}", self.text())

    def text(self) -> str:
        return tomli_w.dumps(self.content)

    @property
    def runs(self) -> list[PlannedRun]:
        """The runs that are known now: those that wait for a choice appear when it is made."""
        known = list(self.fixed)
        for choice in self.choices:
            known += choice.candidates
            best = choice.best(self.given_up)
            known += choice.followers[best.settings[choice.setting]] if best else []
        return known

    @property
    def total(self) -> int:
        """Number of runs when all choices are made."""
        waiting = [choice for choice in self.choices if not choice.ended(self.given_up)]
        return len(self.runs) + sum(len(next(iter(choice.followers.values()))) for choice in waiting)


class _Reader:
    """Checks one plan file and says where in it a fault lies."""

    def __init__(self, path: Path, out: Path | None, overrides: dict[str, Any]) -> None:
        self.path = path
        self.content = load_toml(path)
        self.lines = path.read_text(encoding="utf-8").splitlines()
        self._refuse_others(self.content, TABLES, "or table ")
        self.moved = out is not None
        if not isinstance(self.content.get("out", ""), str):
            self.refuse("out must be the name of a folder", "out")
        self.out = out or Path(self.content.get("out") or f"outputs/{path.stem}")
        self.defaults, self.overrides = self._table("defaults"), overrides
        self._table("arms")  # refuses what is none
        self.arms = {name: self._own_arm(name, table) for name, table in self.content.get("arms", {}).items()}
        several = isinstance(self.content.get("matrix"), list)
        self.matrices = self._list("matrix") if several else [self._table("matrix")]
        for key, value in overrides.items():
            if key not in RunConfig.model_fields:
                raise UserError(f"--set {key}={value}: unknown setting; {nearest(key, RunConfig.model_fields)}")
            for name in LENGTHS if key in LENGTHS else (key,):
                if any(isinstance(matrix.get(name), list) for matrix in self.matrices):
                    raise UserError(f"--set {key}={value}: the plan's [matrix] multiplies {name}; change it there")
            for arm in (name for name, own in self.arms.items() if key in own):
                raise UserError(f"--set {key}={value}: the plan's [arms.{arm}] decides {key}; change it there")
        laid_over = [(matrix, overlay(matrix, overrides)) for matrix in self.matrices]
        self.matrices = [{key: found[key] for key in matrix if key in found} for matrix, found in laid_over]

    def read(self) -> Plan:
        fixed, choices = [], []
        for matrix in self.matrices:
            if "select" in self.content:
                choices += self._choices(matrix, self._table("select"))
            else:
                fixed += self._combinations(matrix)
        fixed += [self._run(entry) for entry in self._list("run")]
        name = self.path.name.removesuffix(COPY).removesuffix(".toml")
        judged = self._verdict(self._table("verdict"))
        plan = Plan(fixed, choices, **judged, out=self.out, name=name, content=self._with_overrides())
        everything = [*fixed, *(run for c in choices for runs in (c.candidates, *c.followers.values()) for run in runs)]
        if not everything:
            self.refuse("it names no runs: add a [matrix] or a [[run]]")
        for what, names in (
            ("id", [r.id for r in everything]),
            ("out_dir", [os.path.abspath(r.settings["out_dir"]) for r in everything]),
        ):
            name, count = Counter(names).most_common(1)[0]
            if count > 1:
                self.refuse(f"the {what} {name} stands twice", what, name)
        seen: dict[str, str] = {}
        for run in everything:
            if (first := seen.setdefault(run.config.identity(), run.id)) != run.id:
                self.refuse(f"{first} and {run.id} are the same run")
        for one, other in itertools.pairwise(sorted(everything, key=lambda run: run.config.arm)):
            differs = [key for key in ARM_KEYS if getattr(one.config, key) != getattr(other.config, key)]
            if one.config.arm == other.config.arm and differs:
                self.refuse(f"{one.id} and {other.id} are both called {one.config.arm} and differ in {differs[0]}")
        if plan.baseline not in {run.config.arm for run in everything}:
            self.refuse(f"the baseline arm {plan.baseline} is in no run", "baseline")
        return plan

    def refuse(self, message: str, key: str = "", value: str = "", run: str = "") -> NoReturn:
        """One line with file, line number and message; the line is the one that sets `key`."""
        line = self._line_of(key, value, run) if key else 0
        raise UserError(f"{self.path}, line {line}: {message}" if line else f"{self.path}: {message}")

    def _refuse_others(self, table: dict[str, Any], known: Collection[str], kind: str = "", where: str = "") -> None:
        for key in [key for key in table if key not in known]:
            self.refuse(f"unknown key {kind}{key}{where}: {nearest(key, known)}", key)

    def _line_of(self, key: str, value: str, run: str) -> int:
        """Where `key` is set: in the table of `run` if it is set there, else the last place; 0: nowhere."""
        sets = [
            i
            for i, line in enumerate(self.lines)
            if re.match(rf"\s*\[*\s*{re.escape(key)}\b.*{re.escape(value)}", line)
        ]
        heads = [i for i, line in enumerate(self.lines) if line.lstrip().startswith("[")]
        tables = [range(*ends) for ends in itertools.pairwise([0, *heads, len(self.lines)])]
        named = re.compile(rf"\s*id\s*=\s*[\"']{re.escape(run)}[\"']")
        own = [i for table in tables if any(named.match(self.lines[i]) for i in table) for i in sets if i in table]
        return (own or sets or [-1])[-1] + 1

    def _with_overrides(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.content.items() if key != "out"}
        if "matrix" in kept:
            kept["matrix"] = self.matrices if isinstance(kept["matrix"], list) else self.matrices[0]
        if "run" in kept:
            left = [overlay(run, self.overrides) for run in self._list("run")]
            kept["run"] = [{k: v for k, v in run.items() if k not in self.overrides} for run in left]
        return {**kept, "defaults": overlay(self.defaults, self.overrides)}

    def _table(self, name: str) -> dict[str, Any]:
        table = self.content.get(name, {})
        if not isinstance(table, dict):
            self.refuse(f"{name} must be a table: [{name}]", name)
        return _in_full(table)

    def _list(self, name: str) -> list[dict[str, Any]]:
        entries = self.content.get(name, [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            self.refuse(f"{name} must be written as [[{name}]]", name)
        return [_in_full(entry) for entry in entries]

    def _own_arm(self, name: str, table: Any) -> dict[str, Any]:
        if not isinstance(table, dict):
            self.refuse(f"an arm must be a table: [arms.{name}]", name)
        if name in ARMS:
            self.refuse(f"{name} is an arm of oelm: give yours another name", name)
        settings = _in_full(table)
        upon = settings.get("model_type", "baseline")
        if upon not in list(ARMS):
            self.refuse(
                f"arm {upon!r}: an arm of a plan's own builds upon one of oelm's: {nearest(str(upon), ARMS)}", name
            )
        for key in settings:
            if key not in ("model_type", *ARM_KEYS):
                self.refuse(f"{key} is no setting of an arm: {nearest(key, ARM_KEYS)}", key)
        return {"model_type": "baseline", **settings, "label": name}

    def _run(self, entry: dict[str, Any]) -> PlannedRun:
        settings = overlay(self.defaults, entry)
        arm = settings.get("model_type", "")
        if not isinstance(arm, str):
            self.refuse(f"arm {arm!r} must be the name of one arm", "arm" if self._says_arm() else "model_type")
        own = self.arms.get(arm)
        if own:
            settings |= own | {key: value for key, value in entry.items() if key != "model_type"}
        name, processes = settings.pop("id", ""), settings.pop("gpus_per_run", 1)
        if not isinstance(name, str) or not re.fullmatch(r"[\w][\w.+-]{0,199}", name):
            self.refuse(f"a [[run]] needs an id of letters, digits, - and _, not {name!r}", "id" if name else "[run]")
        if not isinstance(processes, int) or not 1 <= processes <= 1024:
            self.refuse(f"gpus_per_run {processes!r} must be a number from 1 to 1024", "gpus_per_run")
        settings = overlay(settings, self.overrides)
        if ":" in str(settings.get("dataset", "")):
            self.refuse(
                f"dataset {settings['dataset']}: prepare the file (oelm prepare NAME --train FILE), then say NAME"
            )
        if "processes" in settings:
            self.refuse("processes is set by the launcher: say gpus_per_run", "processes")
        if not isinstance(settings.get("out_dir", "x"), str) or not settings.get("out_dir", "x").strip():
            self.refuse(f"run {name}: out_dir must be the name of a folder", "out_dir", run=name)
        folder = Path(settings.get("out_dir", self.out / name))
        if self.moved:
            folder = self.out / folder.name
        run = PlannedRun(name, {**settings, "out_dir": str(folder)}, processes)
        try:
            run.config  # noqa: B018  # refuses bad settings here and now
        except UserError as error:
            named = [
                key
                for key in {**self.overrides, **entry, **self.defaults}
                if re.search(rf"\b{re.escape(key)}\b", str(error))
            ]
            key = named[0] if named else ""
            if key in self.overrides:
                raise UserError(f"--set {key}={self.overrides[key]}: {error}") from None
            self.refuse(f"run {name}: {error}", "arm" if key == "model_type" and self._says_arm() else key, run=name)
        if "max_steps" in settings and run.config.num_epochs:
            self.refuse(f"run {name}: max_steps and num_epochs both say how long it is", "max_steps", run=name)
        return run

    def _says_arm(self) -> bool:
        return any(re.match(r"\s*arm\s*=", line) for line in self.lines)

    def _combinations(self, matrix: dict[str, Any]) -> list[PlannedRun]:
        """A run for every combination, with an id made of the values: baseline_lr0.001_seed1."""
        if not matrix:
            return []
        axes = {key: value if isinstance(value, list) else [value] for key, value in matrix.items()}
        count = math.prod(len(values) for values in axes.values())
        if not 0 < count <= MAX_RUNS:
            self.refuse(f"the [matrix] makes {count:,} runs; 1 to {MAX_RUNS:,} are allowed", "matrix")
        combinations = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
        return [self._run({"id": _id_of(c), **c}) for c in combinations]

    def _choices(self, matrix: dict[str, Any], select: dict[str, Any]) -> list[Choice]:
        self._refuse_others(select, ("setting", "seed"), where=" in [select]")
        setting, seed = select.get("setting", "max_lr"), select.get("seed")
        fixed = ("seed", "model_type", "label")
        if not isinstance(setting, str) or setting not in RunConfig.model_fields or setting in fixed:
            self.refuse(f"setting {setting!r} of [select] must be the name of a setting, such as max_lr", "setting")
        for key, value in (("setting", setting), ("seed", "seed")):
            if not isinstance(matrix.get(value), list):
                self.refuse(f"[select] needs {value} as a list in [matrix]", key)
        seed = matrix["seed"][0] if seed is None else seed
        if seed not in matrix["seed"]:
            self.refuse(f"the seed {seed} of [select] is not in the [matrix]", "seed", str(seed))
        groups: dict[tuple[Any, ...], list[PlannedRun]] = defaultdict(list)
        for run in self._combinations(matrix):
            alike = [run.settings.get(key) for key in (*matrix, "label") if key not in (setting, "seed")]
            groups[tuple(alike)].append(run)
        choices = []
        for runs in groups.values():
            candidates = [run for run in runs if run.settings["seed"] == seed]
            others = [run for run in runs if run.settings["seed"] != seed]
            values = matrix[setting]
            choices.append(
                Choice(setting, candidates, {v: [r for r in others if r.settings[setting] == v] for v in values})
            )
        return choices

    def _verdict(self, table: dict[str, Any]) -> dict[str, Any]:
        self._refuse_others(table, ("baseline", "criterion"), where=" in [verdict]")
        criterion, baseline = table.get("criterion"), table.get("baseline", "baseline")
        if not isinstance(baseline, str):
            self.refuse(f"baseline {baseline!r} in [verdict] must be the name of an arm", "baseline")
        number = isinstance(criterion, int | float) and not isinstance(criterion, bool)
        if criterion is not None and not (number and LEAST_CRITERION < criterion < MOST_CRITERION):
            self.refuse(f"criterion {criterion!r} in [verdict] must be a ratio such as 1.05", "criterion")
        return table


def load_plan(path: Path, out: Path | None = None, overrides: dict[str, Any] | None = None) -> Plan:
    """Read and check a plan. `out` moves all its run folders; `overrides` win over what it says of every run."""
    return _Reader(path, out, overrides or {}).read()


def left_plans(root: Path) -> list[Plan]:
    """The plans whose runs lie in or below `root`, as `oelm run` left them there."""
    plans = {(path.parent, path.read_bytes()): path for path in reversed(plan_copies(root))}  # a copy of a copy
    for encoder in [file for folder, _ in plans for file in folder.glob("*/encoder.json")]:
        with suppress(UserError):  # a damaged run is told of where runs are read
            RunFolder(encoder.parent).config()
    return [load_plan(path, path.parent) for path in reversed(plans.values())]


def plan_copies(root: Path) -> list[Path]:
    found = sorted(path for depth in ("", "*/", "*/*/") for path in root.glob(f"{depth}*{COPY}") if path.is_file())
    return without_links(root, found)


def _in_full(table: dict[str, Any]) -> dict[str, Any]:
    return {"model_type" if key == "arm" else key: value for key, value in table.items()}


def _id_of(combination: dict[str, Any]) -> str:
    short = {"model_type": "", "max_lr": "lr", "dataset": ""}
    combination = {"model_type": combination.get("model_type"), **combination}
    words = [
        f"{short.get(key, key)}{value}"
        for key, value in combination.items()
        if value not in (None, "") and key != "gpus_per_run"
    ]
    return re.sub(r"[^\w.+-]", "-", "_".join(words))
