"""Statistics of a comparison: seed-paired gaps, their bounds, the verdict, and how sure the measurement itself is.

The gap of an arm is the mean over seeds of its score less the baseline's, final step, test split: a difference of
log perplexities or of errors (oelm.lab.score). Pairs share initial weights and batches, so most noise cancels.
`low` and `high` are each a one-sided 95 % bound: the same bounds that decide the verdict.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from oelm.train.metrics import macro_f1, perplexity

ALPHA = 0.05
POWER = 0.8
MIN_SEEDS = 3
MAX_SEEDS = 1_000
PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"


@dataclass(frozen=True)
class Gap:
    """An arm against another, as a difference of scores."""

    n: int
    mean: float
    low: float
    high: float
    sd: float = 0.0
    """Of the differences, over seeds."""
    p_pass: float = 1.0
    """One-sided p value against 'the gap is at or above the criterion'."""
    p_fail: float = 1.0
    """One-sided p value against 'the gap is at or below the criterion'."""
    verdict: str = INCONCLUSIVE
    seeds_needed: int | None = None
    """To decide with probability POWER, if mean and spread stay as they are; None: decided, or not to be told."""

    @property
    def ratio(self) -> float:
        """Of a difference of logarithms."""
        return perplexity(self.mean)

    @property
    def bounds(self) -> tuple[float, float]:
        return perplexity(self.low), perplexity(self.high)


def paired_gap(arm: Mapping[int, float], baseline: Mapping[int, float], bar: float) -> Gap:
    """Gap from scores by seed, tested against `bar`; seeds that only one side has are left out."""
    seeds = sorted(arm.keys() & baseline.keys())
    if not seeds:
        raise ValueError("no seed in common")
    differences = np.array([arm[seed] - baseline[seed] for seed in seeds])
    if len(seeds) == 1:
        return Gap(1, float(differences[0]), -math.inf, math.inf)
    mean, error, low, high = t_bounds(differences)
    p_pass, p_fail = t_tests(mean, error, len(seeds), bar)
    sd = float(error) * math.sqrt(len(seeds))
    return Gap(len(seeds), float(mean), float(low), float(high), sd, float(p_pass), float(p_fail))


def t_bounds(differences: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean, its standard error, and both one-sided bounds, along the last axis."""
    from scipy.stats import t

    n = differences.shape[-1]
    mean, error = differences.mean(-1), differences.std(-1, ddof=1) / math.sqrt(n)
    reach = t.ppf(1 - ALPHA, n - 1) * error
    return mean, error, mean - reach, mean + reach


def t_tests(mean: np.ndarray, error: np.ndarray, n: int, bar: float) -> tuple[np.ndarray, np.ndarray]:
    """One-sided p values: that the mean is not below `bar`, and that it is not above."""
    from scipy.stats import t

    with np.errstate(divide="ignore", invalid="ignore"):
        score = np.nan_to_num((mean - bar) / error, nan=0.0, posinf=np.inf, neginf=-np.inf)
    return t.cdf(score, n - 1), t.sf(score, n - 1)


def judge(gaps: Mapping[str, Gap], bar: float) -> dict[str, Gap]:
    """Give each arm its verdict, with Holm's correction across the arms that have seeds enough to be decided."""
    family = {arm: gap for arm, gap in gaps.items() if gap.n >= MIN_SEEDS}
    passed = holm({arm: gap.p_pass for arm, gap in family.items()})
    failed = holm({arm: gap.p_fail for arm, gap in family.items()})
    judged = {}
    for arm, gap in gaps.items():
        verdict = PASS if passed.get(arm) else FAIL if failed.get(arm) else INCONCLUSIVE
        alpha = ALPHA / max(1, len(family))
        needed = seeds_needed(gap, bar, alpha) if verdict == INCONCLUSIVE and gap.n > 1 else None
        judged[arm] = replace(gap, verdict=verdict, seeds_needed=needed)
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


def seeds_needed(gap: Gap, bar: float, alpha: float = ALPHA) -> int | None:
    """Seeds with which a one-sided t test decides with probability POWER; None beyond MAX_SEEDS."""
    from scipy.stats import nct, t

    distance = abs(gap.mean - bar)
    n = np.arange(MIN_SEEDS, MAX_SEEDS + 1)
    if gap.sd == 0:
        return MIN_SEEDS if distance else None
    power = nct.sf(t.ppf(1 - alpha, n - 1), n - 1, distance / gap.sd * np.sqrt(n))
    enough = np.flatnonzero(np.nan_to_num(power, nan=1.0) >= POWER)
    return int(n[enough[0]]) if len(enough) else None


def document_bootstrap(arm: np.ndarray, baseline: np.ndarray) -> tuple[float, float]:
    """Bounds of one pair's gap if other documents had been drawn for the test split.

    Rows are (summed loss, tokens) per document, the same documents for both. Both bounds are one-sided
    at 95 %. It tells the noise of the evaluation, not of the training.
    """
    difference, tokens = arm[:, 0] - baseline[:, 0], arm[:, 1]
    return _bootstrap(lambda drawn: difference[drawn].sum() / tokens[drawn].sum(), len(tokens))


def answers_bootstrap(arm: np.ndarray, baseline: np.ndarray) -> tuple[float, float]:
    """The same of the error, in points; rows are (label, answer) per example."""
    wrong = 100.0 * ((arm[:, 0] != arm[:, 1]).astype(float) - (baseline[:, 0] != baseline[:, 1]))
    return _bootstrap(lambda drawn: wrong[drawn].mean(), len(wrong))


def mcnemar(arm: np.ndarray, baseline: np.ndarray) -> tuple[int, int, float]:
    """Examples that only the arm, and that only the baseline gets right; two-sided exact p that they are as likely."""
    from scipy.stats import binomtest

    mine, other = (rows[:, 0] == rows[:, 1] for rows in (arm, baseline))
    only_mine, only_other = int((mine & ~other).sum()), int((~mine & other).sum())
    n = only_mine + only_other
    return only_mine, only_other, float(binomtest(only_mine, n).pvalue) if n else 1.0


def accuracy_bounds(correct: int, n: int) -> tuple[float, float]:
    """Wilson's one-sided bounds of a share."""
    from scipy.stats import binomtest

    found = binomtest(correct, n).proportion_ci(1 - 2 * ALPHA, method="wilson")
    return float(found.low), float(found.high)


def f1_bounds(rows: np.ndarray, classes: int) -> tuple[float, float]:
    """One-sided bounds of the macro-F1 if other examples had been drawn."""
    return _bootstrap(lambda drawn: macro_f1(rows[drawn, 0], rows[drawn, 1], classes), len(rows))


def _bootstrap(statistic: Callable[[np.ndarray], float], n: int, repeats: int = 1_000) -> tuple[float, float]:
    """One-sided bounds of a statistic of n things, from its values on things drawn with replacement."""
    chance = np.random.default_rng(0)
    low, high = np.quantile([statistic(chance.integers(0, n, n)) for _ in range(repeats)], (ALPHA, 1 - ALPHA))
    return float(low), float(high)


def speed_ratio(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Gap:
    """Step times of an arm and its baseline, pair by pair of runs: the log ratio of medians, with bounds."""
    ratios = {i: math.log(np.median(a) / np.median(b)) for i, (a, b) in enumerate(pairs)}
    return paired_gap(ratios, dict.fromkeys(ratios, 0.0), 0.0)
