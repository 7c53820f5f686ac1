"""Each threat fires on its confound and stays silent without it."""

import json

import pytest

from oelm.lab.study import load_study
from oelm.lab.threats import TEXTS, find_threats
from tests.lab.made_runs import DATA, make_arm, make_run

RATES = (1e-3, 2e-3, 4e-3)


def sound_study(root, arms=("baseline", "oelm_random"), **options):
    """Nothing to warn of: equal grids, best in the middle, three seeds, one machine, less than an epoch."""
    for arm in arms:
        for rate in RATES:
            make_run(root, f"{arm}_{rate}_1", arm, 1, rate, val=2.0 + abs(rate - 2e-3), **options)
        for seed in (2, 3):
            make_run(root, f"{arm}_{seed}", arm, seed, 2e-3, **options)


def kinds(root):
    return {threat.kind for threat in find_threats(load_study(root))}


def test_a_sound_study_has_no_threats(tmp_path):
    sound_study(tmp_path)
    assert kinds(tmp_path) == set()


def unequal_grids(root):
    sound_study(root)
    make_run(root, "extra", "oelm_random", 1, 8e-3, val=9.0)


def best_at_the_edge(root):
    sound_study(root)
    for arm in ("baseline", "oelm_random"):
        for seed in (1, 2, 3):
            make_run(root, f"{arm}_edge{seed}", arm, seed, 8e-3, val=1.0)


def one_rate(root):
    for arm in ("baseline", "oelm_random"):
        make_arm(root, arm, {1: 2.0, 2: 2.0, 3: 2.0})


def one_seed(root):
    sound_study(root)
    for seed in (2, 3):
        (root / f"oelm_random_{seed}" / "summary.json").unlink()
        (root / f"oelm_random_{seed}" / "config.toml").unlink()


def other_batch(root):
    sound_study(root)
    make_run(root, "other", "oelm_v2", batch_size=8)


def other_data_set(root):
    sound_study(root)
    make_run(root, "other", "oelm_v2", dataset="elsewhere")


def another_machine(root):
    sound_study(root)
    folder = root / "oelm_random_3"
    text = (folder / "environment.json").read_text()
    (folder / "environment.json").write_text(text.replace('"threads": 1', '"threads": 2'))


def only_some_tested(root):
    sound_study(root)
    folder = root / "oelm_random_3"
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "test_loss": None}))


def another_version(root):
    sound_study(root)
    folder = root / "oelm_random_3"
    text = (folder / "environment.json").read_text()
    (folder / "environment.json").write_text(text.replace('"torch": "0"', '"torch": "1"'))


def unpaired_seed(root):
    sound_study(root)
    make_run(root, "oelm_random_4", "oelm_random", 4, 2e-3)


def damaged_run(root):
    sound_study(root)
    make_run(root, "oelm_random_4", "oelm_random", 4, 2e-3)
    (root / "oelm_random_4" / "metrics.jsonl").write_text("")


def nan_run(root):
    sound_study(root)
    make_run(root, "nan", "oelm_random", 1, 9e-3, state="failed", reason="loss nan, gradient norm nan at step 3")


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (unequal_grids, "grids"),
        (best_at_the_edge, "edge"),
        (one_rate, "no_grid"),
        (one_seed, "seeds"),
        (other_batch, "unpaired"),
        (other_data_set, "no_baseline"),
        (lambda root: sound_study(root, test=None), "no_test"),
        (lambda root: sound_study(root, data={**DATA, "edges": {"val": "b", "test": "b"}}), "val_is_test"),
        (lambda root: sound_study(root, epochs=1.5), "epochs"),
        (lambda root: sound_study(root, best=1.9), "overfit"),
        (lambda root: sound_study(root, ("baseline", "oelm_matched")), "scale"),
        (another_machine, "machines"),
        (lambda root: sound_study(root, steps=5), "short"),
        (nan_run, "failed"),
        (only_some_tested, "mixed_splits"),
        (another_version, "versions"),
        (unpaired_seed, "seed_sets"),
        (damaged_run, "damaged"),
    ],
)
def test_a_confound_is_named(tmp_path, build, kind):
    build(tmp_path)
    along = {"failed": {"grids"}, "seeds": {"seed_sets"}}  # a grid that one arm failed on is unequal, too
    expected = {kind} | along.get(kind, set())
    assert kinds(tmp_path) == expected


def test_the_missing_fair_baseline_is_named_only_when_missing(tmp_path):
    words = TEXTS["en"]["scale_alone"]
    sound_study(tmp_path / "a", ("baseline", "oelm_v2"))
    sound_study(tmp_path / "b", ("baseline", "orthogonal", "oelm_v2"))
    without, beside = (find_threats(load_study(tmp_path / name))[0].text("en") for name in "ab")
    assert words in without
    assert words not in beside


def test_both_languages_know_the_same_threats():
    assert TEXTS["en"].keys() == TEXTS["zh"].keys()
