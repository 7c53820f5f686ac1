"""Whole runs, as users start them."""

import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from oelm.errors import RunFailed
from oelm.train import metrics
from oelm.train.folder import RunFolder
from oelm.train.run import _named_failures
from tests.conftest import make_data
from tests.programmes.kill_resume import fingerprint
from tests.train.small_runs import SMALL, command, stop_after, summary, weights


def test_a_run_does_not_wait_for_the_compiler_to_be_imported(data, tmp_path):
    """It would take as long as torch itself; only --compile needs it."""
    program = (
        "import sys\nfrom oelm.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as end: assert not end.code\n"
        "print('imported', [name for name in ('torch', 'torch._dynamo', 'sympy') if name in sys.modules])"
    )
    words = command(data, tmp_path / "run", *SMALL, launcher=(sys.executable, "-c", program))
    assert subprocess.check_output(words, text=True).endswith("imported ['torch']\n")


def test_what_the_compiler_cannot_do_ends_a_run_with_a_way_on():
    error = type("InductorError", (RuntimeError,), {"__module__": "torch._inductor.exc"})("No compiler\nmore of it")
    way_on = r"torch\.compile: No compiler; go on with --resume and --no_compile"
    with pytest.raises(RunFailed, match=way_on), _named_failures(1):
        raise error


def test_the_start_says_what_is_to_come(tiny, tmp_path):
    out = tiny("--model_type", "oelm_v2", *SMALL, "--warmup_steps", 50).out
    assert "26,144 total, 22,048 trainable, 4,096 frozen" in out
    assert "tokens per step: 128 (4 x 32)" in out
    assert "epochs" in out
    assert "expected time" in out
    assert "MiB a checkpoint" in out
    assert "WARNING: the warm-up (50 steps)" in out
    assert "vocabulary" not in out
    log = (tmp_path / "run/training.log").read_text()
    assert "step 12/12 | loss" in log
    assert "val at step 5 | loss" in log


def test_a_vocabulary_that_is_not_the_presets_is_named(data, tmp_path, oelm):
    """With it, a small preset may be no small model."""
    out = oelm("train", "--preset", "pocket", "--data_path", data, "--out_dir", tmp_path / "run", *SMALL).out
    assert "vocabulary: 257 tokens, where the preset pocket has 1,024" in out


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


def test_checkpoints_come_between_validations_too(tiny, tmp_path, oelm):
    assert tiny("--max_steps", 6, "--val_interval", 6, "--save_interval", 2).code == 0
    assert [p.name for p in sorted((tmp_path / "run").glob("step-*"))] == [f"step-0000000{n}" for n in (2, 4, 6)]
    kinds = [record["kind"] for record in metrics.read(tmp_path / "run/metrics.jsonl")]
    assert kinds.count("val") == 1


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
    with stop_after(run, steps=3):
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


def test_kills_at_random_times_end_in_the_same_bits():
    """A slice of `make kill-loop`."""
    options = ("--kills", "2", "--terms", "1", "--seed", str(time.time_ns() % 1000))
    programme = [sys.executable, "-m", "tests.programmes.kill_resume", *options]
    done = subprocess.run(programme, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3/3 runs ended in the same bits" in done.stdout


def test_a_damaged_checkpoint_falls_back_loudly_and_ends_in_the_same_bits(tiny, tmp_path, oelm):
    run = tmp_path / "run"
    assert tiny(*SMALL, out="whole").code == 0
    with stop_after(run, steps=11):
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
    with stop_after(run, steps=6):
        tiny("--model_type", "oelm_v2", *SMALL)
    content = bytearray((run / "frozen.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "frozen.safetensors").write_bytes(content)
    result = oelm("train", "--resume", run)
    assert (result.code, "frozen.safetensors is damaged" in result.err) == (2, True)


def test_another_tokenizer_at_resume_is_refused(tiny, tmp_path, oelm):
    run = tmp_path / "run"
    data = make_data(tmp_path / "data", "bpe:300")
    with stop_after(run, steps=6):
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


def test_a_run_that_is_asked_to_leave_while_it_starts_says_so(tmp_path, data):
    command = [sys.executable, "-m", "oelm", "train", "--preset", "tiny", "--data_path", str(data), "--device", "cpu",
               "--out_dir", str(tmp_path / "run")]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "run/config.toml").exists():
        time.sleep(0.01)
    process.terminate()
    process.wait(60)
    assert summary(tmp_path / "run")["state"] == "stopped"
