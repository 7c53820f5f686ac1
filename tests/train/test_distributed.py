import signal
import subprocess
import time

from oelm.train import metrics
from oelm.train.folder import RunFolder
from tests.programmes.kill_resume import fingerprint
from tests.train.small_runs import SMALL, TORCHRUN, assert_frozen, command, stop_after, summary


def test_two_processes_train_as_one_and_keep_frozen_bits(tiny, data, tmp_path):
    """torchrun with two processes of batch 4 against one process of batch 8: the same global batches."""
    settings = ("--model_type", "oelm_v2", "--max_steps", 200, "--val_interval", 100, "--weight_decay", 0.5)
    both = command(data, tmp_path / "two", *settings, "--batch_size", 4, launcher=TORCHRUN)
    done = subprocess.run(both, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert tiny(*settings, "--batch_size", 8, out="one").code == 0
    assert_frozen(tmp_path / "two")
    one, two = (
        {(r["kind"], r["step"]): r["loss"] for r in metrics.read(tmp_path / name / "metrics.jsonl")}
        for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    early = [key for key in one if key[1] <= 100]
    assert max(abs(one[key] - two[key]) for key in early) < 1e-3  # float32 sums in another order drift apart
    assert abs(one["train", 5] - two["train", 5]) < 1e-5
    assert summary(tmp_path / "two")["tokens_seen"] == summary(tmp_path / "one")["tokens_seen"]


def test_two_processes_resume_to_the_same_bits(data, tmp_path):
    settings = ("--max_steps", 150, "--val_interval", 30, "--log_interval", 1)  # long enough to be cut off in time
    whole = subprocess.run(command(data, tmp_path / "whole", *settings, launcher=TORCHRUN), capture_output=True)
    assert whole.returncode == 0
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    cut = subprocess.Popen(command(data, tmp_path / "cut", *settings, launcher=TORCHRUN), **silent)
    while RunFolder(tmp_path / "cut").last_step() < 30:
        time.sleep(0.01)
    cut.send_signal(signal.SIGTERM)
    cut.wait()
    again = subprocess.run(
        command(data, tmp_path / "cut", *settings, "--resume", launcher=TORCHRUN), capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr[-2000:]
    assert fingerprint(RunFolder(tmp_path / "cut")) == fingerprint(RunFolder(tmp_path / "whole"))


def test_the_world_size_of_a_run_is_fixed(tiny, data, tmp_path):
    with stop_after(tmp_path / "run", steps=6):
        tiny(*SMALL)
    done = subprocess.run(
        command(data, tmp_path / "run", *SMALL, "--resume", launcher=TORCHRUN), capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "was started with 1 processes, not 2" in done.stderr
