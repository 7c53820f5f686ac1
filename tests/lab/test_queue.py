import io
import os
import subprocess
import sys
import time

import psutil
import pytest

from oelm.lab import queue as queue_module
from oelm.lab.plan import Plan, PlannedRun, load_plan
from oelm.lab.queue import Queue, Worker, running_queues
from oelm.lab.status import RunWatcher
from oelm.lab.watch import stop_everything
from tests.programmes import kill_rank


def state(run):
    return RunWatcher(run.folder.path).look().state


@pytest.fixture(scope="module")
def plan(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("queue")
    shared = dict(preset="tiny", data_path=str(data), max_steps=6, val_interval=3, device="cpu")
    runs = [
        PlannedRun(f"{arm}_{seed}", {**shared, "model_type": arm, "seed": seed, "out_dir": str(out / f"{arm}_{seed}")})
        for arm in ("baseline", "oelm_v2")
        for seed in (1, 2)
    ]
    return Plan(runs)


@pytest.fixture(scope="module")
def finished(plan):
    assert {state(run) for run in plan.runs} == {"waiting"}
    assert Queue(plan, slots=2).run() == {}
    return plan


def test_every_run_is_finished_once_and_then_skipped(finished):
    assert {state(run) for run in finished.runs} == {"finished"}
    before = [(run.config.folder / "summary.json").stat().st_mtime_ns for run in finished.runs]
    Queue(finished, slots=2).run()
    assert [(run.config.folder / "summary.json").stat().st_mtime_ns for run in finished.runs] == before


def test_one_failure_is_reported_and_stops_no_other(plan, data, tmp_path):
    bad = PlannedRun("bad", {**plan.runs[0].settings, "data_path": "nothere", "out_dir": str(tmp_path / "bad")})
    good = PlannedRun("good", {**plan.runs[0].settings, "out_dir": str(tmp_path / "good")})
    failures = Queue(Plan([bad, good]), slots=1).run()
    assert list(failures) == ["bad"]
    assert "no such data folder: nothere" in failures["bad"]
    assert state(good) == "finished"


def script(monkeypatch, *bodies):
    """Replace `oelm train` by short scripts, the n-th start taking the n-th body, the last one over and over."""
    started = []

    def command(run, settings):
        body = bodies[min(len(started), len(bodies) - 1)]
        started.append((run.id, settings))
        folder = run.settings["out_dir"]
        preamble = (
            f"import json, os, pathlib, signal, sys, time\nout = pathlib.Path({folder!r})\nout.mkdir(exist_ok=True)\n"
        )
        preamble += "def end(**s): (out / 'summary.json').write_text(json.dumps(s))\n"
        return [sys.executable, "-c", preamble + body]

    monkeypatch.setattr(queue_module, "train_command", command)
    return started


FINISH = "end(state='finished', final_perplexity=2.0)"
DIE = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def one(tmp_path):
    return Plan([PlannedRun("one", {"preset": "tiny", "batch_size": 8, "out_dir": str(tmp_path / "one")})])


def test_a_run_that_died_is_started_again_and_given_up_after_a_while(one, monkeypatch):
    started = script(monkeypatch, DIE, DIE, FINISH)
    assert Queue(one, 1).run() == {}
    assert len(started) == 3
    one.fixed[0].folder.summary.unlink()
    started = script(monkeypatch, DIE)
    failures = Queue(one, 1).run()
    assert len(started) == 4
    assert "died 4 times" in failures["one"]


def test_progress_between_deaths_forgives_them(one, monkeypatch):
    grow = "n = len(list(out.glob('step-*'))) + 1; (out / f'step-{n:08d}').mkdir(); "
    started = script(monkeypatch, *[grow + DIE] * 8, FINISH)
    assert Queue(one, 1).run() == {}
    assert len(started) == 9


def test_out_of_memory_halves_the_micro_batch_and_says_so(one, monkeypatch):
    started = script(monkeypatch, "end(state='failed', reason='out of memory', retry='smaller')")
    lines = []
    failures = Queue(one, 1, say=lines.append).run()
    assert [settings.get("micro_batch") for _, settings in started] == [None, 4, 2, 1]
    assert "one: out of memory: trying again with micro-batches of 4 instead of 8" in lines
    assert "micro-batch of 1" in failures["one"]


def test_a_run_that_diverged_is_not_tried_again(one, monkeypatch):
    started = script(monkeypatch, "end(state='failed', reason='loss nan at step 3', retry='')")
    assert Queue(one, 1).run() == {"one": "loss nan at step 3"}
    assert len(started) == 1


def test_a_run_that_was_asked_to_stop_is_left_alone(one, monkeypatch):
    started = script(monkeypatch, "end(state='stopped', reason='SIGTERM'); sys.exit(143)", FINISH)
    assert Queue(one, 1).run() == {}
    assert len(started) == 1
    assert Queue(one, 1).run() == {}  # the next queue resumes it
    assert one.fixed[0].folder.finished()


def test_a_run_that_another_queue_has_just_finished_has_not_failed(one, monkeypatch):
    """Its end came between this queue's look and its start: `oelm train` refuses a finished run with exit code 2."""
    other = "(out / 'summary.json').write_text('{\"state\": \"finished\"}'); os.utime(out / 'summary.json', (1, 1))"
    script(monkeypatch, f"{other}; sys.exit(2)")
    lines = []
    assert Queue(one, 1, say=lines.append).run() == {}
    assert "one: another process has taken it" in lines


def test_a_plan_with_a_stopped_run_is_not_said_to_be_finished(tmp_path, data, monkeypatch, oelm):
    text = f'[defaults]\npreset = "tiny"\ndata_path = "{data}"\n[matrix]\nmodel_type = ["baseline"]\nseed = [1, 2]\n'
    (tmp_path / "plan.toml").write_text(text)
    script(monkeypatch, "end(state='stopped', reason='SIGTERM'); sys.exit(143)", FINISH)
    result = oelm("run", tmp_path / "plan.toml", "--out", tmp_path / "out", "--slots", 1)
    assert (result.code, "all runs are finished" in result.out) == (1, False)
    assert "1 of 2 runs were stopped; the same command goes on" in result.out


def test_a_stop_while_a_run_is_starting_is_no_death(one, monkeypatch):
    """Asked to leave before it could write why: exit code 143 and no summary."""
    started = script(monkeypatch, "sys.exit(143)", FINISH)
    lines = []
    assert Queue(one, 1, say=lines.append).run() == {}
    assert len(started) == 1
    assert "one: stopped at step 0, as asked" in lines


def test_a_run_that_diverged_is_not_tried_again_by_the_next_queue_either(one, monkeypatch):
    script(monkeypatch, "end(state='failed', reason='loss nan at step 3', retry='never')")
    assert "loss nan" in Queue(one, 1).run()["one"]
    started = script(monkeypatch, FINISH)
    failures = Queue(one, 1).run()
    assert started == []
    assert "remove" in failures["one"]


def test_a_run_that_somebody_stopped_is_left_alone_by_a_second_queue(one, monkeypatch):
    started = script(monkeypatch, FINISH)
    queue = Queue(one, 1)
    folder = one.fixed[0].folder
    folder.path.mkdir(parents=True)
    folder.summary.write_text('{"state": "stopped"}')
    os.utime(folder.summary, (time.time() + 1, time.time() + 1))  # file times are coarse: clearly after the queue began
    assert queue.run() == {}
    assert started == []


def test_a_candidate_that_was_given_up_does_not_hold_back_the_other_seeds(tmp_path, monkeypatch):
    (tmp_path / "plan.toml").write_text(
        '[defaults]\npreset = "tiny"\n[matrix]\nmax_lr = [1e-3, 2e-3]\nseed = [1, 2]\n[select]\n'
    )
    plan = load_plan(tmp_path / "plan.toml", tmp_path / "out")
    lives = "end(state='finished', final_perplexity=2.0, final_val_loss=0.7)"
    body = f"lives = 'lr0.001' in str(out)\nif lives:\n    {lives}\nelse:\n    {DIE}"
    started = script(monkeypatch, body)
    (failed,) = Queue(plan, 1).run()
    assert failed.endswith("lr0.002_seed1")
    assert any(name.endswith("lr0.001_seed2") for name, _ in started)


def test_stopping_everything_ends_the_queue_too(one, tmp_path):
    """A queue in a process of its own, as --detach leaves it; its run sleeps until it is asked to leave."""
    code = (
        "import sys\nfrom oelm.lab import queue\nfrom oelm.lab.plan import Plan, PlannedRun\n"
        f"run = PlannedRun('one', {one.fixed[0].settings!r})\n"
        "queue.train_command = lambda run, settings: [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "queue.Queue(Plan([run]), 1).run()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while running_queues(tmp_path) != [process.pid] or not psutil.Process(process.pid).children():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        stop_everything([tmp_path])
        process.wait(20)
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        assert running_queues(tmp_path) == []
    finally:
        process.kill()


def test_an_old_stop_note_does_not_hide_a_death(one, monkeypatch):
    folder = one.fixed[0].folder
    folder.path.mkdir()
    folder.summary.write_text('{"state": "stopped"}')
    os.utime(folder.summary, (1, 1))
    started = script(monkeypatch, DIE, FINISH)
    assert Queue(one, 1).run() == {}
    assert len(started) == 2


def test_workers_leave_when_their_queue_is_killed(one, monkeypatch, tmp_path):
    """The kernel tells them, whatever ended the queue."""
    code = (
        "import sys; sys.path.insert(0, '.')\nfrom tests.lab.test_queue import *\n"
        "plan = Plan([PlannedRun('one', {'preset': 'tiny', 'out_dir': sys.argv[1]})])\n"
        "script(pytest.MonkeyPatch(), '(out / \"pid\").write_text(str(os.getpid())); time.sleep(60)')\n"
        "Queue(plan, 1).run()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "one")])
    pid_file = tmp_path / "one/pid"
    while not pid_file.exists() or not pid_file.read_text():
        time.sleep(0.02)
    worker = psutil.Process(int(pid_file.read_text()))
    parent.kill()
    parent.wait()
    worker.wait(5)


def test_the_best_learning_rate_is_chosen_on_validation_before_the_other_seeds_run(tmp_path, monkeypatch):
    text = """
    [defaults]
    preset = "tiny"
    [matrix]
    model_type = ["baseline", "oelm_v2"]
    max_lr = [0.1, 0.2, 0.3]
    seed = [1, 2, 3]
    [select]
    seed = 2
    """
    (tmp_path / "plan.toml").write_text(text)
    plan = load_plan(tmp_path / "plan.toml", tmp_path / "out")
    assert (len(plan.runs), plan.total) == (6, 10)
    loss = {"baseline": {0.1: 3.0, 0.2: 1.0, 0.3: 2.0}, "oelm_v2": {0.1: 3.0, 0.2: 2.0}}
    order = []

    def command(run, settings):
        order.append((settings["model_type"], settings["max_lr"], settings["seed"]))
        value = loss[settings["model_type"]].get(settings["max_lr"])
        end = {"state": "failed", "reason": "nan"} if value is None else {"state": "finished", "final_perplexity": 1.0}
        body = f"import json, pathlib; p = pathlib.Path({settings['out_dir']!r}); p.mkdir(parents=True);"
        body += f"(p / 'summary.json').write_text(json.dumps({ {**end, 'final_val_loss': value or 99.0}!r}))"
        return [sys.executable, "-c", body]

    monkeypatch.setattr(queue_module, "train_command", command)
    failures = Queue(plan, 2).run()
    assert list(failures) == ["oelm_v2_lr0.3_seed2"]
    assert len(order) == 10
    followers = {entry for entry in order if entry[2] != 2}
    assert followers == {(arm, 0.2, seed) for arm in loss for seed in (1, 3)}


def test_killing_queue_and_workers_loses_nothing():
    """A slice of `make kill-queue`; its seed hits the queue first, then a worker."""
    options = ("--runs", "2", "--kills", "3", "--seed", "105")
    programme = [sys.executable, "-m", "tests.programmes.kill_queue", *options]
    done = subprocess.run(programme, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "2/2 runs ended once and in the same bits; kills: {'queue'" in done.stdout
    assert "'worker'" in done.stdout


def test_a_killed_rank_ends_the_run_by_name_and_it_is_resumed_to_the_same_bits(data, tmp_path):
    """`gpus_per_run = 2` on the CPU: two gloo processes under torchrun."""
    found = kill_rank.programme(tmp_path, data, kills=1)
    assert found["failures"] == {}
    assert (len(found["seconds"]), found["named"], found["equal"]) == (1, 1, True)


REPORT = """
Failures:
[1]:
  time      : 2026-01-01_00:00:00
  host      : h
  rank      : 1 (local_rank: 1)
  exitcode  : {other} (pid: 2)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : h
  rank      : 0 (local_rank: 0)
  exitcode  : {root} (pid: 1)
"""


def test_a_rank_that_saved_and_left_after_another_was_killed_does_not_stop_the_run(one, monkeypatch):
    """torchrun asks the ranks that are left to leave: their note is no wish of anybody's."""
    leave = f"end(state='stopped', reason='asked to leave'); sys.stderr.write({REPORT.format(root=143, other=-9)!r})"
    started = script(monkeypatch, leave + "; sys.exit(1)", FINISH)
    assert Queue(one, 1).run() == {}
    assert len(started) == 2


@pytest.mark.parametrize(
    ("root", "other", "words"),
    [
        (1, -9, "rank 1 ended with exit code -9"),
        (-9, 1, "rank 0 ended with exit code -9"),
        (-9, -15, "rank 0 ended with exit code -9"),
        (1, -15, "rank 0 ended with exit code 1"),
        (1, 1, "rank 0 ended with exit code 1"),
        (-15, -15, ""),
        (143, -15, ""),
    ],
)
def test_the_process_that_was_killed_is_named_whichever_torchrun_saw_first(root, other, words):
    worker = Worker(None, None, io.BytesIO(REPORT.format(root=root, other=other).encode()), [], 0.0)
    assert words in worker.first_to_die()
    assert bool(worker.first_to_die()) == bool(words)
