import pytest

from oelm.errors import UserError
from oelm.lab.demo import DEMO_PLAN
from oelm.lab.plan import load_plan

GOOD = """
[defaults]
preset = "tiny"
[matrix]
model_type = ["baseline", "oelm_v2"]
max_lr = [1e-3, 2e-3]
seed = [1, 2]
[[run]]
id = "GPT-01"
model_type = "oelm_random"
[verdict]
criterion = 1.02
"""


def load(tmp_path, text, **overrides):
    (tmp_path / "plan.toml").write_text(text)
    return load_plan(tmp_path / "plan.toml", tmp_path / "out", **overrides)


def test_a_matrix_multiplies_and_runs_are_added(tmp_path):
    plan = load(tmp_path, GOOD, data_path="somewhere")
    assert len(plan.runs) == 2 * 2 * 2 + 1
    assert plan.runs[0].id == "baseline_lr0.001_seed1"
    last = plan.runs[-1]
    assert (last.id, last.config.model_type, last.config.frames) == ("GPT-01", "oelm_random", "normal")
    assert last.config.folder == tmp_path / "out/GPT-01"
    assert {run.config.data_path for run in plan.runs} == {"somewhere"}
    assert (plan.baseline, plan.criterion) == ("baseline", 1.02)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + "\n[matrx]\n", ["matrx", "matrix"]),
        (GOOD.replace('preset = "tiny"', "d_modle = 3"), ["d_modle", "d_model"]),
        (GOOD + '\n[[run]]\nid = "GPT-01"\n', ["GPT-01", "twice"]),
        (GOOD + "\n[[run]]\nseed = 1\n", ["needs an id"]),
        (GOOD.replace("seed = [1, 2]", "seed = [" + "1," * 3000 + "]"), ["12,000 runs"]),
        (GOOD.replace("criterion = 1.02", "criterion = -1"), ["criterion"]),
        (GOOD.replace("criterion = 1.02", 'baseline = "oelm"'), ["oelm", "no run"]),
        ("[verdict]\n", ["no runs"]),
        ("not toml", ["not valid TOML"]),
    ],
)
def test_a_bad_plan_is_refused_by_name(tmp_path, text, words):
    with pytest.raises(UserError) as error:
        load(tmp_path, text)
    for word in ("plan.toml", *words):
        assert word in str(error.value)


def test_the_demo_is_three_arms_by_three_seeds_with_one_learning_rate(tmp_path):
    plan = load_plan(DEMO_PLAN, tmp_path)
    assert {(run.config.model_type, run.config.seed) for run in plan.runs} == {
        (arm, seed) for arm in ("baseline", "oelm_v2", "oelm_random") for seed in (1, 2, 3)
    }
    assert len({run.config.max_lr for run in plan.runs}) == 1
