import json

import numpy as np
import pytest

from oelm.train.metrics import Metrics, cut_to, macro_f1, read


def write(path, steps, val=()):
    metrics = Metrics(path)
    for step in steps:
        metrics.write("train", step, loss=1.0 / step)
        if step in val:
            metrics.write("val", step, loss=2.0)
    metrics.close()


def test_a_resume_cuts_back_to_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 11), val=(5, 10))
    cut_to(path, 5, evaluated=True)
    assert [(r["kind"], r["step"]) for r in read(path)][-2:] == [("train", 5), ("val", 5)]


def test_an_evaluation_that_was_not_completed_is_cut_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6), val=(5,))
    cut_to(path, 5, evaluated=False)
    assert [r["kind"] for r in read(path)] == ["train"] * 5


def test_a_line_cut_off_in_the_middle_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    with open(path, "a") as file:
        file.write('{"kind": "train", "step": 4, "lo')
    assert [r["step"] for r in read(path)] == [1, 2, 3]
    cut_to(path, 4, evaluated=True)
    assert path.read_text().endswith("}\n")
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_tensorboard_reads_what_was_written(tmp_path):
    import pytest

    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(tmp_path / "metrics.jsonl", range(1, 31), val=(20,))
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in events.Scalars("val/loss")] == [20]
    assert [e.step for e in events.Scalars("train/loss")] == [10, 20, 30]


def test_macro_f1_by_hand():
    # Class 0: 2 of 3 found and 1 false, F1 = 4/6. Class 1: 1 of 2 and 1 false, 2/4. Class 2: 1 of 1 and none, 1.
    labels, answers = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 0, 2])
    assert macro_f1(labels, answers, 3) == pytest.approx((4 / 6 + 2 / 4 + 1) / 3)
    assert macro_f1(labels, answers, 4) == pytest.approx((4 / 6 + 2 / 4 + 1) / 4)  # a fourth, never met
