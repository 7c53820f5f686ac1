import tarfile

import pytest

from oelm.errors import UserError
from oelm.lab.announce import as_json
from oelm.lab.pack import pack
from oelm.lab.plan import load_plan
from oelm.lab.study import load_study
from oelm.lab.verdict import reach_verdict
from oelm.train.folder import RunFolder
from tests.lab.made_runs import make_arm, make_run

NUMBERS_SAY_NO = "loss nan, gradient norm nan at step 7: stopped before the update"


@pytest.fixture
def runs(tmp_path):
    """Two arms on three seeds, one run that diverged, one on its way; with weights and logs."""
    root = tmp_path / "outputs" / "few"
    make_arm(root, "baseline", {1: 2.0, 2: 2.1, 3: 2.2}, machine={"host": "my-secret-host"})
    make_arm(root, "oelm_v2", {1: 2.01, 2: 2.12, 3: 2.2}, machine={"host": "my-secret-host"})
    lost = make_run(root, "lost", lr=1.0, state="failed", reason=NUMBERS_SAY_NO)
    make_run(root, "half", seed=4, state="stopped")
    for name in ("step-00000020/model.safetensors", "training.log", "events.out.tfevents.1.my-secret-host"):
        (lost / name).parent.mkdir(exist_ok=True)
        (lost / name).write_text("my-secret-host")
    plan = tmp_path / "few.toml"
    plan.write_text('[matrix]\nmodel_type = ["baseline", "oelm_v2"]\nseed = [1, 2, 3]\n[verdict]\ncriterion = 1.04\n')
    load_plan(plan, root).leave_copy()
    return root


def unpacked(file, place):
    with tarfile.open(file) as archive:
        archive.extractall(place, filter="data")
    return place


def test_what_was_packed_gives_the_same_verdict(runs, tmp_path):
    assert pack(runs, tmp_path / "runs.tar.xz") == (7, 1)
    again = unpacked(tmp_path / "runs.tar.xz", tmp_path / "elsewhere") / "few"  # no folder of the one it was called in
    (runs / "half" / "config.toml").unlink()  # what is on its way stays behind
    before, after = (as_json(reach_verdict(load_study(root)), "en") for root in (runs, again))
    assert before == after
    assert after["criterion"] == 1.04
    assert RunFolder(again / "oelm_v2_lr0.001_seed1").finished()


def test_unpacking_puts_the_runs_where_a_plan_looks_for_them(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pack(runs.relative_to(tmp_path), tmp_path / "runs.tar.xz")
    again = unpacked("runs.tar.xz", tmp_path / "clone") / "outputs" / "few"
    assert RunFolder(again / "baseline_lr0.001_seed1").finished()


def test_machines_are_told_apart_without_their_names(runs, tmp_path):
    pack(runs, tmp_path / "runs.tar.xz")
    again = unpacked(tmp_path / "runs.tar.xz", tmp_path / "elsewhere") / "few"
    make_arm(again, "oelm_random", {1: 2.3, 2: 2.4, 3: 2.5}, machine={"host": "my-secret-host"})
    assert "machines" not in [threat.kind for threat in reach_verdict(load_study(again)).threats]
    make_arm(again, "oelm_matched", {1: 2.3, 2: 2.4, 3: 2.5}, machine={"host": "another"})
    assert "machines" in [threat.kind for threat in reach_verdict(load_study(again)).threats]


def test_nothing_in_it_is_a_weight_a_log_or_a_host_name(runs, tmp_path):
    pack(runs, tmp_path / "runs.tar.xz")
    found = [path for path in unpacked(tmp_path / "runs.tar.xz", tmp_path / "elsewhere").rglob("*") if path.is_file()]
    assert not [path for path in found if path.suffix in (".safetensors", ".log") or path.name.startswith("events")]
    assert not [path for path in found if b"my-secret-host" in path.read_bytes()]


def test_the_same_runs_are_packed_to_the_same_bytes(runs, tmp_path):
    pack(runs, tmp_path / "one.tar.xz")
    for path in runs.rglob("*.json"):
        path.write_bytes(path.read_bytes())  # another date
    pack(runs, tmp_path / "two.tar.xz")
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "two.tar.xz").read_bytes()


def test_a_damaged_environment_is_no_obstacle(runs, tmp_path):
    (runs / "lost" / "environment.json").write_text('{"parts": [1, null, "x"]}')
    assert pack(runs, tmp_path / "runs.tar.xz") == (7, 1)


@pytest.mark.parametrize(
    ("folder", "name", "words"),
    [("few", "runs.zip", "ends in .tar.xz"), ("none", "runs.tar.xz", "no such folder"), ("", "runs.tar.xz", "")],
)
def test_bad_input_is_refused_in_words(runs, tmp_path, folder, name, words):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=words or "no finished run"):
        pack(runs.parent / folder if folder else tmp_path / "empty", tmp_path / name)
    assert not (tmp_path / name).exists()
