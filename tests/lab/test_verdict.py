import json
import math

import numpy as np
import pytest

from oelm.lab.study import load_study
from oelm.lab.verdict import reach_verdict
from tests.lab.made_runs import make_arm, make_run

BASE = {1: 2.00, 2: 2.10, 3: 2.20}


def shifted(by, noise=(0.0, 0.001, -0.001)):
    return {seed: loss + by + n for (seed, loss), n in zip(BASE.items(), noise, strict=True)}


def judge(root):
    return reach_verdict(load_study(root))


def test_plain_and_fair_by_hand(tmp_path):
    """oelm_v2 is 2 % above the baseline but 8 % above the trained arm of its own start: plain passes, fair fails."""
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "orthogonal", shifted(-0.06))
    make_arm(tmp_path, "oelm_v2", shifted(0.02, (0.001, 0.0, -0.001)))
    found = judge(tmp_path)
    judgement = found.settings[0].judgements["oelm_v2"]
    assert judgement.plain.mean == pytest.approx(0.02)
    assert judgement.plain.verdict == "PASS"
    assert judgement.against == "orthogonal"
    assert judgement.fair.mean == pytest.approx(0.08)
    assert judgement.fair.verdict == "FAIL"
    # differences to orthogonal: 0.081, 0.079, 0.08: sd 0.001; t(0.95, 2) = 2.919986
    assert judgement.fair.high - judgement.fair.mean == pytest.approx(2.919986 * 0.001 / math.sqrt(3), rel=1e-4)
    assert found.overall == "FAIL"
    assert found.arms == {"oelm_v2": "FAIL"}


def test_the_fair_baseline_is_the_plain_one_where_it_is_better_on_validation(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "orthogonal", shifted(0.06))
    make_arm(tmp_path, "oelm_v2", shifted(0.01))
    make_arm(tmp_path, "oelm_random", shifted(0.02))
    judgements = judge(tmp_path).settings[0].judgements
    assert {name: j.against for name, j in judgements.items()} == dict.fromkeys(judgements, "baseline")


def test_the_fair_baseline_is_chosen_on_validation_not_on_test(tmp_path):
    make_arm(tmp_path, "baseline", BASE, val=1.0)
    make_arm(tmp_path, "orthogonal", shifted(-0.5), val=1.1)
    make_arm(tmp_path, "oelm_v2", shifted(0.01))
    assert judge(tmp_path).settings[0].judgements["oelm_v2"].against == "baseline"


def test_candidates_for_the_fair_baseline_are_compared_on_the_same_seeds(tmp_path):
    """orthogonal is worse on the three seeds of the pair; its fourth, lucky seed must not make it the better one."""
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "orthogonal", {**shifted(0.05), 4: 0.1})
    make_arm(tmp_path, "oelm_v2", shifted(0.01))
    assert judge(tmp_path).settings[0].judgements["oelm_v2"].against == "baseline"


def test_an_arm_at_the_baselines_scale_is_not_measured_against_another_scale(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "orthogonal", shifted(-0.06))
    make_arm(tmp_path, "oelm_random", shifted(0.01))
    assert judge(tmp_path).settings[0].judgements["oelm_random"].against == "baseline"


