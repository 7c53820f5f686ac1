"""Plans: a TOML file that names many runs.

[defaults]                    settings of every run, by the names of the flags
preset = "pocket"
[matrix]                      every combination becomes a run
model_type = ["baseline", "oelm_v2"]
seed = [1, 2, 3]
[[run]]                       a run of its own; `id` names its folder
id = "GPT-01"
[verdict]
baseline = "baseline"
criterion = 1.05
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oelm.config import RunConfig, load_toml, resolve
from oelm.errors import UserError, nearest

MAX_RUNS = 10_000
TABLES = ("defaults", "matrix", "run", "verdict")


@dataclass(frozen=True)
class PlannedRun:
    id: str
    settings: dict[str, Any]
    """What the plan says of the run; presets and arms fill in the rest."""

    @property
    def config(self) -> RunConfig:
        return resolve({}, self.settings)


@dataclass(frozen=True)
class Plan:
    runs: list[PlannedRun]
    baseline: str = "baseline"
    criterion: float = 1.05
    """Largest ratio of perplexities, arm to baseline, that passes."""


def load_plan(path: Path, out: Path, **overrides: Any) -> Plan:
    """Read and check a plan; every run's folder lies in `out`. `overrides` win over the plan's defaults."""
    content = load_toml(path)
    for table in content:
        if table not in TABLES:
            raise UserError(f"{path}: unknown table [{table}]: {nearest(table, TABLES)}")
    defaults = {**content.get("defaults", {}), **overrides}
    runs = [*_matrix_runs(path, content.get("matrix", {})), *content.get("run", [])]
    planned: dict[str, PlannedRun] = {}
    for entry in runs:
        settings = {**defaults, **entry}
        name = str(settings.pop("id", ""))
        if not name or "/" in name or name.startswith("."):
            raise UserError(f"{path}: a [[run]] needs an id of letters, digits, - and _, not {name!r}")
        if name in planned:
            raise UserError(f"{path}: the id {name} stands twice")
        planned[name] = PlannedRun(name, {"out_dir": str(out / name), **settings})
        try:
            planned[name].config  # noqa: B018  # refuses bad settings here and now
        except UserError as error:
            raise UserError(f"{path}, run {name}: {error}") from None
    if not planned:
        raise UserError(f"{path} names no runs: add a [matrix] or a [[run]]")
    plan = Plan(list(planned.values()), **_verdict(path, content.get("verdict", {})))
    if plan.baseline not in {run.config.model_type for run in plan.runs}:
        raise UserError(f"{path}: the verdict's baseline arm {plan.baseline} is in no run")
    return plan


def _matrix_runs(path: Path, matrix: dict[str, Any]) -> list[dict[str, Any]]:
    """Every combination, with an id made of the values: baseline_seed1."""
    if not matrix:
        return []
    axes = {key: value if isinstance(value, list) else [value] for key, value in matrix.items()}
    count = 1
    for values in axes.values():
        count *= len(values)
    if not 0 < count <= MAX_RUNS:
        raise UserError(f"{path}: the [matrix] makes {count:,} runs; 1 to {MAX_RUNS:,} are allowed")
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [{"id": _matrix_id(combination), **combination} for combination in combinations]


def _matrix_id(combination: dict[str, Any]) -> str:
    named = {"model_type": "", "max_lr": "lr", "dataset": ""}
    words = [f"{named.get(key, key)}{value}" for key, value in combination.items()]
    return "_".join(words).replace("/", "-")


def _verdict(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    for key in table:
        if key not in ("baseline", "criterion"):
            raise UserError(f"{path}: unknown key {key} in [verdict]: {nearest(key, ('baseline', 'criterion'))}")
    criterion = table.get("criterion", 1.05)
    if not isinstance(criterion, int | float) or not 0 < criterion < 100:
        raise UserError(f"{path}: criterion {criterion!r} in [verdict] must be a ratio such as 1.05")
    return table
