"""Whole runs, as users start them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from oelm.config import resolve
from oelm.model.build import build_model
from oelm.train import metrics
from oelm.train.folder import RunFolder
from tests.conftest import make_data
from tests.programmes.kill_resume import fingerprint

SMALL = ("--max_steps", 12, "--val_interval", 5, "--save_interval", 10)


def weights(run):
    folder = RunFolder(run)
    frozen = load_file(folder.frozen) if folder.frozen.exists() else {}
    return {**load_file(folder.last / "model.safetensors"), **frozen}


def summary(run):
    return json.loads((run / "summary.json").read_text())


def command(data, run, *arguments, launcher=(sys.executable, "-m", "oelm")):
    fixed = ("--preset", "tiny", "--data_path", data, "--threads", 1, "--device", "cpu", "--out_dir", run)
    return [str(word) for word in (*launcher, "train", *fixed, *arguments)]


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "oelm")


def test_the_run_folder_holds_what_it_promises(tiny, tmp_path):
    result = tiny("--model_type", "oelm_v2", *SMALL)
    run = tmp_path / "run"
    assert result.code == 0
    names = {p.name for p in run.iterdir() if not p.name.startswith("events.out.tfevents")}
    assert names == {
        "config.toml", "training.log", "metrics.jsonl", "timing_stats.json", "summary.json", "environment.json",
        "frozen.safetensors", "best", "last", "run.lock", "step-00000010", "step-00000012", "test_documents.npy",
        "sample.json", "freeze_audit.jsonl",
    }  # fmt: skip
    assert any(p.name.startswith("events.out.tfevents") for p in run.iterdir())
    config = tomllib.loads((run / "config.toml").read_text())
    assert (config["model_type"], config["frames"], config["freeze"], config["max_steps"]) == (
        "oelm_v2", "orthogonal", "qk", 12,
    )  # fmt: skip
    timing = json.loads((run / "timing_stats.json").read_text())
    published = {
        "model_type", "init_method", "dataset", "total_wall_time", "total_formatted", "num_steps_measured",
        "mean_step_time", "std_step_time", "median_step_time", "min_step_time", "max_step_time", "p95_step_time",
        "p99_step_time", "total_validation_time", "mean_validation_time", "num_validations", "final_perplexity",
        "best_val_loss",
    }  # fmt: skip
    assert published <= timing.keys()
    steps = [r["seconds"] for r in metrics.read(run / "metrics.jsonl", "train")]
    assert timing["num_steps_measured"] == len(steps) == 12
    assert timing["mean_step_time"] == pytest.approx(np.mean(steps))
    assert timing["num_validations"] == 3
    done = summary(run)
    assert done["state"] == "finished"
    assert done["tokens_seen"] == 12 * 4 * 32
    assert done["peak_memory_bytes"] > 50 * 2**20
    assert done["final_perplexity"] == pytest.approx(np.exp(done["final_val_loss"]))
    assert done["test_loss"] is not None
    environment = json.loads((run / "environment.json").read_text())
    assert environment["parts"][0]["threads"] == 1
    assert environment["data"]["tokenizer"] == "bytes"


def test_the_start_says_what_is_to_come(tiny, tmp_path):
    out = tiny("--model_type", "oelm_v2", *SMALL, "--warmup_steps", 50).out
    assert "26,144 total, 22,048 trainable, 4,096 frozen" in out
    assert "tokens per step: 128 (4 x 32)" in out
    assert "epochs" in out
    assert "expected time" in out
    assert "MiB a checkpoint" in out
    assert "WARNING: the warm-up (50 steps)" in out
    log = (tmp_path / "run/training.log").read_text()
    assert "step 12/12 | loss" in log
    assert "val at step 5 | loss" in log


def test_many_epochs_are_warned_about(tiny, data, tmp_path):
    small = tmp_path / "small"
    shutil.copytree(data, small)
    for name in ("meta.json", "test.bin"):
        (small / name).unlink()
    np.fromfile(data / "train.bin", np.uint16)[:200].tofile(small / "train.bin")
    assert "the training text is seen" in tiny("--max_steps", 4, "--data_path", small).out


def test_published_token_files_without_meta_train(tiny, data, tmp_path):
    for split in ("train", "val"):
        shutil.copy(data / f"{split}.bin", tmp_path / f"{split}.bin")
    assert tiny("--max_steps", 3, "--data_path", tmp_path).code == 0
    done = summary(tmp_path / "run")
    assert (done["test_loss"], done["final_val_bpb"]) == (None, None)


def test_settings_from_a_file_and_flags_over_it(tiny, tmp_path):
    (tmp_path / "settings.toml").write_text('max_steps = 4\nmodel_type = "oelm_random"\nseed = 9\n')
    assert tiny(tmp_path / "settings.toml", "--seed", 10).code == 0
    config = RunFolder(tmp_path / "run").config()
    assert (config.max_steps, config.model_type, config.seed, config.preset) == (4, "oelm_random", 10, "tiny")


def test_training_lowers_the_loss(tiny, tmp_path):
    assert tiny("--max_steps", 150, "--val_interval", 150).code == 0
    assert summary(tmp_path / "run")["final_val_loss"] < 3.5 < np.log(257)


def test_accumulation_keeps_the_step(tiny, tmp_path):
    for name, micro in (("whole", 0), ("parts", 1)):
        assert tiny(*SMALL, "--micro_batch", micro, out=name).code == 0
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, parts[name], atol=2e-5, rtol=1e-3)


def test_reading_ahead_changes_no_bit(tiny, tmp_path):
    assert tiny(*SMALL, out="plain").code == 0
    assert tiny(*SMALL, "--num_workers", 2, out="ahead").code == 0
    assert fingerprint(RunFolder(tmp_path / "plain")) == fingerprint(RunFolder(tmp_path / "ahead"))


def test_a_finished_run_is_never_overwritten(tiny, tmp_path):
    assert tiny(*SMALL).code == 0
    before = fingerprint(RunFolder(tmp_path / "run"))
    for arguments in ((), ("--resume",), ("--seed", 3)):
        result = tiny(*SMALL, *arguments)
        assert (result.code, "finished run" in result.err) == (2, True)
    assert fingerprint(RunFolder(tmp_path / "run")) == before


def test_a_stopped_run_offers_to_be_resumed_and_refuses_other_settings(tiny, data, tmp_path, oelm):
    run = tmp_path / "run"
    assert tiny(*SMALL, out="whole").code == 0
    with _stop_after(run, steps=3):
        assert tiny(*SMALL).code == 128 + signal.SIGTERM
    assert summary(run)["state"] == "stopped"
    again = tiny(*SMALL)
    assert (again.code, "--resume" in again.err, "of 12" in again.err) == (2, True, True)
    other = tiny(*SMALL, "--max_lr", 0.5, "--resume")
    assert (other.code, "max_lr = 0.004, not 0.5" in other.err) == (2, True)
    resumed = oelm("train", "--resume", run)
    assert resumed.code == 0
    assert "resumed from" in resumed.out
    assert fingerprint(RunFolder(run)) == fingerprint(RunFolder(tmp_path / "whole"))


class _stop_after:  # noqa: N801  # reads as a verb
    """Send this process SIGTERM once a run has done some steps."""

    def __init__(self, run, steps):
        self.run, self.steps, self.done = run, steps, False

    def __enter__(self):
        def watch():
            while not self.done:
                log = self.run / "training.log"
                if log.exists() and f"step {self.steps}/" in log.read_text():
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
                time.sleep(0.001)

        self.thread = threading.Thread(target=watch)
        self.thread.start()

    def __exit__(self, *_):
        self.done = True
        self.thread.join()


def test_kills_at_random_times_end_in_the_same_bits():
    """A slice of `make kill-loop`."""
    options = ("--kills", "4", "--terms", "2", "--seed", str(time.time_ns() % 1000))
    programme = [sys.executable, "-m", "tests.programmes.kill_resume", *options]
    done = subprocess.run(programme, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6/6 runs ended in the same bits" in done.stdout


def test_a_folder_in_use_is_refused(tiny, data, tmp_path):
    run = tmp_path / "run"
    other = subprocess.Popen(command(data, run, "--max_steps", 100_000), stdout=subprocess.DEVNULL)
    try:
        while not RunFolder(run).alive():
            time.sleep(0.02)
        result = tiny("--max_steps", 100_000, "--resume")
        assert (result.code, "in use" in result.err, f"pid {other.pid}" in result.err) == (2, True, True)
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("where", ["run", "run/file"])
def test_an_out_dir_that_is_not_ours_is_left_alone(tiny, tmp_path, where):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/file").write_text("mine")
    result = tiny(*SMALL, out=where)
    assert result.code == 2
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["file"]


def test_a_damaged_checkpoint_falls_back_loudly_and_ends_in_the_same_bits(tiny, tmp_path, oelm):
    run = tmp_path / "run"
    assert tiny(*SMALL, out="whole").code == 0
    with _stop_after(run, steps=11):
        assert tiny(*SMALL).code == 143
    newest = max(run.glob("step-*"))
    target = newest / "optimizer.safetensors"
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    resumed = oelm("train", "--resume", run)
    assert resumed.code == 0
    assert f"WARNING: checkpoint {newest} is damaged" in resumed.out
    assert fingerprint(RunFolder(run)) == fingerprint(RunFolder(tmp_path / "whole"))


def test_a_damaged_frozen_file_is_refused(tiny, tmp_path, oelm):
    run = tmp_path / "run"
    with _stop_after(run, steps=6):
        tiny("--model_type", "oelm_v2", *SMALL)
    content = bytearray((run / "frozen.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "frozen.safetensors").write_bytes(content)
    result = oelm("train", "--resume", run)
    assert (result.code, "frozen.safetensors is damaged" in result.err) == (2, True)


def test_another_tokenizer_at_resume_is_refused(tiny, tmp_path, oelm):
    run = tmp_path / "run"
    data = make_data(tmp_path / "data", "bpe:300")
    with _stop_after(run, steps=6):
        tiny(*SMALL, "--data_path", data, "--vocab_size", 320)
    shutil.rmtree(data)
    make_data(tmp_path / "data", "bpe:310")
    result = oelm("train", "--resume", run)
    assert (result.code, "tokenizer" in result.err, "bpe:310" in result.err) == (2, True, True)


def test_a_full_disk_ends_in_one_line_and_the_run_goes_on_once_there_is_room(tiny, tmp_path, oelm, monkeypatch):
    import errno

    from oelm.train import checkpoint

    run = tmp_path / "run"
    assert tiny(*SMALL, out="whole").code == 0
    real = checkpoint.save_file

    def full(tensors, path):
        if "step-00000010" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    result = tiny(*SMALL)
    assert result.code == 2
    assert len(result.err.strip().splitlines()) == 1
    for words in ("disk full while saving step 10", "last good checkpoint is step 5", "--resume"):
        assert words in result.err
    assert not list(run.glob(".saving*"))
    monkeypatch.setattr(checkpoint, "save_file", real)
    assert oelm("train", "--resume", run).code == 0
    assert fingerprint(RunFolder(run)) == fingerprint(RunFolder(tmp_path / "whole"))


@pytest.mark.parametrize("what", ["loss", "gradient", "weight", "evaluation"])
def test_nan_stops_before_the_update_and_keeps_the_last_good_state(tiny, tmp_path, monkeypatch, what):
    from oelm.train.language import LanguageModelling
    from oelm.train.loop import Trainer

    real_step, real_loss, real_evaluate = Trainer._step, LanguageModelling.loss, LanguageModelling.evaluate
    now = {}

    def step(self, read):
        now["trainer"] = self
        if what == "weight" and self.state.step == 7:
            with torch.no_grad():
                self.model.final_norm.weight[0] = float("nan")
        real_step(self, read)

    def loss(self, model, batch):
        value = real_loss(self, model, batch)
        if now and now["trainer"].state.step == 7:
            if what == "loss":
                return value * float("inf")
            if what == "gradient":
                value.register_hook(lambda gradient: gradient * float("nan"))
        return value

    def evaluate(self, *arguments):
        found = real_evaluate(self, *arguments)
        at_ten = now["trainer"].state.step == 10
        return replace(found, values={"loss": float("nan")}) if what == "evaluation" and at_ten else found

    monkeypatch.setattr(Trainer, "_step", step)
    monkeypatch.setattr(LanguageModelling, "loss", loss)
    monkeypatch.setattr(LanguageModelling, "evaluate", evaluate)
    result = tiny(*SMALL)
    assert result.code == 1
    assert len(result.err.strip().splitlines()) == 1
    assert "the last good checkpoint is step 5" in result.err
    run = tmp_path / "run"
    assert summary(run)["state"] == "failed"
    assert RunFolder(run).last_step() == 5
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())


def frames(seed=42):
    model = build_model(resolve({"preset": "tiny", "model_type": "oelm_v2", "seed": seed}))
    return {n: p.detach() for n, p in model.named_parameters() if n.endswith(("q.weight", "k.weight"))}


LONG = ("--model_type", "oelm_v2", "--max_steps", 200, "--val_interval", 100, "--weight_decay", 0.5, "--dropout", 0.1)


def assert_frozen(run):
    """The frozen tensors are still the frames of the seed, bit for bit, and in no optimizer state."""
    after = load_file(run / "frozen.safetensors")
    assert after.keys() == frames().keys()
    assert all(torch.equal(after[name], frame) for name, frame in frames().items())
    state = {key.rpartition("/")[0] for key in load_file(run / "last/optimizer.safetensors")}
    assert state
    assert not state & after.keys()
    assert not load_file(run / "last/model.safetensors").keys() & after.keys()


def test_frozen_bits_survive_decay_accumulation_and_resume(tiny, tmp_path, oelm):
    with _stop_after(tmp_path / "run", steps=120):
        assert tiny(*LONG, "--micro_batch", 1).code == 143
    assert oelm("train", "--resume", tmp_path / "run").code == 0
    assert_frozen(tmp_path / "run")


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="compiling needs a C++ compiler")
def test_frozen_bits_survive_compile(data, tmp_path):
    done = subprocess.run(command(data, tmp_path / "run", *LONG, "--compile"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_frozen(tmp_path / "run")


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
    settings = ("--max_steps", 40, "--val_interval", 10, "--log_interval", 1)
    whole = subprocess.run(command(data, tmp_path / "whole", *settings, launcher=TORCHRUN), capture_output=True)
    assert whole.returncode == 0
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    cut = subprocess.Popen(command(data, tmp_path / "cut", *settings, launcher=TORCHRUN), **silent)
    while RunFolder(tmp_path / "cut").last_step() < 10:
        time.sleep(0.01)
    cut.send_signal(signal.SIGTERM)
    cut.wait()
    again = subprocess.run(
        command(data, tmp_path / "cut", *settings, "--resume", launcher=TORCHRUN), capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr[-2000:]
    assert fingerprint(RunFolder(tmp_path / "cut")) == fingerprint(RunFolder(tmp_path / "whole"))


def test_the_world_size_of_a_run_is_fixed(tiny, data, tmp_path):
    with _stop_after(tmp_path / "run", steps=6):
        tiny(*SMALL)
    done = subprocess.run(
        command(data, tmp_path / "run", *SMALL, "--resume", launcher=TORCHRUN), capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "was started with 1 processes, not 2" in done.stderr


@pytest.mark.parametrize("link", [False, True])
def test_a_refused_run_leaves_other_peoples_files_alone(tiny, tmp_path, link):
    place = tmp_path / "precious"
    (place / ".git").mkdir(parents=True)
    (place / ".git/HEAD").write_text("x")
    (place / ".env").write_text("secret")
    if link:
        (tmp_path / "link").symlink_to(place)
    result = tiny("--device", "cuda", out="link" if link else "precious")
    assert (result.code, len(result.err.strip().splitlines())) == (2, 1)
    assert "no CUDA GPU" in result.err
    assert sorted(str(p.relative_to(place)) for p in place.rglob("*")) == [".env", ".git", ".git/HEAD"]
    assert tiny("--device", "cuda", out="new").code == 2
    assert not (tmp_path / "new").exists()


def test_a_run_that_is_asked_to_leave_while_it_starts_says_so(tmp_path, data):
    command = [sys.executable, "-m", "oelm", "train", "--preset", "tiny", "--data_path", str(data), "--device", "cpu",
               "--out_dir", str(tmp_path / "run")]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "run/config.toml").exists():
        time.sleep(0.01)
    process.terminate()
    process.wait(60)
    assert summary(tmp_path / "run")["state"] == "stopped"
