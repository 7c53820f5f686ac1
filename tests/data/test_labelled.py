import csv
import json

import numpy as np
import pytest

from oelm.data.examples import Labelling
from oelm.data.labelled import BucketOrder, open_labelled
from oelm.data.prepare import prepare
from oelm.data.tokenizer import ByteTokenizer, EncoderTokenizer, Template
from oelm.errors import UserError
from tests.small_encoder import LABELS, make_rows, write_rows


def prepared(tmp_path, rows, labels=LABELS, name="rows.jsonl", **options):
    source = write_rows(tmp_path / name, rows)
    return prepare(
        "x", [], "bytes", tmp_path / "out", labelling=Labelling(labels), placed={"train": [source]}, **options
    )


def texts(folder, split):
    data = open_labelled("", str(folder))
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


def test_rows_of_no_use_are_left_out_and_counted(tmp_path):
    rows = make_rows(90)
    rows[3]["premise"], rows[7]["label"], rows[9]["hypothesis"] = "  ", "-", ""
    source = write_rows(tmp_path / "a.jsonl", rows)
    with open(source, "ab") as file:
        file.write(b'{"premise": "caf\xe9", "hypothesis": "x", "label": "odd"}\n')  # Latin-1
        file.write(b"not json\n[1]\n")
        file.write(json.dumps({"premise": "a", "label": "odd"}).encode() + b"\n")
    meta = prepare("x", [], "bytes", tmp_path / "out", labelling=Labelling(LABELS), placed={"train": [source]})
    assert meta["left_out"] == {
        "with an empty text": 2, "with an unknown label": 1, "not in UTF-8": 1, "not a JSON object": 2,
        "without all columns": 1,
    }  # fmt: skip
    assert sum(meta["splits"][split]["documents"] for split in ("train", "val", "test")) == 87


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


def test_a_pair_is_put_together_as_bert_expects_it():
    template = Template([2], [3], [3], pad=0, types=True)
    tokens, kinds = template.join([np.array([10, 11]), np.array([20])], 16)
    assert tokens.tolist() == [2, 10, 11, 3, 20, 3]
    assert kinds.tolist() == [0, 0, 0, 0, 1, 1]
    tokens, kinds = template.join([np.array([10, 11])], 16)
    assert tokens.tolist() == [2, 10, 11, 3]
    assert not kinds.any()


@pytest.mark.parametrize(
    ("sizes", "kept"), [((10_000, 3), (10, 3)), ((3, 10_000), (3, 10)), ((50, 50), (6, 7)), ((13, 0), (13, 0))]
)
def test_what_is_too_long_loses_its_end_the_longer_text_first(sizes, kept):
    template = Template([2], [3], [3], pad=0)
    first, second = np.arange(100, 100 + sizes[0]), np.arange(50_000, 50_000 + sizes[1])
    tokens, _ = template.join([first, second], 16)
    assert len(tokens) == 16
    assert (((tokens >= 100) & (tokens < 50_000)).sum(), (tokens >= 50_000).sum()) == kept
    assert tokens[[0, -1]].tolist() == [2, 3]


def test_the_template_is_read_off_the_tokenizer_itself():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    template = EncoderTokenizer(tokenizer.to_str()).template()
    assert template == Template([0], [2, 2], [2], pad=1, types=False)
    ids, _ = template.join([np.array([4]), np.array([5])], 16)
    assert ids.tolist() == tokenizer.encode("a", "b").ids


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
    with pytest.raises(UserError, match="is damaged: run oelm prepare again"):
        open_labelled("", str(tmp_path / "out"))
