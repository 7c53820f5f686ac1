import json

import pytest

from tests.small_encoder import make_rows, write_rows


def test_predict_says_what_the_run_would(oelm, classify, tmp_path):
    classify("--num_epochs", 12, "--dropout", 0)
    result = oelm("predict", tmp_path / "run", "--premise", "a cat sat", "--hypothesis", "not a cat sat", "--json")
    told = first = json.loads(result.out)
    assert told["answer"] == "other"
    assert sum(value for key, value in told.items() if key.startswith("p_")) == pytest.approx(1, abs=1e-4)
    rows = write_rows(tmp_path / "new.jsonl", [*make_rows(9, seed=5), {"premise": " ", "hypothesis": "x"}])
    result = oelm("predict", tmp_path / "run", "--from", rows)
    told = [json.loads(line) for line in result.out.splitlines()]
    assert [row["answer"] for row in told] == [row["label"] for row in make_rows(9, seed=5)]
    assert "left out: 1 with an empty text" in result.err
    rows = write_rows(tmp_path / "first.jsonl", [{"premise": "alone"}, *make_rows(2, seed=5)])
    result = oelm("predict", tmp_path / "run", "--from", rows, "--columns", "premise,hypothesis")
    assert (result.code, len(result.out.splitlines())) == (0, 2)
    (tmp_path / "odd.csv").write_text("premise,hypothesis\na cat sat,a cat sat\na cat, a dog,a cat sat\n")
    result = oelm("predict", tmp_path / "run", "--from", tmp_path / "odd.csv")
    assert (len(result.out.splitlines()), "left out: 1 with too many columns" in result.err) == (1, True)
    long = " ".join(["cat"] * 10_000)
    result = oelm("predict", tmp_path / "run", "--premise", long, "--hypothesis", "not a cat", "--json")
    assert "1 text was longer than" in result.err
    spaced = oelm("predict", tmp_path / "run", "--premise", "  a cat sat ", "--hypothesis", "not a cat sat", "--json")
    assert json.loads(spaced.out) == first
    write_rows(tmp_path / "gold.jsonl", [{"premise": "a", "hypothesis": "b", "answer": "same"}])
    result = oelm("predict", tmp_path / "run", "--from", tmp_path / "gold.jsonl")
    assert (result.code, "has a column answer" in result.err) == (2, True)
    assert "give --premise" in oelm("predict", tmp_path / "run").err
    assert "trained on pairs of texts" in oelm("predict", tmp_path / "run", "--text", "a cat").err
    assert "the text is empty" in oelm("predict", tmp_path / "run", "--premise", "a", "--hypothesis", " ").err
    assert "is a classifier" in oelm("generate", tmp_path / "run").err
