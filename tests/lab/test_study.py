import pytest

from oelm.errors import UserError
from oelm.lab.plan import load_plan
from oelm.lab.study import load_study
from tests.lab.made_runs import DATA, make_run


def test_the_learning_rate_is_chosen_on_validation_over_shared_seeds(tmp_path):
    """0.002 wins on validation with seed 1, the only seed that all rates have; the test losses say the opposite."""
    for lr, val, test in ((1e-3, 2.2, 1.0), (2e-3, 2.0, 3.0), (4e-3, 2.1, 2.0)):
        make_run(tmp_path, f"lr{lr}", lr=lr, val=val, test=test)
    make_run(tmp_path, "more", lr=1e-3, seed=2, val=0.1)
    make_run(tmp_path, "second", lr=2e-3, seed=2, val=2.5, test=3.1)
    arm = load_study(tmp_path).settings[0].arms["baseline"]
    assert arm.rate == 2e-3
    assert not arm.at_edge
    assert arm.scores == {1: 3.0, 2: 3.1}
    assert arm.rate_scores == {1e-3: 2.2, 2e-3: 2.0, 4e-3: 2.1}


def test_a_diverged_rate_counts_as_the_worst(tmp_path):
    make_run(tmp_path, "a", lr=1e-3, val=2.2)
    reason = "loss nan, gradient norm nan at step 7: stopped before the update"
    make_run(tmp_path, "b", lr=1.0, state="failed", reason=reason)
    arm = load_study(tmp_path).settings[0].arms["baseline"]
    assert arm.rate == 1e-3
    assert arm.at_edge
    assert arm.rate_scores[1.0] == float("inf")


def test_a_run_that_failed_for_its_machine_says_nothing_about_its_rate(tmp_path):
    make_run(tmp_path, "a", lr=1e-3, val=2.2)
    make_run(tmp_path, "b", lr=1.0, state="failed", reason="disk full")
    assert load_study(tmp_path).settings[0].arms["baseline"].rates == [1e-3]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"batch_size": 8}, "windows_per_step 8"),
        ({"weight_decay": 0.5}, "weight_decay 0.5"),
        ({"steps": 40}, "max_steps 40"),
        ({"data": {**DATA, "source_hash": "x" * 64}}, "data xxxxxxxx"),
        ({"data": {**DATA, "tokenizer": "gpt2"}}, "tokenizer gpt2"),
    ],
)
def test_runs_that_are_no_pairs_are_kept_apart(tmp_path, changed, words):
    make_run(tmp_path, "base")
    make_run(tmp_path, "arm", "oelm_v2", **changed)
    settings = load_study(tmp_path).settings
    assert len(settings) == 2
    assert list(settings[0].arms) == ["baseline"]
    assert words in settings[1].name


def test_what_only_says_where_and_how_does_not_keep_apart(tmp_path):
    make_run(tmp_path, "base")
    make_run(tmp_path, "arm", "oelm_v2", save_interval=7, val_interval=3, threads=2, micro_batch=2)
    assert len(load_study(tmp_path).settings) == 1


def test_the_same_run_twice_is_never_averaged(tmp_path):
    make_run(tmp_path, "one")
    make_run(tmp_path, "two")
    with pytest.raises(UserError, match=r"one and .*two are the same arm, learning rate and seed: move one away"):
        load_study(tmp_path)


def test_an_arm_with_changed_frames_is_an_arm_of_its_own(tmp_path):
    make_run(tmp_path, "a")
    make_run(tmp_path, "b", frames="global")
    assert list(load_study(tmp_path).settings[0].arms) == ["baseline", "baseline+frames=global"]


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(UserError, match="no run below"):
        load_study(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        load_study(tmp_path / "nowhere")


def test_the_plan_beside_the_runs_tells_what_is_missing(tmp_path):
    plan = tmp_path / "p.toml"
    plan.write_text(
        '[defaults]\npreset = "tiny"\nmax_steps = 20\n[matrix]\nmodel_type = ["baseline", "oelm_v2"]\nseed = [1, 2]\n'
        "[verdict]\ncriterion = 1.1\n"
    )
    out = tmp_path / "out"
    load_plan(plan, out, {"weight_decay": "0.5"}).leave_copy()
    make_run(out, "baseline_seed1", weight_decay=0.5)
    study = load_study(out)
    assert study.criterion == 1.1
    assert study.unfinished
    assert {s.id: s.state for s in study.statuses} == {
        "baseline_seed1": "finished", "baseline_seed2": "waiting", "oelm_v2_seed1": "waiting",
        "oelm_v2_seed2": "waiting",
    }  # fmt: skip
    assert study.plans[0].fixed[0].config.weight_decay == 0.5
