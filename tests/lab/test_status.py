"""Each state of a run, played in folders; nothing but the folder is read."""

import fcntl
import json
import os
from datetime import datetime, timedelta

import pytest

from oelm.config import resolve
from oelm.lab.status import LabWatcher, RunWatcher, find_runs
from oelm.lab.watch import chart, status_table

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
    assert status.elapsed == 4 * 3600 + 31 * 60 + 27


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_a_run_that_left_says_why(tmp_path, state):
    end = (START + timedelta(minutes=1)).isoformat()
    folder = make_run(tmp_path, "a", summary={"state": state, "reason": "because", "ended": end})
    status = RunWatcher(folder).look()
    assert (status.state, status.reason, status.elapsed, status.finished) == (state, "because", 60, None)


def test_a_run_without_process_and_without_farewell_died(tmp_path):
    folder = make_run(tmp_path, "a")
    written = (START + timedelta(minutes=7)).timestamp()
    os.utime(folder / "metrics.jsonl", (written, written))
    status = RunWatcher(folder).look()
    assert (status.state, status.pid, status.elapsed) == ("died", None, 420)


def test_a_planned_run_without_folder_waits(tmp_path):
    assert RunWatcher(tmp_path / "later").look().state == "waiting"


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
    shown = oelm("compare", tmp_path / "one", tmp_path / "two").out
    assert "+10.5%" in shown
    assert "o one" in shown
    assert "not running" in oelm("stop", tmp_path / "one").out
    for arguments in (["status", tmp_path / "nothere"], ["logs", tmp_path], ["stop"], ["compare", tmp_path]):
        result = oelm(*arguments)
        assert (result.code, len(result.err.strip().splitlines())) == (2, 1)


def test_a_table_shows_columns_only_where_there_is_something_to_show(tmp_path):
    make_run(tmp_path, "one")
    headings = [column.header for column in status_table(LabWatcher(tmp_path).look()).columns]
    assert headings == ["run", "arm", "state", "step", "%", "started", "elapsed", "loss", "val PPL"]


def test_a_chart_puts_high_above_low():
    lines = chart({"a": {0: 100.0, 10: 1.0}}, width=11, height=3).splitlines()
    assert lines[0].endswith("┤o          ")
    assert lines[2].endswith("┤          o")
