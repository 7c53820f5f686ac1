import signal
import subprocess
import time

import pytest

from oelm.train import metrics
from oelm.train.folder import RunFolder
from tests.programmes.kill_resume import fingerprint
from tests.train.small_runs import SMALL, TORCHRUN, assert_frozen, command, stop_after, summary

SETTINGS = ("--model_type", "oelm_v2", "--max_steps", 200, "--val_interval", 25, "--weight_decay", 0.5)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run of two processes of batch 4 that nothing disturbed."""
    run = tmp_path_factory.mktemp("two") / "run"
    done = subprocess.run(together(data, run), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return run


def together(data, run, *arguments):
    return command(data, run, *SETTINGS, "--batch_size", 4, *arguments, launcher=TORCHRUN)


def test_two_processes_train_as_one_and_keep_frozen_bits(whole, tiny, tmp_path):
    """Against one process of batch 8: the same global batches."""
    assert tiny(*SETTINGS, "--batch_size", 8, out="one").code == 0
    assert_frozen(whole)
    one, two = (
        {(r["kind"], r["step"]): r["loss"] for r in metrics.read(run / "metrics.jsonl")}
        for run in (tmp_path / "one", whole)
    )
    assert one.keys() == two.keys()
    early = [key for key in one if key[1] <= 100]
    assert max(abs(one[key] - two[key]) for key in early) < 1e-3  # float32 sums in another order drift apart
    assert abs(one["train", 5] - two["train", 5]) < 1e-5
    assert summary(whole)["tokens_seen"] == summary(tmp_path / "one")["tokens_seen"]


def test_two_processes_resume_to_the_same_bits(whole, data, tmp_path):
    cut = subprocess.Popen(together(data, tmp_path / "cut"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while cut.poll() is None and RunFolder(tmp_path / "cut").last_step() < 25:
        time.sleep(0.01)
    cut.send_signal(signal.SIGTERM)
    cut.wait()
    assert RunFolder(tmp_path / "cut").last_step() < 200
    again = subprocess.run(together(data, tmp_path / "cut", "--resume"), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-2000:]
    assert fingerprint(RunFolder(tmp_path / "cut")) == fingerprint(RunFolder(whole))


def test_the_world_size_of_a_run_is_fixed(tiny, data, tmp_path):
    with stop_after(tmp_path / "run", steps=6):
        tiny(*SMALL)
    done = subprocess.run(
        command(data, tmp_path / "run", *SMALL, "--resume", launcher=TORCHRUN), capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "was started with 1 processes, not 2" in done.stderr
