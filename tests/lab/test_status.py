"""Each state of a run, played in folders; nothing but the folder is read."""

import fcntl
import io
import json
import os
import shutil
from datetime import datetime, timedelta

import pytest
from rich.console import Console

from oelm.config import resolve
from oelm.lab.plan import load_plan
from oelm.lab.status import LabWatcher, RunWatcher, find_runs
from oelm.lab.watch import live_table, status_table

START = datetime(2026, 2, 9, 16, 8).astimezone()


def make_run(root, name, arm="baseline", steps=10, val=(5, 10), seconds=2.0, offset=0.0, summary=None, **settings):
    """A run folder as `oelm train` leaves it: 1/step losses, val loss 2 + offset - step/100."""
    folder = root / name
    folder.mkdir(parents=True)
    config = resolve({"preset": "tiny", "model_type": arm, "max_steps": 20, "out_dir": str(folder), **settings})
    (folder / "config.toml").write_text(config.to_toml())
    part = {"started": START.isoformat(), "pid": 4242, "device": "cpu"}
    (folder / "environment.json").write_text(json.dumps({"parts": [part]}))
    (folder / "run.lock").write_text("pid 4242 on somewhere, since then")
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"kind": "train", "step": step, "loss": 1 / step, "seconds": seconds}) + "\n")
            if step in val:
                file.write(json.dumps({"kind": "val", "step": step, "loss": 2 + offset - step / 100}) + "\n")
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def held():
    """Hold the locks of run folders, as living runs do."""
    files = []

    def hold(folder):
        files.append(open(folder / "run.lock"))  # noqa: SIM115  # held until the test ends
        fcntl.flock(files[-1], fcntl.LOCK_EX)

    yield hold
    for file in files:
        file.close()


def test_a_running_run_says_how_long_it_still_takes(tmp_path, held):
    folder = make_run(tmp_path, "GPT-01_baseline")
    held(folder)
    status = RunWatcher(folder).look()
    assert (status.state, status.step, status.max_steps, status.pid) == ("running", 10, 20, 4242)
    assert status.left == pytest.approx(10 * 2.0)
    assert status.loss == pytest.approx(0.1)
    assert (status.val_step, status.val_ppl) == (10, pytest.approx(2.718281828**1.9))
    assert (status.started, status.finished) == (START.isoformat(), None)


def test_a_finished_run_has_an_end_and_no_process(tmp_path):
    end = (START + timedelta(hours=4, minutes=31, seconds=27)).isoformat()
    folder = make_run(tmp_path, "a", steps=20, summary={"state": "finished", "finished": end})
    status = RunWatcher(folder).look()
    assert (status.state, status.finished, status.pid, status.left) == ("finished", end, None, None)
    assert status.elapsed == 20 * 2.0


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_a_run_that_left_says_why(tmp_path, state):
    end = (START + timedelta(minutes=1)).isoformat()
    folder = make_run(tmp_path, "a", summary={"state": state, "reason": "because", "ended": end})
    status = RunWatcher(folder).look()
    assert (status.state, status.reason, status.elapsed, status.finished) == (state, "because", 20, None)


def test_a_run_without_process_and_without_farewell_died(tmp_path):
    status = RunWatcher(make_run(tmp_path, "a")).look()
    assert (status.state, status.pid, status.elapsed) == ("died", None, 20)


def test_elapsed_is_work_not_pauses(tmp_path):
    """Steps of 2 s; the run was started long ago, and whether it lives, sleeps or is resumed changes nothing."""
    assert RunWatcher(make_run(tmp_path, "nothing", steps=0)).look().elapsed == 0
    assert RunWatcher(make_run(tmp_path, "some", steps=7)).look().elapsed == 14


def test_validations_count_in_the_time_left(tmp_path, held):
    folder = make_run(tmp_path, "a", val=(), val_interval=5)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "val", "step": 10, "loss": 2.0, "seconds": 7.0}) + "\n")
    held(folder)
    assert RunWatcher(folder).look().left == pytest.approx(10 * 2.0 + 2 * 7.0)


