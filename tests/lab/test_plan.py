import pytest

from oelm.errors import UserError
from oelm.lab.demo import DEMO_PLAN
from oelm.lab.plan import load_plan
from oelm.lab.run import check_place, check_settings
from tests.lab.made_runs import make_run

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
    return load_plan(tmp_path / "plan.toml", tmp_path / "out", overrides)


def test_a_matrix_multiplies_and_runs_are_added(tmp_path):
    plan = load(tmp_path, GOOD, data_path="somewhere")
    assert len(plan.runs) == 2 * 2 * 2 + 1
    assert plan.runs[0].id == "baseline_lr0.001_seed1"
    last = plan.runs[-1]
    assert (last.id, last.config.model_type, last.config.frames) == ("GPT-01", "oelm_random", "normal")
    assert last.config.folder == tmp_path / "out/GPT-01"
    assert {run.config.data_path for run in plan.runs} == {"somewhere"}
    assert (plan.baseline, plan.criterion) == ("baseline", 1.02)


def test_several_matrices_multiply_each_alone(tmp_path):
    second = '[[matrix]]\nmodel_type = "oelm_random"\nmax_lr = 8e-3\nseed = [1, 2, 3]\n[[run]]'
    text = GOOD.replace("[matrix]", "[[matrix]]").replace("[[run]]", second)
    rates = [(run.config.model_type, run.config.max_lr) for run in load(tmp_path, text, data_path="x").runs]
    assert len(rates) == 2 * 2 * 2 + 3 + 1
    assert rates[8:11] == [("oelm_random", 8e-3)] * 3
    with pytest.raises(UserError, match="multiplies seed"):
        load(tmp_path, text, seed=4)


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
        ("out = 5\n" + GOOD, ["out must be"]),
        (GOOD.replace("criterion = 1.02", 'baseline = ["x"]'), ["baseline"]),
        (GOOD.replace("criterion = 1.02", "criterion = true"), ["criterion"]),
        (GOOD + '[select]\nsetting = ["a"]\n', ["setting"]),
        (GOOD.replace('preset = "tiny"', 'preset = "tiny"\nprocesses = 2'), ["gpus_per_run"]),
        (GOOD.replace('id = "GPT-01"', 'id = "GPT-01"\nout_dir = ["x"]'), ["out_dir"]),
        (GOOD.replace("seed = [1, 2]", "seed = [1, 1.0]"), ["are the same run"]),
        (GOOD.replace('"oelm_random"', '["oelm_random"]'), ["name of one arm"]),
        (GOOD.replace('preset = "tiny"', '"max_lr(" = 1'), ["max_lr("]),
        (GOOD + '[select]\nsetting = "model_type"\n', ["setting 'model_type'"]),
        (GOOD + '[arms.one]\narm = "two"\n[arms.two]\narm = "one"\n', ["builds upon one of oelm's"]),
        (GOOD.replace('preset = "tiny"', 'preset = "tiny"\nlabel = "x"'), ["both called x", "differ in frames"]),
        (GOOD.replace('"GPT-01"', f'"{"x" * 260}"'), ["needs an id"]),
        (GOOD.replace('preset = "tiny"', 'preset = "tiny"\ndataset = "csv:some.csv"'), ["oelm prepare NAME"]),
        ("not toml", ["not valid TOML"]),
    ],
)
def test_a_bad_plan_is_refused_by_name(tmp_path, text, words):
    with pytest.raises(UserError) as error:
        load(tmp_path, text)
    for word in ("plan.toml", *words):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"seed": "4"}, "--set seed=4: the plan's [matrix] multiplies seed"),
        ({"max_lr": "1e-3"}, "[matrix] multiplies max_lr"),
        ({"foo": "1"}, "--set foo=1: unknown setting"),
        ({"max_steps": "abc"}, "--set max_steps=abc"),
    ],
)
def test_a_bad_override_is_named_as_such(tmp_path, overrides, words):
    with pytest.raises(UserError) as error:
        load(tmp_path, GOOD, **overrides)
    assert words in str(error.value)
    assert "line" not in str(error.value)


