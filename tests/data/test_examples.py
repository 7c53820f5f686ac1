"""Rows of labelled files: what is read, what is left out, what is refused."""

import json

import pytest

from oelm.data.examples import Labelling
from oelm.data.prepare import prepare
from oelm.errors import UserError
from tests.small_encoder import LABELS, make_rows, prepared, write_rows


def test_rows_of_no_use_are_left_out_and_counted(tmp_path):
    rows = make_rows(90)
    rows[3]["premise"], rows[7]["label"], rows[9]["hypothesis"] = "  ", "none", ""
    rows[11]["label"] = "-"  # as in SNLI, where annotators did not agree
    source = write_rows(tmp_path / "a.jsonl", rows)
    with open(source, "ab") as file:
        file.write(b'{"premise": "caf\xe9", "hypothesis": "x", "label": "odd"}\n')  # Latin-1
        file.write(b"not json\n[1]\n")
        file.write(json.dumps({"premise": "a", "label": "odd"}).encode() + b"\n")
    meta = prepare("x", [], "bytes", tmp_path / "out", labelling=Labelling(LABELS), placed={"train": [source]})
    assert meta["left_out"] == {
        "with an empty text": 2, "with an unknown label": 1, "not in UTF-8": 1, "not a JSON object": 2,
        "without all columns": 1, "without a label": 1,
    }  # fmt: skip
    assert sum(meta["splits"][split]["documents"] for split in ("train", "val", "test")) == 86


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: {"a": "x", "b": "y"}, "has the columns a, b; expected premise and hypothesis"),
        (lambda row: {**row, "label": f"class {row['label']}"}, "the labels of the train rows are class"),
        (lambda row: {**row, "premise": ""}, "0 usable rows; left out: 90 with an empty text"),
        (lambda row: {**row, "label": "same"}, "no training row has the label other"),
    ],
)
def test_a_file_of_no_use_is_refused_in_one_line(tmp_path, change, message):
    with pytest.raises(UserError, match=message) as error:
        prepared(tmp_path, [change(row) for row in make_rows(90)])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_labels_may_be_numbers_and_need_not_be_named(tmp_path):
    rows = [{"text": row["hypothesis"], "label": i % 3} for i, row in enumerate(make_rows(90))]
    meta = prepared(tmp_path, rows, labels=())
    assert meta["labels"] == ["0", "1", "2"]
    assert sum(meta["splits"]["train"]["labels"]) == meta["splits"]["train"]["documents"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('text,label\n"never closed,a\nx,b\ny,a\n', "unexpected end of data"),
        ("text,label,text\nx,a,y\n", "two columns of one name"),
        ("text,label\n", "0 usable rows; left out: none, it is empty"),
    ],
)
def test_a_csv_file_that_could_be_misread_is_refused(tmp_path, text, message):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        prepare("x", [], "bytes", tmp_path / "out", labelling=Labelling(), placed={"train": [path]})


def test_a_row_with_a_comma_too_many_is_left_out(tmp_path):
    lines = [f"{row['hypothesis']},{row['label']}" for row in make_rows(60)]
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "\n".join([*lines, "first, second,odd"]) + "\n")
    meta = prepare("x", [], "bytes", tmp_path / "out", labelling=Labelling(), placed={"train": [path]})
    assert meta["left_out"] == {"with too many columns": 1}


@pytest.mark.parametrize("value", [float("nan"), None, [1], {"a": 1}, ""])
def test_what_is_no_label_is_none(tmp_path, value):
    rows = [*make_rows(60), {"premise": "a", "hypothesis": "b", "label": value}]
    assert prepared(tmp_path, rows, labels=())["left_out"] == {"without a label": 1}


def test_one_and_one_point_zero_are_the_same_label(tmp_path):
    rows = [{"text": row["hypothesis"], "label": (1, 1.0, True, 0)[i % 4]} for i, row in enumerate(make_rows(80))]
    assert prepared(tmp_path, rows, labels=())["labels"] == ["0", "1"]


@pytest.mark.parametrize("columns", [("label",), ("a", "b", "c", "label"), ("premise", "premise", "label")])
def test_columns_are_one_text_or_two_and_a_label(tmp_path, columns):
    source = write_rows(tmp_path / "a.jsonl", make_rows(60))
    with pytest.raises(UserError, match="name one text or two, then the label"):
        prepare("x", [], "bytes", tmp_path / "out", labelling=Labelling((), columns), placed={"train": [source]})