def test_a_planned_run_without_folder_waits(tmp_path):
    assert RunWatcher(tmp_path / "later").look().state == "waiting"
    status = RunWatcher(tmp_path / "later", planned=resolve({"model_type": "oelm_v2", "max_steps": 30})).look()
    assert (status.state, status.arm, status.max_steps) == ("waiting", "oelm_v2", 30)


def test_a_stale_lock_file_is_no_sign_of_life(tmp_path):
    """Its process number may even be in use again, by something else."""
    folder = make_run(tmp_path, "a")
    (folder / "run.lock").write_text(f"pid {os.getpid()} on here")
    assert RunWatcher(folder).look().state == "died"


def test_a_resumed_run_is_running_again_whatever_it_said_before(tmp_path, held):
    folder = make_run(tmp_path, "a", summary={"state": "stopped", "reason": "SIGTERM"})
    held(folder)
    status = RunWatcher(folder).look()
    assert (status.state, status.reason) == ("running", "")


def test_the_gap_is_taken_at_the_same_step_of_the_same_pair(tmp_path):
    make_run(tmp_path, "base1", steps=10, val=(5, 10), seed=1)
    make_run(tmp_path, "base2", steps=10, val=(5, 10), offset=1.0, seed=2)
    make_run(tmp_path, "arm2", "oelm_v2", steps=7, val=(5,), offset=1.1, seed=2)
    make_run(tmp_path, "other", "oelm_v2", steps=7, val=(5,), seed=3)
    found = {status.id: status for status in LabWatcher(tmp_path).look()}
    assert found["arm2"].gap == pytest.approx(2.718281828**0.1 - 1)
    assert found["base1"].gap is None
    assert found["other"].gap is None


def test_among_several_baselines_the_gap_is_to_the_one_of_the_same_learning_rate(tmp_path):
    make_run(tmp_path, "base_low", max_lr=1e-3)
    make_run(tmp_path, "base_high", max_lr=2e-3, offset=0.5)
    make_run(tmp_path, "arm_high", "oelm_v2", max_lr=2e-3, offset=0.6)
    make_run(tmp_path, "arm_other", "oelm_v2", max_lr=4e-3, offset=0.6)
    found = {status.id: status for status in LabWatcher(tmp_path).look()}
    assert found["arm_high"].gap == pytest.approx(2.718281828**0.1 - 1)
    assert found["arm_other"].gap is None


def test_runs_of_several_folders_are_told_apart(tmp_path):
    for place in ("a", "b"):
        make_run(tmp_path / place, "run1")
    assert [(s.id, s.path) for s in LabWatcher(tmp_path).look()] == [
        (f"{place}/run1", str(tmp_path / place / "run1")) for place in "ab"
    ]


def test_runs_that_a_plan_still_has_to_start_are_shown_from_above_too(tmp_path):
    text = '[defaults]\npreset = "tiny"\n[matrix]\nmodel_type = ["baseline"]\nseed = [1, 2]\n'
    (tmp_path / "p.toml").write_text(text)
    load_plan(tmp_path / "p.toml", tmp_path / "outputs/p").leave_copy()
    make_run(tmp_path / "outputs/p", "baseline_seed1")
    for root, prefix in (("outputs", "p/"), ("outputs/p", "")):
        found = LabWatcher(tmp_path / root).look()
        assert [(s.id, s.state) for s in found] == [
            (f"{prefix}baseline_seed1", "died"), (f"{prefix}baseline_seed2", "waiting")
        ]  # fmt: skip


def rendered(table, width):
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 60, 100, 160])
def test_the_table_keeps_names_and_states_whole_at_any_width(tmp_path, held, width):
    names = ["oelm_matched_lr0.002_seed1", "baseline_lr0.002_seed1"]
    make_run(tmp_path, names[0], "oelm_matched", offset=0.1)
    held(make_run(tmp_path, names[1]))
    make_run(tmp_path, "gone", summary={"state": "failed", "reason": "a reason of some length, to be wrapped"})
    lines = rendered(status_table(LabWatcher(tmp_path).look(), width), width)
    assert max(map(len, lines)) <= width
    for name, state in zip(names, ("died", "running"), strict=True):
        assert any(name in line and state in line for line in lines), lines


