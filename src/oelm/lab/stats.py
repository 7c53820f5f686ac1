"""Statistics of a comparison: seed-paired gaps, intervals and the verdict.

The gap of an arm is the mean over seeds of log PPL(arm) - log PPL(baseline), final step, test split,
shown as a ratio of perplexities. Pairs share initial weights and batches, so most of the noise cancels.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

ALPHA = 0.05
MIN_SEEDS = 3


@dataclass(frozen=True)
class Gap:
    """An arm against a baseline, in log perplexity."""

    n: int
    mean: float
    low: float
    """Two-sided 95 % interval."""
    high: float
    p_pass: float
    """One-sided p value against 'the gap is at or above the criterion'."""
    p_fail: float
    """One-sided p value against 'the gap is at or below the criterion'."""
    verdict: str = "INCONCLUSIVE"

    @property
    def ratio(self) -> float:
        return math.exp(self.mean)

    @property
    def interval(self) -> tuple[float, float]:
        return math.exp(self.low), math.exp(self.high)


def paired_gap(arm: Mapping[int, float], baseline: Mapping[int, float], criterion: float) -> Gap:
    """Gap from losses by seed (nats per token); seeds that only one side has are left out."""
    from scipy.stats import t

    seeds = sorted(arm.keys() & baseline.keys())
    differences = np.array([arm[seed] - baseline[seed] for seed in seeds])
    n = len(seeds)
    if n == 0:
        raise ValueError("no seed in common")
    mean, bar = float(differences.mean()), math.log(criterion)
    if n == 1:
        return Gap(1, mean, -math.inf, math.inf, 1.0, 1.0)
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    reach = float(t.ppf(1 - ALPHA / 2, n - 1)) * error
    if error == 0:
        below, above = float(mean >= bar), float(mean <= bar)
    else:
        below, above = float(t.cdf((mean - bar) / error, n - 1)), float(t.sf((mean - bar) / error, n - 1))
    return Gap(n, mean, mean - reach, mean + reach, below, above)


def judge(gaps: Mapping[str, Gap]) -> dict[str, Gap]:
    """Give each arm its verdict, with Holm's correction across the arms."""
    passed = holm({arm: gap.p_pass for arm, gap in gaps.items()})
    failed = holm({arm: gap.p_fail for arm, gap in gaps.items()})
    judged = {}
    for arm, gap in gaps.items():
        verdict = "INCONCLUSIVE"
        if gap.n >= MIN_SEEDS:
            verdict = "PASS" if passed[arm] else "FAIL" if failed[arm] else verdict
        judged[arm] = replace(gap, verdict=verdict)
    return judged


def holm(p_values: Mapping[str, float]) -> dict[str, bool]:
    """Which hypotheses are rejected at ALPHA, with the family-wise error held."""
    rejected = dict.fromkeys(p_values, False)
    ordered = sorted(p_values, key=lambda name: p_values[name])
    for index, name in enumerate(ordered):
        if p_values[name] > ALPHA / (len(ordered) - index):
            break
        rejected[name] = True
    return rejected
