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
