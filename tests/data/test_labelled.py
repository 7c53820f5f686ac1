import csv
import json

import numpy as np
import pytest

from oelm.data.examples import Labelling
from oelm.data.labelled import BucketOrder, open_labelled
from oelm.data.prepare import prepare
from oelm.data.tokenizer import ByteTokenizer
from oelm.data.tokens import open_data
from oelm.errors import UserError
from tests.small_encoder import LABELS, make_rows, prepared, write_rows


def texts(folder, split):
    data = open_labelled(open_data("", str(folder)))
    tokenizer, found = ByteTokenizer(), []
    for start, middle, end, label in data.rows[split]:
        tokens = data.splits[split]
        pair = tokenizer.decode(tokens[start:middle].tolist()), tokenizer.decode(tokens[middle:end].tolist())
        found.append((*pair, LABELS[label]))
    return found


def test_every_row_is_kept_once_with_its_label_whatever_the_format(tmp_path):
    rows = make_rows(60)
    wanted = sorted(tuple(row.values()) for row in rows)
    for kind in ("jsonl", "csv", "tsv"):
        path = tmp_path / f"rows.{kind}"
        if kind == "jsonl":
            write_rows(path, rows)
        else:
            with open(path, "w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind == "tsv" else ",")
                writer.writeheader()
                writer.writerows(rows)
        out = tmp_path / kind
        prepare("x", [], "bytes", out, labelling=Labelling(LABELS), placed={"train": [path]})
        assert sorted(text for split in ("train", "val", "test") for text in texts(out, split)) == wanted


def test_pairs_that_share_their_first_text_stay_in_one_split(tmp_path):
    rows = [{**row, "premise": f"premise {i // 3}"} for i, row in enumerate(make_rows(300))]
    prepared(tmp_path, rows)
    firsts = [{first for first, _, _ in texts(tmp_path / "out", split)} for split in ("train", "val", "test")]
    assert sum(map(len, firsts)) == 100
    assert all(firsts)


def test_training_rows_that_stand_in_the_test_file_are_dropped(tmp_path):
    rows = make_rows(90)
    test = write_rows(tmp_path / "judged.jsonl", rows[:10])
    source = write_rows(tmp_path / "pool.jsonl", rows)
    meta = prepare("x", [], "bytes", tmp_path / "out", labelling=Labelling(LABELS),
                   placed={"train": [source], "test": [test]})  # fmt: skip
    assert meta["splits"]["test"]["documents"] == 10
    assert meta["dropped_from_train_or_test"] == 10


def test_an_epoch_shows_every_example_once_in_an_order_of_its_own():
    lengths = np.random.default_rng(0).integers(5, 100, 1_003)
    order = BucketOrder(lengths, 8, seed=1)
    epochs = [np.concatenate([order.examples(e * order.per_epoch + i) for i in range(order.per_epoch)]) for e in (0, 1)]
    for seen in epochs:
        assert len(seen) == len(set(seen.tolist())) == 1_000
    assert (epochs[0] != epochs[1]).any()
    assert (BucketOrder(lengths, 8, seed=1).examples(130) == order.examples(130)).all()
    assert order.epochs(125) == pytest.approx(1_000 / 1_003)


def test_a_batch_has_examples_of_like_length():
    lengths = np.random.default_rng(0).integers(5, 100, 4_000)
    order = BucketOrder(lengths, 16, seed=1)
    padded = sum(16 * lengths[order.examples(step)].max() for step in range(order.per_epoch))
    assert padded < 1.1 * lengths.sum()  # in any order it would be about 1.8 times


def test_numbers_stand_for_classes_only_where_their_order_was_said(tmp_path):
    rows = make_rows(90)
    source = write_rows(tmp_path / "a.jsonl", rows)
    numbered = [{**row, "premise": f"{row['premise']} again", "label": LABELS.index(row["label"])} for row in rows]
    test = write_rows(tmp_path / "b.jsonl", numbered)
    places = {"train": [source], "test": [test]}
    with pytest.raises(UserError, match="the labels of the test rows are 0, 1, 2; the classes are odd, other, same"):
        prepare("x", [], "bytes", tmp_path / "out", labelling=Labelling(), placed=places)
    prepare("x", [], "bytes", tmp_path / "out", labelling=Labelling(LABELS), placed=places)
    assert [label for *_, label in texts(tmp_path / "out", "test")] == [row["label"] for row in rows]


def cut_rows(folder):
    rows = np.load(folder / "val.rows.npy")
    np.save(folder / "val.rows.npy", rows[:-1])


def other_class(folder):
    rows = np.load(folder / "val.rows.npy")
    rows[0, 3] = 7
    np.save(folder / "val.rows.npy", rows)


def not_numpy(folder):
    (folder / "val.rows.npy").write_bytes(b"PK nonsense")


def with_meta(key, value=None):
    def change(folder):
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps({**meta, key: value}))

    return change


@pytest.mark.parametrize(
    "damage",
    [cut_rows, other_class, not_numpy, with_meta("template"), with_meta("labels", ["a", "a", "b"]),
     with_meta("pair", "yes"), with_meta("template", {"start": [], "between": [999], "end": [1], "pad": 0})],
)  # fmt: skip
def test_damaged_data_are_refused(tmp_path, damage):
    prepared(tmp_path, make_rows(90))
    damage(tmp_path / "out")
    with pytest.raises(UserError, match=r"is damaged.*: run oelm prepare again"):
        open_labelled(open_data("", str(tmp_path / "out")))


def test_a_class_of_which_no_row_is_left_to_train_on_is_refused(tmp_path):
    """Of 20 files with one rare row, some have it drawn into the validation or the test split."""
    rows, refused = [{"text": f"text {i}", "label": "common"} for i in range(50)], 0
    for i in range(20):
        (tmp_path / str(i)).mkdir()
        try:
            meta = prepared(tmp_path / str(i), [*rows, {"text": f"rare {i}", "label": "rare"}], ())
        except UserError as error:
            assert "no row of the label rare is left" in str(error)  # noqa: PT017
            refused += 1
        else:
            assert meta["splits"]["train"]["labels"] == [meta["splits"]["train"]["documents"] - 1, 1]
    assert 0 < refused < 20