def test_the_copy_beside_the_runs_is_the_plan_that_ran(tmp_path):
    text = GOOD.replace("[matrix]", "[matrix]\nmax_steps = 2_000").replace('model_type = "oelm_r', 'arm = "oelm_r')
    plan = load(tmp_path, text, max_steps="30", weight_decay="0.5")
    plan.leave_copy()
    again = load_plan(tmp_path / "out/plan.plan.toml", tmp_path / "out")
    assert [(run.id, run.config) for run in again.runs] == [(run.id, run.config) for run in plan.runs]
    assert (plan.runs[0].config.max_steps, plan.runs[0].id) == (30, "baseline_max_steps30_lr0.001_seed1")
    own = GOOD + '[arms.mine]\nfreeze = "qk@0"\n'
    with pytest.raises(UserError, match=r"\[arms.mine\] decides freeze"):
        load(tmp_path, own, freeze="none")


def test_the_last_word_on_how_long_a_run_is_counts(tmp_path):
    text = GOOD.replace("[matrix]", "num_epochs = 3.0\n[matrix]").replace(
        'id = "GPT-01"', 'id = "GPT-01"\nmax_steps = 9'
    )
    plan = load(tmp_path, text)
    assert [(r.config.num_epochs, r.config.max_steps) for r in plan.runs if r.id == "GPT-01"] == [(0, 9)]
    assert {r.config.num_epochs for r in plan.runs if r.id != "GPT-01"} == {3}
    short = load(tmp_path, text, max_steps="30")
    assert {(r.config.num_epochs, r.config.max_steps) for r in short.runs} == {(0, 30)}
    assert load(tmp_path, text, max_steps="30", num_epochs="0").runs[0].config.max_steps == 30
    short.leave_copy()
    again = load_plan(tmp_path / "out/plan.plan.toml", tmp_path / "out")
    assert [run.config for run in again.runs] == [run.config for run in short.runs]
    with pytest.raises(UserError, match="max_steps and num_epochs both"):
        load(tmp_path, text.replace("num_epochs", "max_steps = 5\nnum_epochs"))


def test_a_seed_of_zero_is_a_seed(tmp_path):
    assert load(tmp_path, GOOD.replace("seed = [1, 2]", "seed = [0]")).runs[0].id == "baseline_lr0.001_seed0"


@pytest.mark.parametrize("name", ["file/run", "x" * 300, "a\0b"])
def test_a_place_that_cannot_be_is_refused_before_anything_starts(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be"):
        check_place(tmp_path / name)
    check_place(tmp_path / "new/run")


def test_one_folder_under_two_names_is_one_folder(tmp_path):
    runs = [f'[[run]]\nid = "{name}"\nseed = {seed}\nout_dir = "{tmp_path}/{place}"\n'
            for name, seed, place in (("a", 1, "o"), ("b", 2, "x/../o"))]  # fmt: skip
    (tmp_path / "plan.toml").write_text("".join(runs))
    with pytest.raises(UserError, match=r"the out_dir .*/o stands twice"):
        load_plan(tmp_path / "plan.toml")


def test_a_fault_is_found_in_the_table_of_its_run(tmp_path):
    text = GOOD + '[[run]]\nid = "bad"\nmax_lr = 1e30\n[[run]]\nid = "good"\nmax_lr = 1e-3\n'
    line = text.splitlines().index("max_lr = 1e30") + 1
    with pytest.raises(UserError, match=f"plan.toml, line {line}: run bad: max_lr"):
        load(tmp_path, text)


def test_a_run_folder_with_other_settings_is_refused_before_anything_starts(tmp_path):
    plan = load(tmp_path, GOOD)
    run = plan.runs[0]
    make_run(tmp_path / "out", run.id, lr=1e-3, steps=100)
    check_settings(plan.runs)
    changed = load(tmp_path, GOOD, max_steps="70")
    with pytest.raises(UserError, match="was run with max_steps = 100, not 70: put the plan back"):
        check_settings(changed.runs)


def test_the_demo_is_three_arms_by_three_seeds_with_one_learning_rate(tmp_path):
    plan = load_plan(DEMO_PLAN, tmp_path)
    assert {(run.config.model_type, run.config.seed) for run in plan.runs} == {
        (arm, seed) for arm in ("baseline", "oelm_v2", "oelm_random") for seed in (1, 2, 3)
    }
    assert len({run.config.max_lr for run in plan.runs}) == 1