def test_one_passing_arm_is_enough_and_trained_arms_do_not_count(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_v2", shifted(0.3))
    make_arm(tmp_path, "orthogonal", shifted(0.0))
    assert judge(tmp_path).overall == "FAIL"
    make_arm(tmp_path, "oelm_matched", shifted(0.01))
    found = judge(tmp_path)
    assert found.overall == "PASS"
    assert found.passing == ["oelm_matched"]


def test_an_arm_must_pass_on_every_data_set(tmp_path):
    for dataset, gap in (("one", 0.01), ("two", 0.3)):
        make_arm(tmp_path / dataset, "baseline", BASE, dataset=dataset)
        make_arm(tmp_path / dataset, "oelm_v2", shifted(gap), dataset=dataset)
    found = judge(tmp_path)
    assert [s.judgements["oelm_v2"].fair.verdict for s in found.settings] == ["PASS", "FAIL"]
    assert found.overall == "FAIL"


def test_the_ablation_adds_up(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_random", shifted(0.20))
    make_arm(tmp_path, "oelm_matched", shifted(0.12))
    make_arm(tmp_path, "oelm_v2", shifted(0.10))
    steps = judge(tmp_path).settings[0].steps
    means = {name: round(gap.mean, 6) for name, gap in steps.items()}
    assert means == {
        "freeze": 0.10, "random": 0.20, "random_to_freeze": -0.10, "scale": -0.08, "orthogonality": -0.02,
    }  # fmt: skip
    assert steps["random"].mean + steps["scale"].mean + steps["orthogonality"].mean == pytest.approx(
        steps["freeze"].mean
    )


def test_speed_is_the_ratio_of_medians(tmp_path):
    make_arm(tmp_path, "baseline", BASE, step_seconds=0.1)
    make_arm(tmp_path, "oelm_v2", shifted(0.0), step_seconds=0.09)
    assert judge(tmp_path).settings[0].judgements["oelm_v2"].speed.ratio == pytest.approx(0.9)


def test_evaluation_noise_needs_the_same_documents(tmp_path):
    rows = np.column_stack((np.full(50, 200.0), np.full(50, 100.0)))
    make_arm(tmp_path, "baseline", BASE, documents=rows)
    make_arm(tmp_path, "oelm_v2", shifted(0.0), documents=rows + np.array([10.0, 0.0]))
    make_arm(tmp_path, "oelm_random", shifted(0.0), documents=rows[:40])
    judgements = judge(tmp_path).settings[0].judgements
    assert judgements["oelm_v2"].evaluation == pytest.approx((0.1, 0.1))  # every document: 10 nats in 100 tokens
    assert judgements["oelm_random"].evaluation is None


@pytest.mark.parametrize(("gap", "code", "word"), [(0.01, 0, "PASS"), (0.2, 1, "FAIL"), (0.0487, 3, "INCONCLUSIVE")])
def test_the_exit_code_tells_the_verdict(tmp_path, oelm, gap, code, word):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_v2", shifted(gap, (0.0, 0.02, -0.02)))
    result = oelm("verdict", tmp_path)
    assert result.code == code
    assert result.out.strip().splitlines()[-1].startswith(word)
    found = json.loads(oelm("verdict", tmp_path, "--json").out)
    assert found["overall"] == word
    assert found["settings"][0]["arms"]["oelm_v2"]["fair"]["ratio"] == pytest.approx(math.exp(gap))


@pytest.mark.parametrize(
    ("arms", "words"),
    [
        (["oelm_v2"], "no finished run of the baseline arm baseline"),
        (["baseline"], "no finished run of another arm"),
    ],
)
def test_nothing_to_judge_is_one_line(tmp_path, oelm, arms, words):
    for arm in arms:
        make_run(tmp_path, arm, arm)
    result = oelm("verdict", tmp_path)
    assert result.code == 2
    assert words in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_another_criterion_and_baseline_can_be_asked_for(tmp_path, oelm):
    make_arm(tmp_path, "orthogonal", BASE)
    make_arm(tmp_path, "oelm_v2", shifted(0.08))
    assert oelm("verdict", tmp_path, "--baseline", "orthogonal").code == 1
    assert oelm("verdict", tmp_path, "--baseline", "orthogonal", "--criterion", 1.2).code == 0
    assert oelm("verdict", tmp_path, "--baseline", "oelm_v2").code == 0  # a frozen baseline is a baseline, too
    assert oelm("verdict", tmp_path, "--criterion", 7).code == 2


def spoilt(root, name, **changes):
    """A run whose summary says something else than it did."""
    file = root / name / "summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def diverged(root, name, arm, seed, lr=1e-3):
    make_run(root, name, arm, seed, lr, state="failed", reason="loss nan, gradient norm nan at step 3")


def test_only_frozen_arms_decide(tmp_path, oelm):
    """A trained arm that passes in a setting of its own does not make up for the frozen one that fails."""
    make_arm(tmp_path / "a", "baseline", BASE)
    make_arm(tmp_path / "a", "oelm_v2", shifted(0.2))
    make_arm(tmp_path / "b", "baseline", BASE, num_layers=4)
    make_arm(tmp_path / "b", "orthogonal", shifted(0.0), num_layers=4)
    assert oelm("verdict", tmp_path).code == 1
    result = oelm("verdict", tmp_path / "b")
    assert (result.code, "no frozen arm" in result.out) == (3, True)


def test_an_arm_that_diverged_or_was_not_run_in_one_setting_has_not_passed_in_every_setting(tmp_path):
    for layers in (2, 4):
        make_arm(tmp_path / str(layers), "baseline", BASE, num_layers=layers)
    make_arm(tmp_path / "2", "oelm_v2", shifted(0.0), num_layers=2)
    make_arm(tmp_path / "4", "oelm_random", shifted(0.0), num_layers=4)
    for seed in BASE:
        reason = "loss nan, gradient norm nan at step 3"
        make_run(tmp_path / "4", f"d{seed}", "oelm_v2", seed, state="failed", reason=reason, num_layers=4)
    assert judge(tmp_path).arms == {"oelm_v2": "FAIL", "oelm_random": "INCONCLUSIVE"}
    make_arm(tmp_path / "2", "oelm_random", shifted(0.0), num_layers=2)
    assert judge(tmp_path).arms == {"oelm_v2": "FAIL", "oelm_random": "PASS"}


def test_an_arm_with_additions_that_no_trained_arm_has_cannot_pass(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_v3", shifted(-0.2))
    verdict = judge(tmp_path)
    assert verdict.arms == {"oelm_v3": "INCONCLUSIVE"}
    facts = next(threat.facts for threat in verdict.threats if threat.kind == "extras")
    assert facts["arms"] == "oelm_v3: key_shift, rope"  # trained Q/K hold what the core would add
    make_arm(tmp_path, "baseline", shifted(-0.2), lr=2e-3, rope="half", key_shift=1.0, label="baseline_v3")
    verdict = judge(tmp_path)
    assert verdict.arms == {"oelm_v3": "PASS"}
    assert "extras" not in {threat.kind for threat in verdict.threats}


def test_a_trained_arm_with_more_than_was_added_does_not_make_the_comparison_fair(tmp_path):
    """The only trained arm with the shift also has rotary positions: nothing can tell what either of them gave."""
    make_arm(tmp_path, "baseline", BASE)
    for seed, loss in shifted(-0.2).items():
        make_run(tmp_path, f"shifted{seed}", "oelm_v2", seed, test=loss, label="shifted", key_shift=1.0)
        more = dict(label="more", key_shift=1.0, rope="half")
        make_run(tmp_path, f"more{seed}", "baseline", seed, test=loss - 0.3, **more)
    found = judge(tmp_path)
    assert found.arms == {"shifted": "INCONCLUSIVE"}
    assert [t.facts["arms"] for t in found.threats if t.kind == "extras"] == ["shifted: key_shift"]


@pytest.mark.parametrize(("state", "reason"), [("stopped", ""), ("failed", "the gradient norm is nan")])
def test_where_no_baseline_came_to_an_end_nothing_has_passed(tmp_path, state, reason):
    for arm in ("baseline", "oelm_v2"):
        make_arm(tmp_path / "one", arm, BASE)
    make_arm(tmp_path / "two", "oelm_v2", BASE, dataset="openwebtext")
    for seed in BASE:
        options = dict(state=state, reason=reason, dataset="openwebtext")
        make_run(tmp_path / "two", f"baseline{seed}", "baseline", seed, test=None, **options)
    found = judge(tmp_path)
    assert found.arms == {"oelm_v2": "INCONCLUSIVE"}
    assert [t.facts["arms"] for t in found.threats if t.kind == "no_baseline"] == ["oelm_v2"]


def test_no_arm_fails_beside_a_baseline_that_diverged_and_no_seeds_are_promised_where_a_verdict_is_barred(tmp_path):
    make_arm(tmp_path, "baseline", {seed: BASE[seed] for seed in (1, 2, 3)})
    for seed in (4, 5):
        diverged(tmp_path, f"baseline_lost{seed}", "baseline", seed)
    make_arm(tmp_path, "oelm_v2", shifted(0.2))
    make_arm(tmp_path, "oelm_random", shifted(0.1, (0.1, 0.0, -0.1)))
    found = judge(tmp_path).settings[0].judgements
    assert [found[arm].fair.verdict for arm in ("oelm_v2", "oelm_random")] == ["INCONCLUSIVE"] * 2
    assert [found[arm].fair.seeds_needed for arm in ("oelm_v2", "oelm_random")] == [None] * 2


def test_survivors_of_a_divergence_cannot_pass(tmp_path):
    make_arm(tmp_path, "baseline", {**BASE, 4: 2.0})
    make_arm(tmp_path, "oelm_v2", shifted(0.0))
    assert judge(tmp_path).overall == "PASS"
    diverged(tmp_path, "lost", "oelm_v2", 4)
    found = judge(tmp_path)
    assert found.overall == "INCONCLUSIVE"
    assert "diverged" in {threat.kind for threat in found.threats}


def test_a_baseline_that_lost_one_seed_still_is_one(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    diverged(tmp_path, "lost", "baseline", 4)
    make_arm(tmp_path, "oelm_v2", shifted(0.0))
    assert judge(tmp_path).overall == "PASS"


def test_all_arms_are_compared_on_one_split(tmp_path, oelm):
    """One run without a test loss: everything moves to validation, and is called so."""
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_v2", shifted(0.0), val=2.5)
    spoilt(tmp_path, "oelm_v2_lr0.001_seed1", test_loss=None)
    found = judge(tmp_path).settings[0]
    assert found.setting.split == "val"
    expected = sum(2.5 - loss for loss in BASE.values()) / 3
    assert found.judgements["oelm_v2"].plain.mean == pytest.approx(expected)
    assert "val PPL" in oelm("verdict", tmp_path).out


def test_seeds_that_the_baseline_lacks_are_named_and_left_out(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_v2", {**shifted(0.0), 7: 0.5})
    found = judge(tmp_path)
    assert list(found.settings[0].setting.judged["oelm_v2"].runs) == [1, 2, 3]
    assert [t.facts["left_out"] for t in found.threats if t.kind == "seed_sets"] == ["oelm_v2: 7"]


def test_a_better_trained_arm_is_the_fair_baseline_even_if_it_lacks_a_seed(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "orthogonal", {seed: loss for seed, loss in shifted(-0.3).items() if seed < 3})
    make_arm(tmp_path, "oelm_v2", shifted(0.0))
    judgement = judge(tmp_path).settings[0].judgements["oelm_v2"]
    assert (judgement.against, judgement.fair.n, judgement.fair.verdict) == ("orthogonal", 2, "INCONCLUSIVE")


def test_arms_that_cannot_be_decided_do_not_weigh_on_the_others(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_v2", shifted(0.0, (0.0, 0.015, -0.015)))  # one-sided p about 0.015
    assert judge(tmp_path).overall == "PASS"
    for arm in ("oelm_random", "oelm_matched", "oelm"):
        make_run(tmp_path, arm, arm, 1, test=2.5)
    assert judge(tmp_path).overall == "PASS"


@pytest.mark.parametrize("ratio", ["0", "-1", "2", "nan"])
def test_a_criterion_that_is_no_ratio_is_refused(tmp_path, oelm, ratio):
    make_arm(tmp_path, "baseline", BASE)
    assert oelm("verdict", tmp_path, f"--criterion={ratio}").code == 2


def test_a_speed_up_beyond_what_arithmetic_allows_is_named_a_disturbance(tmp_path):
    """Frozen Q/K of the tiny shape save a few per cent of a step: 0.97 can be, 0.60 cannot."""
    make_arm(tmp_path, "baseline", BASE, step_seconds=0.100)
    make_arm(tmp_path, "oelm_v2", shifted(0.0), step_seconds=0.097)
    make_arm(tmp_path, "oelm_random", shifted(0.0), step_seconds=0.060)
    (threat,) = [threat for threat in judge(tmp_path).threats if threat.kind == "timing"]
    assert threat.facts["arms"].startswith("oelm_random: 0.60 < 0.9")
    assert "oelm_v2" not in threat.facts["arms"]
