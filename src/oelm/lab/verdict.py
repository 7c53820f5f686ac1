"""From finished run folders to a table of arms: perplexity, gap, verdict, step time, frozen share."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from oelm.errors import UserError
from oelm.lab.plan import Plan
from oelm.lab.stats import Gap, judge, paired_gap


@dataclass(frozen=True)
class ArmResult:
    arm: str
    perplexities: list[float]
    """Test split, final step, by seed."""
    gap: Gap | None
    """None for the baseline itself."""
    step_time_ratio: float
    """Median step time relative to the baseline's, over all seeds."""
    frozen_share: float

    @property
    def perplexity(self) -> float:
        return float(np.exp(np.mean(np.log(self.perplexities))))


def compare_arms(plan: Plan) -> list[ArmResult]:
    """Compare the finished runs of a plan, arm by arm, against its baseline arm."""
    runs: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for run in plan.final_runs:
        summary, config = run.folder.read_summary(), run.config
        if summary and summary["state"] == "finished":
            if config.seed in runs[config.model_type]:
                raise UserError(
                    f"{config.model_type} has several runs with seed {config.seed}: add a [select] to the plan"
                )
            runs[config.model_type][config.seed] = summary
    baseline = runs.get(plan.baseline)
    if not baseline:
        raise UserError(f"no finished run of the baseline arm {plan.baseline}: there is nothing to compare with")
    _refuse_unpaired(runs)
    losses = {arm: {seed: s["test_loss"] for seed, s in by_seed.items()} for arm, by_seed in runs.items()}
    others = [arm for arm in runs if arm != plan.baseline and runs[arm].keys() & baseline.keys()]
    gaps = judge({arm: paired_gap(losses[arm], losses[plan.baseline], plan.criterion) for arm in others})
    pace = _median_step(baseline)
    return [
        ArmResult(
            arm,
            [s["test_perplexity"] for _, s in sorted(runs[arm].items())],
            gaps.get(arm),
            _median_step(runs[arm]) / pace,
            next(iter(runs[arm].values()))["frozen_parameters"] / next(iter(runs[arm].values()))["total_parameters"],
        )
        for arm in [plan.baseline, *others]
    ]


def _refuse_unpaired(runs: dict[str, dict[int, dict[str, Any]]]) -> None:
    """A pair must have seen the same batches of the same tokens."""
    kinds = {(str(s["data"]), s["tokens_seen"], s["steps"]) for by_seed in runs.values() for s in by_seed.values()}
    if len(kinds) > 1:
        raise UserError("the runs differ in data, tokens or steps and cannot be compared pair by pair")


def _median_step(by_seed: dict[int, dict[str, Any]]) -> float:
    return float(np.median([s["median_step_seconds"] for s in by_seed.values()]))


def as_rows(results: list[ArmResult]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the results table, for a terminal or a document."""
    headings = [
        "arm",
        "test PPL (geometric mean)",
        "per seed",
        "gap to baseline [95 %]",
        "verdict",
        "step time",
        "frozen",
    ]
    rows = []
    for r in results:
        gap, verdict = "–", "baseline"
        if r.gap:
            low, high = r.gap.interval
            interval = f"[{low - 1:+.1%}, {high - 1:+.1%}]" if r.gap.n > 1 else "(one seed: no interval)"
            gap = f"{r.gap.ratio - 1:+.1%} {interval}"
            verdict = r.gap.verdict
        seeds = " ".join(f"{p:.2f}" for p in r.perplexities)
        rows.append(
            [r.arm, f"{r.perplexity:.2f}", seeds, gap, verdict, f"{r.step_time_ratio:.2f} x", f"{r.frozen_share:.1%}"]
        )
    return headings, rows
