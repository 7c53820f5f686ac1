"""What must not decide: rates of an arm's own, arms with trained Q/K, and too few seeds."""

import pytest

from tests.lab.made_runs import make_arm, make_run
from tests.lab.test_verdict import BASE, diverged, judge, shifted


def test_an_arm_with_learning_rates_of_its_own_needs_a_baseline_that_has_them(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_v2", shifted(-0.5), lr_scale="embeddings=3")
    found = judge(tmp_path)
    assert list(found.arms.values()) == ["INCONCLUSIVE"]
    assert "lr_scale" in next(threat for threat in found.threats if threat.kind == "extras").text("en")
    for seed, loss in shifted(-0.5).items():
        make_run(tmp_path, f"fair{seed}", seed=seed, test=loss, lr_scale="embeddings=3.0")
    assert list(judge(tmp_path).arms.values()) == ["PASS"]


def test_a_rate_of_queries_and_keys_is_no_addition_but_what_a_trained_arm_may_choose(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_v2", shifted(0.0), lr_scale="qk=0.1")
    assert list(judge(tmp_path).arms.values()) == ["PASS"]
    make_arm(tmp_path, "orthogonal", shifted(-0.3), lr_scale="qk=0.3")
    assert list(judge(tmp_path).arms.values()) == ["FAIL"]


def test_one_seed_of_a_baseline_with_the_same_extras_does_not_open_the_way(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_v2", shifted(-0.2), rope="half")
    make_run(tmp_path, "rope1", test=BASE[1] + 0.05, rope="half")
    found = judge(tmp_path)
    assert list(found.arms.values()) == ["INCONCLUSIVE"]
    assert "extras" in {threat.kind for threat in found.threats}


@pytest.mark.parametrize("freeze", ["final_norm.bias", "ffn", "v:until0.5"])
def test_an_arm_whose_queries_and_keys_are_all_trained_does_not_decide(tmp_path, freeze):
    make_arm(tmp_path, "baseline", BASE)
    for seed, loss in shifted(0.0).items():
        make_run(tmp_path, f"other{seed}", seed=seed, test=loss, freeze=freeze)
    assert judge(tmp_path).arms == {}


def test_an_arm_has_failed_by_divergence_with_as_many_seeds_as_any_other_verdict_takes(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    for seed, verdict in ((1, "INCONCLUSIVE"), (2, "INCONCLUSIVE"), (3, "FAIL")):
        diverged(tmp_path, f"lost{seed}", "oelm_v2", seed)
        assert judge(tmp_path).arms == {"oelm_v2": verdict}


def test_one_seed_of_a_trained_arm_does_not_take_a_failure_back(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_v2", shifted(0.4))
    make_arm(tmp_path, "oelm_random", shifted(0.0))
    make_arm(tmp_path, "orthogonal", {1: BASE[1] - 0.1})
    found = judge(tmp_path)
    assert found.arms == {"oelm_v2": "FAIL", "oelm_random": "PASS"}
    assert found.settings[0].judgements["oelm_v2"].against == "baseline"
    make_arm(tmp_path, "oelm_matched", shifted(0.0))  # may not pass: the stronger baseline has too few seeds yet
    assert judge(tmp_path).arms["oelm_matched"] == "INCONCLUSIVE"


def test_a_length_said_in_epochs_is_the_same_setting_as_one_said_in_steps(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    for seed, loss in shifted(0.0).items():
        folder = make_run(tmp_path, f"epochs{seed}", "oelm_v2", seed=seed, test=loss)
        config = folder / "config.toml"
        config.write_text(config.read_text().replace("num_epochs = 0.0", "num_epochs = 0.5"))
    assert judge(tmp_path).arms == {"oelm_v2": "PASS"}


def test_an_arm_that_fails_in_one_of_two_settings_is_said_to(tmp_path, oelm):
    make_arm(tmp_path / "a", "baseline", BASE)
    make_arm(tmp_path / "a", "oelm_v2", shifted(0.2))
    make_arm(tmp_path / "b", "baseline", BASE, num_layers=4)
    make_arm(tmp_path / "b", "oelm_v2", shifted(0.0), num_layers=4)
    assert "oelm_v2 (in 1 of 2 settings)." in oelm("verdict", tmp_path).out
    assert "oelm_v2." in oelm("verdict", tmp_path / "a").out
