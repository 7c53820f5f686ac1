"""Frozen bits stay what they were, whatever happens to a run."""

import shutil
import subprocess

import pytest

from tests.train.small_runs import assert_frozen, command, stop_after

LONG = ("--model_type", "oelm_v2", "--max_steps", 200, "--val_interval", 100, "--weight_decay", 0.5, "--dropout", 0.1)


def test_frozen_bits_survive_decay_accumulation_and_resume(tiny, tmp_path, oelm):
    with stop_after(tmp_path / "run", steps=120):
        assert tiny(*LONG, "--micro_batch", 1).code == 143
    assert oelm("train", "--resume", tmp_path / "run").code == 0
    assert_frozen(tmp_path / "run")


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="compiling needs a C++ compiler")
def test_frozen_bits_survive_compile(data, tmp_path):
    done = subprocess.run(command(data, tmp_path / "run", *LONG, "--compile"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_frozen(tmp_path / "run")
