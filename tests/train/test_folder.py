import json
import subprocess
import time
import tomllib

import numpy as np
import pytest

from oelm.files import lock_file
from oelm.train import metrics
from oelm.train.folder import RunFolder
from tests.train.small_runs import SMALL, command, summary


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


def test_a_folder_in_use_is_refused(tiny, data, tmp_path):
    run = tmp_path / "run"
    other = subprocess.Popen(command(data, run, "--max_steps", 100_000), stdout=subprocess.DEVNULL)
    try:
        while RunFolder(run).holder()[0] != other.pid:
            time.sleep(0.02)
        result = tiny("--max_steps", 100_000, "--resume")
        assert (result.code, "in use" in result.err, f"pid {other.pid}" in result.err) == (2, True, True)
    finally:
        other.kill()
        other.wait()


def test_a_folder_that_another_run_has_just_taken_is_in_use(tiny, tmp_path):
    """Between its lock and its config: to say that there is nothing to resume would invite a second start."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with lock_file(folder.lock, "", "pid 1 on another"):
        result = tiny("--resume")
    assert (result.code, "in use by another run" in result.err) == (2, True)


@pytest.mark.parametrize("where", ["run", "run/file"])
def test_an_out_dir_that_is_not_ours_is_left_alone(tiny, tmp_path, where):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/file").write_text("mine")
    result = tiny(*SMALL, out=where)
    assert result.code == 2
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["file"]


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
