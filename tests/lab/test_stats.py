import math

import numpy as np
import pytest

from oelm.lab.stats import (
    Gap,
    document_bootstrap,
    holm,
    judge,
    paired_gap,
    seeds_needed,
    speed_ratio,
    t_bounds,
    t_tests,
)

BAR = math.log(1.05)


def test_a_gap_by_hand():
    """Differences 0.02, 0.03, 0.04: mean 0.03, sd 0.01, standard error 0.01/sqrt(3); t(0.95, 2) = 2.919986."""
    baseline = {1: 1.0, 2: 1.1, 3: 1.2}
    gap = paired_gap({1: 1.02, 2: 1.13, 3: 1.24}, baseline, BAR)
    assert gap.n == 3
    assert gap.mean == pytest.approx(0.03)
    assert gap.high - gap.mean == pytest.approx(2.919986 * 0.01 / math.sqrt(3), rel=1e-5)
    assert gap.ratio == pytest.approx(math.exp(0.03))
    # t = (0.03 - ln 1.05) / 0.0057735 = -3.2545; for 2 degrees of freedom P(T < t) = 1/2 + t / (2 sqrt(2 + t^2))
    t = (0.03 - BAR) / (0.01 / math.sqrt(3))
    assert gap.p_pass == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)))
    assert gap.p_fail == pytest.approx(1 - gap.p_pass)


def test_seeds_are_paired_not_averaged():
    """Seeds that differ by far more than the gap leave the interval narrow, because differences are taken first."""
    baseline = {1: 1.0, 2: 5.0, 3: 9.0}
    gap = paired_gap({1: 1.01, 2: 5.011, 3: 9.009, 4: 77.0}, baseline, BAR)
    assert gap.n == 3
    assert gap.high < 0.02


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.00, 0.001, -0.001], "PASS"),
        ([-0.10, -0.11, -0.09], "PASS"),
        ([0.10, 0.11, 0.09], "FAIL"),
        ([0.04, 0.06, 0.05], "INCONCLUSIVE"),
        ([0.0, 0.0], "INCONCLUSIVE"),
        ([0.5], "INCONCLUSIVE"),
        ([0.0, 0.0, 0.0], "PASS"),
        ([0.2, 0.2, 0.2], "FAIL"),
    ],
)
def test_verdicts(differences, verdict):
    arm = {seed: 2.0 + d for seed, d in enumerate(differences)}
    gap = paired_gap(arm, dict.fromkeys(arm, 2.0), BAR)
    assert judge({"arm": gap}, BAR)["arm"].verdict == verdict


def test_no_common_seed_is_no_pair():
    with pytest.raises(ValueError):
        paired_gap({1: 1.0}, {2: 1.0}, BAR)


def test_holm_by_hand():
    """0.01 < 0.05/3 and 0.02 < 0.05/2 are rejected; 0.2 > 0.05 stops."""
    assert holm({"a": 0.2, "b": 0.01, "c": 0.02}) == {"a": False, "b": True, "c": True}
    assert holm({"a": 0.04, "b": 0.04}) == {"a": False, "b": False}
    assert holm({"a": 0.04, "b": 0.024}) == {"a": True, "b": True}


def test_holm_makes_a_verdict_harder_among_many_arms():
    gap = Gap(5, 0.03, 0.0, 0.06, p_pass=0.03, p_fail=0.97)
    assert judge({"a": gap}, BAR)["a"].verdict == "PASS"
    assert judge({"a": gap, "b": gap, "c": gap}, BAR)["a"].verdict == "INCONCLUSIVE"


def simulated_passes(ratio, n, sd=0.01, repeats=100_000):
    """Share of simulated studies that pass, through the functions that judge real ones."""
    differences = np.random.default_rng(n).normal(math.log(ratio), sd, (repeats, n))
    mean, error, _, high = t_bounds(differences)
    p_pass, _ = t_tests(mean, error, n, BAR)
    assert np.array_equal(p_pass < 0.05, high < BAR)  # the bound and the test are one rule
    one = dict(enumerate(differences[0]))
    assert (judge({"a": paired_gap(one, dict.fromkeys(one, 0.0), BAR)}, BAR)["a"].verdict == "PASS") == (high[0] < BAR)
    return float((p_pass < 0.05).mean())


@pytest.mark.parametrize("n", [3, 5, 8])
def test_an_arm_exactly_at_the_criterion_passes_one_time_in_twenty(n):
    assert simulated_passes(1.05, n) == pytest.approx(0.05, abs=0.003)


def test_an_arm_as_good_as_the_baseline_passes_with_five_seeds():
    assert simulated_passes(1.00, 5) >= 0.99


def test_seeds_needed_decide_four_times_in_five():
    """With the number named, simulated studies decide with probability 0.8; with one seed less, with less."""
    gap = Gap(5, BAR - 0.008, 0.0, 0.0, sd=0.01)
    n = seeds_needed(gap, BAR)
    assert simulated_passes(math.exp(gap.mean), n) == pytest.approx(0.83, abs=0.03)
    assert simulated_passes(math.exp(gap.mean), n - 1) < 0.8
    assert seeds_needed(Gap(5, BAR, 0.0, 0.0, sd=0.01), BAR) is None  # never, if the truth is the criterion itself


def test_documents_bootstrap_against_the_normal_theory():
    """1,000 equal documents that differ by N(0.05, 0.2): bounds at 1.645 x 0.2 / sqrt(1000) around the mean."""
    chance = np.random.default_rng(1)
    tokens = np.full(1_000, 80.0)
    baseline = np.column_stack((chance.normal(240, 20, 1_000), tokens))
    arm = baseline + np.column_stack((80 * chance.normal(0.05, 0.2, 1_000), np.zeros(1_000)))
    low, high = document_bootstrap(arm, baseline)
    centre = (arm[:, 0] - baseline[:, 0]).sum() / tokens.sum()
    reach = 1.645 * 0.2 / math.sqrt(1_000)
    assert low == pytest.approx(centre - reach, abs=0.15 * reach)
    assert high == pytest.approx(centre + reach, abs=0.15 * reach)


def test_speed_ratios_are_paired_by_run():
    """Machines twice as slow for both leave the ratio alone."""
    pairs = [(np.full(9, 0.09 * f), np.full(9, 0.10 * f)) for f in (1.0, 2.0, 4.0)]
    gap = speed_ratio(pairs)
    assert gap.ratio == pytest.approx(0.9)
    assert gap.high - gap.low == pytest.approx(0, abs=1e-9)
