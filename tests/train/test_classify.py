"""Classification as a task of the one loop."""

import json
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from oelm.config import resolve
from oelm.data.labelled import open_labelled
from oelm.data.tokens import open_data
from oelm.model.build import build_model
from oelm.train import metrics
from oelm.train.classify import Classification, class_logits, evaluation_batches, pad
from oelm.train.distributed import World
from oelm.train.folder import RunFolder
from tests.programmes.kill_resume import programme
from tests.small_encoder import make_pairs, make_rows, write_rows
from tests.train.small_runs import TORCHRUN

ALONE = World(0, 1, torch.device("cpu"))


def task(encoder, pairs, **settings):
    config = resolve({"arch": str(encoder), "labels": 3, "seq_len": 32, "dropout": 0.0, **settings})
    return Classification(config, open_labelled(open_data("", str(pairs))), ALONE)


def test_a_run_learns_and_leaves_accuracy_answers_and_frozen_bits(classify, tmp_path):
    assert classify("--model_type", "oelm_v2", "--num_epochs", 12, "--dropout", 0).code == 0
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.9
    answers = np.load(run / "test_answers.npy")
    assert (answers[:, 0] == answers[:, 1]).mean() == summary["test_accuracy"]
    assert summary["epochs"] == pytest.approx(12, rel=0.1)
    assert summary["steps"] == summary["tokens_seen"] // (16 * 32)
    frozen = load_file(run / "frozen.safetensors")
    assert len(frozen) == 8
    config = RunFolder(run).config()
    start = dict(build_model(config).named_parameters())
    assert all(torch.equal(start[name], tensor) for name, tensor in frozen.items())
    log = (run / "training.log").read_text()
    assert "each head's pretrained block replaced by its orthonormal factor" in log
    assert "0 = same, 1 = other, 2 = odd" in log


def test_a_gpt_classifies_from_its_last_token(oelm, tmp_path):
    pairs = make_pairs(tmp_path / "data", "bytes")
    result = oelm("train", "--preset", "tiny", "--data_path", pairs, "--seq_len", 160, "--model_type", "oelm_v2",
                  "--max_steps", 40, "--threads", 1, "--device", "cpu", "--out_dir", tmp_path / "run")  # fmt: skip
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "run/summary.json").read_text())["test_accuracy"] is not None


def test_padding_changes_no_answer(encoder, pairs):
    for arch in (encoder, "gpt"):
        shape = {} if arch == encoder else {"preset": "tiny", "vocab_size": 40}
        work = task(arch, pairs, **shape)
        model = build_model(work.config).eval()
        examples = [work.data.example("val", i, 32) for i in range(8)]
        with torch.inference_mode():
            together = class_logits(model, (*pad(examples, 0), None))
            alone = torch.cat([class_logits(model, (*pad([example], 0), None)) for example in examples])
        assert (together - alone).abs().max() < 1e-6


def test_evaluation_is_over_every_example_once(encoder, pairs):
    work = task(encoder, pairs)
    model = build_model(work.config).eval()
    found = work.evaluate(model, "test", lambda: False)
    labels = work.data.rows["test"][:, 3]
    one_by_one = []
    for i in range(len(labels)):
        with torch.inference_mode():
            one_by_one.append(int(class_logits(model, work._batch("test", np.array([i]))).argmax()))
    assert found.answers[:, 1].tolist() == one_by_one
    assert found.values["accuracy"] == np.mean(labels == one_by_one)
    batches = evaluation_batches(np.array([5, 9_000, 7, 7, 4_000]), 8_000)
    assert [batch.tolist() for batch in batches] == [[1], [4, 3], [2, 0]]


def test_micro_batches_are_the_step_in_equal_parts(encoder, pairs):
    whole = task(encoder, pairs, batch_size=12).micro_batches(3)
    parts = task(encoder, pairs, batch_size=12, micro_batch=4).micro_batches(3)
    assert [len(part[0]) for part in parts] == [4, 4, 4]
    assert torch.cat([part[-1] for part in parts]).equal(whole[0][-1])


def test_two_processes_do_what_one_does(oelm, encoder, pairs, tmp_path):
    fixed = ("--arch", encoder, "--data_path", pairs, "--threads", 1, "--device", "cpu", "--seq_len", 32,
             "--max_steps", 6, "--dropout", 0, "--max_lr", 1e-3)  # fmt: skip
    assert oelm("train", *fixed, "--batch_size", 8, "--out_dir", tmp_path / "1").code == 0
    words = (*TORCHRUN, "train", *fixed, "--batch_size", 4, "--out_dir", tmp_path / "2")
    subprocess.run([str(word) for word in words], check=True, capture_output=True)
    one, two = (list(metrics.read(tmp_path / size / "metrics.jsonl")) for size in ("1", "2"))
    assert [record["step"] for record in one] == [record["step"] for record in two]
    for mine, theirs in zip(one, two, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine.get("accuracy") == theirs.get("accuracy")


def test_killed_runs_of_an_encoder_end_in_the_same_bits(tmp_path):
    result = programme(tmp_path, kills=2, terms=1, cases=("nli",))
    assert result["equal"] == result["total"] == 3


def test_a_file_is_prepared_on_the_way(oelm, encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = write_rows(tmp_path / "my rows.jsonl", make_rows(90))
    for out in ("a", "b"):  # the second time it lies there already
        result = oelm("train", "--arch", encoder, "--dataset", f"jsonl:{rows}", "--max_steps", 2, "--seq_len", 32,
                      "--threads", 1, "--device", "cpu", "--out_dir", out)  # fmt: skip
        assert result.code == 0, result.err
    assert len(list((tmp_path / "data").glob("my-rows-*"))) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--labels", 2), "has 3: same, other, odd"),
        (("--batch_size", 1000), "fewer than the 1000 of a step"),
        (("--seq_len", 4), "an example takes 5 at least"),
        (("--dataset", "jsonl:nowhere.jsonl", "--data_path", ""), "no such file"),
    ],
)
def test_data_that_do_not_fit_are_refused(classify, flags, message):
    result = classify(*flags)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1


def test_running_text_and_foreign_tokens_are_refused(oelm, encoder, data, tmp_path):
    result = oelm("train", "--arch", encoder, "--data_path", data, "--out_dir", tmp_path / "run")
    assert "holds running text" in result.err
    foreign = make_pairs(tmp_path / "foreign", "bytes")
    result = oelm("train", "--arch", encoder, "--data_path", foreign, "--out_dir", tmp_path / "run")
    assert "was tokenised with bytes" in result.err
    assert not (tmp_path / "run").exists()
