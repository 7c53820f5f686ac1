import json

import numpy as np
import pytest

from oelm.lab.study import load_study
from tests.lab.made_runs import make_run


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(("key", "split"), [("final_val_loss", "val"), ("test_loss", "test")])
def test_a_summary_that_the_metrics_contradict_is_not_believed(tmp_path, key, split):
    folder = make_run(tmp_path, "one")
    assert not load_study(tmp_path).damaged
    rewrite(folder / "summary.json", **{key: 0.001})
    reason = load_study(tmp_path).damaged["one"]
    assert reason == f"summary.json and metrics.jsonl do not agree on the final {split} loss"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"test_bpb": "x"}, "summary.json: test_bpb is 'x'"),
        ({"epochs": None}, "summary.json: epochs is None"),
        ({"data": {"tokenizer": ["bpe"]}}, "summary.json: data is damaged"),
        ({"data": {"tokenizer": "bpe", "tokenizer_hash": {}}}, "summary.json: data is damaged"),
    ],
)
def test_a_summary_edited_by_hand_is_left_out_of_the_report_and_named(tmp_path, oelm, damage, reason):
    make_run(tmp_path, "whole")
    rewrite(make_run(tmp_path, "edited", seed=2) / "summary.json", **damage)
    assert load_study(tmp_path).damaged == {"edited": reason}
    assert oelm("report", tmp_path, "--format", "md").code == 0


@pytest.mark.parametrize("state", [None, "done", ["finished"], 1])
def test_a_run_that_does_not_say_how_it_ended_died(tmp_path, oelm, state):
    rewrite(make_run(tmp_path, "one") / "summary.json", state=state)
    assert load_study(tmp_path).statuses[0].state == "died"
    assert oelm("report", tmp_path, "--format", "md").code == 0


def test_steps_without_time_are_no_measurement(tmp_path):
    make_run(tmp_path, "one", step_seconds=0.0)
    assert load_study(tmp_path).damaged == {"one": "metrics.jsonl: a step took no time"}


@pytest.mark.parametrize("content", [b"PK\x03\x04junk", b"", b"x" * 99])
def test_damaged_documents_are_as_good_as_none(tmp_path, content):
    folder = make_run(tmp_path, "one", documents=np.ones((3, 2)))
    assert load_study(tmp_path).runs[0].documents.shape == (3, 2)
    (folder / "test_documents.npy").write_bytes(content)
    assert load_study(tmp_path).runs[0].documents is None


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl"])
def test_one_file_nested_beyond_reason_does_not_hide_the_other_runs(tmp_path, oelm, name):
    make_run(tmp_path, "whole")
    folder = make_run(tmp_path, "nested", seed=2)
    (folder / name).write_text("[" * 100_000 + "\n")
    assert "whole" in oelm("status", tmp_path).out
    assert [run.id for run in load_study(tmp_path).runs if run.finished] == ["whole"]


def test_a_time_beyond_all_bounds_is_left_out_of_the_sum(tmp_path, oelm):
    folder = make_run(tmp_path, "one")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 20, "loss": 1.0, "seconds": 1e999}\n')
    assert "one" in oelm("status", tmp_path).out
