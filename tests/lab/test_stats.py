import math

import numpy as np
import pytest

from oelm.lab.stats import Gap, holm, judge, paired_gap

BAR = math.log(1.05)


def test_a_gap_by_hand():
    """Differences 0.02, 0.03, 0.04: mean 0.03, sd 0.01, standard error 0.01/sqrt(3); t(0.975, 2) = 4.302653."""
    baseline = {1: 1.0, 2: 1.1, 3: 1.2}
    gap = paired_gap({1: 1.02, 2: 1.13, 3: 1.24}, baseline, 1.05)
    assert gap.n == 3
    assert gap.mean == pytest.approx(0.03)
    assert gap.high - gap.mean == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-5)
    assert gap.ratio == pytest.approx(math.exp(0.03))
    # t = (0.03 - ln 1.05) / 0.0057735 = -3.2545; for 2 degrees of freedom P(T < t) = 1/2 + t / (2 sqrt(2 + t^2))
    t = (0.03 - BAR) / (0.01 / math.sqrt(3))
    assert gap.p_pass == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)))
    assert gap.p_fail == pytest.approx(1 - gap.p_pass)


def test_seeds_are_paired_not_averaged():
    """Seeds that differ by far more than the gap leave the interval narrow, because differences are taken first."""
    baseline = {1: 1.0, 2: 5.0, 3: 9.0}
    gap = paired_gap({1: 1.01, 2: 5.011, 3: 9.009, 4: 77.0}, baseline, 1.05)
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
    gap = paired_gap(arm, dict.fromkeys(arm, 2.0), 1.05)
    assert judge({"arm": gap})["arm"].verdict == verdict


def test_no_common_seed_is_no_pair():
    with pytest.raises(ValueError):
        paired_gap({1: 1.0}, {2: 1.0}, 1.05)


def test_holm_by_hand():
    """0.01 < 0.05/3 and 0.02 < 0.05/2 are rejected; 0.2 > 0.05 stops."""
    assert holm({"a": 0.2, "b": 0.01, "c": 0.02}) == {"a": False, "b": True, "c": True}
    assert holm({"a": 0.04, "b": 0.04}) == {"a": False, "b": False}
    assert holm({"a": 0.04, "b": 0.024}) == {"a": True, "b": True}


def test_holm_makes_a_verdict_harder_among_many_arms():
    gap = Gap(5, 0.03, 0.0, 0.06, p_pass=0.03, p_fail=0.97)
    assert judge({"a": gap})["a"].verdict == "PASS"
    assert judge({"a": gap, "b": gap, "c": gap})["a"].verdict == "INCONCLUSIVE"


def test_an_arm_exactly_at_the_criterion_passes_one_time_in_twenty():
    generator = np.random.default_rng(0)
    passes = 0
    for _ in range(2000):
        arm = dict(enumerate(generator.normal(BAR, 0.01, 3)))
        passes += judge({"a": paired_gap(arm, dict.fromkeys(arm, 0.0), 1.05)})["a"].verdict == "PASS"
    assert passes / 2000 == pytest.approx(0.05, abs=0.015)  # three standard errors
