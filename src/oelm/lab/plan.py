"""Plans: a TOML file that names many runs.

    out = "outputs/pocket"        where the run folders go; default outputs/<name of the plan>
    [defaults]                    settings of every run, by the names of the flags
    preset = "pocket"
    [matrix]                      every combination becomes a run
    model_type = ["baseline", "oelm_v2"]
    max_lr = [1e-3, 2e-3, 4e-3]
    seed = [1, 2, 3]
    [select]                      first all learning rates with one seed, then the other seeds at the best
    setting = "max_lr"
    seed = 1
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
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from oelm.config import RunConfig, load_toml, resolve
from oelm.errors import UserError, nearest
from oelm.train.folder import RunFolder

MAX_RUNS = 10_000
TABLES = ("out", "defaults", "matrix", "select", "run", "verdict")


@dataclass(frozen=True)
class PlannedRun:
    id: str
    settings: dict[str, Any]
    """What the plan says of the run; presets and arms fill in the rest."""
    processes: int = 1

    @property
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

    def best(self) -> PlannedRun | None:
        """The candidate with the lowest final validation loss, once all have ended; None before, or if all failed."""
        summaries = [run.folder.read_summary() or {} for run in self.candidates]
        if any(s.get("state") not in ("finished", "failed") for s in summaries):
            return None
        losses = [s.get("final_val_loss", math.inf) for s in summaries]
        return self.candidates[losses.index(min(losses))] if min(losses) < math.inf else None


@dataclass(frozen=True)
class Plan:
    fixed: list[PlannedRun]
    choices: list[Choice] = field(default_factory=list)
    baseline: str = "baseline"
    criterion: float = 1.05
    """Largest ratio of perplexities, arm to baseline, that passes."""

    @property
    def runs(self) -> list[PlannedRun]:
        """The runs that are known now: those that wait for a choice appear when it is made."""
        known = list(self.fixed)
        for choice in self.choices:
            known += choice.candidates
            best = choice.best()
            known += choice.followers[best.settings[choice.setting]] if best else []
        return known

    @property
    def final_runs(self) -> list[PlannedRun]:
        """The runs that a verdict rests on: after a choice, only those at the chosen value."""
        chosen = [(choice, choice.best()) for choice in self.choices]
        return self.fixed + [
            run for c, best in chosen if best for run in [best, *c.followers[best.settings[c.setting]]]
        ]

    @property
    def total(self) -> int:
        """Number of runs when all choices are made."""
        per_choice = (len(c.candidates) + len(next(iter(c.followers.values()))) for c in self.choices)
        return len(self.fixed) + sum(per_choice)


class _Reader:
    """Checks one plan file and says where in it a fault lies."""

    def __init__(self, path: Path, out: Path | None, overrides: dict[str, Any]) -> None:
        self.path = path
        self.content = load_toml(path)
        self.lines = path.read_text(encoding="utf-8").splitlines()
        for key in self.content:
            if key not in TABLES:
                self.refuse(f"unknown key or table {key}: {nearest(key, TABLES)}", key)
        self.moved = out is not None
        self.out = out or Path(self.content.get("out", f"outputs/{path.stem}"))
        self.defaults, self.overrides = self._table("defaults"), overrides

    def read(self) -> Plan:
        matrix, select = self._table("matrix"), self._table("select")
        chooses = "select" in self.content
        fixed, choices = ([], self._choices(matrix, select)) if chooses else (self._combinations(matrix), [])
        fixed += [self._run(entry) for entry in self._list("run")]
        plan = Plan(fixed, choices, **self._verdict(self._table("verdict")))
        everything = [*fixed, *(run for c in choices for runs in (c.candidates, *c.followers.values()) for run in runs)]
        if not everything:
            self.refuse("it names no runs: add a [matrix] or a [[run]]")
        for what, names in (
            ("id", [r.id for r in everything]),
            ("out_dir", [r.settings["out_dir"] for r in everything]),
        ):
            name, count = Counter(names).most_common(1)[0]
            if count > 1:
                self.refuse(f"the {what} {name} stands twice", what, name)
        if plan.baseline not in {run.config.model_type for run in everything}:
            self.refuse(f"the baseline arm {plan.baseline} is in no run", "baseline")
        return plan

    def refuse(self, message: str, key: str = "", value: str = "") -> NoReturn:
        """One line with file, line number and message; the line is the (last) one that sets `key`."""
        pattern = re.compile(rf"^\s*\[*\s*{re.escape(key)}\b.*{re.escape(value)}") if key else None
        numbers = [i for i, line in enumerate(self.lines, 1) if pattern and pattern.search(line)]
        where = f"{self.path}, line {numbers[-1]}" if numbers else str(self.path)
        raise UserError(f"{where}: {message}")

    def _table(self, name: str) -> dict[str, Any]:
        table = self.content.get(name, {})
        if not isinstance(table, dict):
            self.refuse(f"{name} must be a table: [{name}]", name)
        return {"model_type" if key == "arm" else key: value for key, value in table.items()}

    def _list(self, name: str) -> list[dict[str, Any]]:
        entries = self.content.get(name, [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            self.refuse(f"{name} must be written as [[{name}]]", name)
        return [{"model_type" if key == "arm" else key: value for key, value in entry.items()} for entry in entries]

    def _run(self, entry: dict[str, Any]) -> PlannedRun:
        settings = {**self.defaults, **entry}
        name, processes = settings.pop("id", ""), settings.pop("gpus_per_run", 1)
        if not isinstance(name, str) or not re.fullmatch(r"[\w][\w.+-]*", name):
            self.refuse(f"a [[run]] needs an id of letters, digits, - and _, not {name!r}", "id" if name else "[run]")
        if not isinstance(processes, int) or not 1 <= processes <= 1024:
            self.refuse(f"gpus_per_run {processes!r} must be a number from 1 to 1024", "gpus_per_run")
        settings |= self.overrides
        folder = Path(str(settings.get("out_dir", self.out / name)))
        if self.moved:
            folder = self.out / folder.name
        run = PlannedRun(name, {**settings, "out_dir": str(folder)}, processes)
        try:
            run.config  # noqa: B018  # refuses bad settings here and now
        except UserError as error:
            key = next((key for key in {**entry, **self.defaults} if re.search(rf"\b{key}\b", str(error))), "")
            self.refuse(f"run {name}: {error}", "arm" if key == "model_type" and self._says_arm() else key)
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
        for key in select:
            if key not in ("setting", "seed"):
                self.refuse(f"unknown key {key} in [select]: {nearest(key, ('setting', 'seed'))}", key)
        setting, seed = select.get("setting", "max_lr"), select.get("seed")
        for key, value in (("setting", setting), ("seed", "seed")):
            if not isinstance(matrix.get(value), list):
                self.refuse(f"[select] needs {value} as a list in [matrix]", key)
        seed = matrix["seed"][0] if seed is None else seed
        if seed not in matrix["seed"]:
            self.refuse(f"the seed {seed} of [select] is not in the [matrix]", "seed", str(seed))
        groups: dict[tuple[Any, ...], list[PlannedRun]] = defaultdict(list)
        for run in self._combinations(matrix):
            groups[tuple(run.settings[key] for key in matrix if key not in (setting, "seed"))].append(run)
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
        for key in table:
            if key not in ("baseline", "criterion"):
                self.refuse(f"unknown key {key} in [verdict]: {nearest(key, ('baseline', 'criterion'))}", key)
        criterion = table.get("criterion", 1.05)
        if not isinstance(criterion, int | float) or not 0 < criterion < 100:
            self.refuse(f"criterion {criterion!r} in [verdict] must be a ratio such as 1.05", "criterion")
        return table


def load_plan(path: Path, out: Path | None = None, **overrides: Any) -> Plan:
    """Read and check a plan. `out` moves all its run folders; `overrides` win over what it says of every run."""
    return _Reader(path, out, overrides).read()


def _id_of(combination: dict[str, Any]) -> str:
    short = {"model_type": "", "max_lr": "lr", "dataset": ""}
    combination = {"model_type": combination.get("model_type"), **combination}
    words = [f"{short.get(key, key)}{value}" for key, value in combination.items() if value and key != "gpus_per_run"]
    return re.sub(r"[^\w.+-]", "-", "_".join(words))