def test_a_live_table_shows_what_goes_on_when_the_screen_is_short(tmp_path, held):
    for i in range(30):
        make_run(tmp_path, f"run{i:02d}", summary={"state": "finished"})
    held(make_run(tmp_path, "run99"))
    console = Console(width=120, height=15)
    lines = rendered(live_table(LabWatcher(tmp_path).look(), console), 120)
    assert len(lines) <= 15
    assert any("run99" in line for line in lines)
    assert "and 20 finished" in lines[-1]


def test_a_second_look_reads_what_was_appended_and_what_a_resume_cut(tmp_path, held):
    folder = make_run(tmp_path, "a", steps=10)
    held(folder)
    watcher = RunWatcher(folder)
    assert watcher.look().step == 10
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "train", "step": 11, "loss": 9.0, "seconds": 1.0}) + "\n" + '{"kind": "tr')
    assert (watcher.look().step, watcher.look().loss) == (11, 9.0)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:4]))
    status = watcher.look()
    assert (status.step, status.val_ppl) == (4, None)


def test_runs_are_found_below_a_folder(tmp_path):
    for name in ("x", "plan/y", "plan/deep/z"):
        make_run(tmp_path, name)
    assert [path.name for path in find_runs(tmp_path)] == ["z", "y", "x"]
    assert find_runs(tmp_path / "x") == [tmp_path / "x"]


def test_the_verbs_that_look_at_runs(oelm, tmp_path):
    make_run(tmp_path, "one")
    make_run(tmp_path, "two", "oelm_v2", offset=0.1)
    (tmp_path / "one/training.log").write_text("hello log\n")
    found = json.loads(oelm("status", tmp_path, "--json").out)
    assert [(f["id"], f["state"]) for f in found] == [("one", "died"), ("two", "died")]
    assert "+10.5%" in oelm("status", tmp_path).out
    assert oelm("logs", tmp_path / "one").out == "hello log\n"
    assert "not running" in oelm("stop", tmp_path / "one").out
    for arguments in (["status", tmp_path / "nothere"], ["logs", tmp_path], ["stop"]):
        result = oelm(*arguments)
        assert (result.code, len(result.err.strip().splitlines())) == (2, 1)


def test_a_table_shows_columns_only_where_there_is_something_to_show(tmp_path):
    make_run(tmp_path, "one")
    headings = [column.header for column in status_table(LabWatcher(tmp_path).look()).columns]
    assert headings == ["run", "arm", "state", "step", "%", "started", "elapsed", "loss", "val PPL"]


GARBAGE = [
    ("metrics.jsonl", '5\n'), ("metrics.jsonl", 'null\n{"kind": "train"}\n{"a": 1}\n'),
    ("metrics.jsonl", '{"kind": "val", "step": 1, "loss": null}\n{"kind": "val", "step": 2, "loss": "x"}\n'),
    ("summary.json", '{"state": 5}'), ("summary.json", '{"state": "failed", "reason": "[/x] [red]"}'),
    ("summary.json", '{"state": "finished", "finished": "yesterday"}'), ("summary.json", "[1]"),
    ("environment.json", '{"parts": [5]}'), ("environment.json", '{"parts": [{}]}'), ("environment.json", "x"),
    ("config.toml", "max_steps = 'x'"), ("config.toml", "model_type = 'nobody'"), ("config.toml", "\x00"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), GARBAGE)
def test_one_damaged_folder_hides_no_other(oelm, tmp_path, name, text):
    make_run(tmp_path, "good")
    (make_run(tmp_path, "bad") / name).write_text(text)
    result = oelm("status", tmp_path)
    assert result.code == 0, result.err
    assert any(line.startswith("good") and "died" in line for line in result.out.splitlines())
    assert any(line.startswith("bad") for line in result.out.splitlines())
    if name == "config.toml":
        assert "unreadable" in result.out
    assert oelm("verdict", tmp_path).code == 2


def test_a_folder_that_was_removed_leaves_the_table(tmp_path):
    folder = make_run(tmp_path, "a")
    make_run(tmp_path, "b")
    watcher = LabWatcher(tmp_path)
    assert len(watcher.look()) == 2
    shutil.rmtree(folder)
    assert [status.id for status in watcher.look()] == ["b"]
