import errno
import json
import shlex
import shutil

import numpy as np
import pytest

from oelm.data import prepare as prepare_module
from oelm.data.prepare import prepare
from oelm.data.sources import find_files
from oelm.data.tokenizer import ByteTokenizer, load_tokenizer
from oelm.errors import UserError
from tests.conftest import make_documents
from tests.small_encoder import make_rows, write_rows


def tokens_of(folder, split, dtype=np.uint16):
    return np.fromfile(folder / f"{split}.bin", dtype=dtype)


def documents_of(folder, split):
    tokens = tokens_of(folder, split)
    ends = np.flatnonzero(tokens == 256)
    return [bytes(part[part != 256].astype(np.uint8)).decode() for part in np.split(tokens, ends + 1) if len(part)]


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_token_files_equal_a_plain_loops(tmp_path):
    """Two workers over many pieces against the obvious three lines."""
    texts = make_documents(400)
    source = write_jsonl(tmp_path / "train.jsonl", texts)
    val = write_jsonl(tmp_path / "val.jsonl", ["held out one", "held out two"])
    test = write_jsonl(tmp_path / "test.jsonl", ["a test"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oelm.data.documents.PIECE_BYTES", 3_000)
        meta = prepare("x", [source, val, test], "bytes", tmp_path / "out", workers=2)
    for split, expected in (("train", texts), ("val", ["held out one", "held out two"]), ("test", ["a test"])):
        loop = [i for text in expected for i in [*text.encode(), 256]]
        assert tokens_of(tmp_path / "out", split).tolist() == loop
        counts = meta["splits"][split]
        assert counts == {
            "documents": len(expected), "tokens": len(loop), "bytes": sum(len(t.encode()) for t in expected),
        }  # fmt: skip
    assert json.loads((tmp_path / "out/meta.json").read_text()) == meta
    assert (meta["tokenizer_hash"], meta["dtype"], meta["vocab_size"]) == (ByteTokenizer.hash, "uint16", 257)


def test_no_document_stands_in_two_splits_and_train_keeps_its_own_duplicates(tmp_path):
    shared_with_val, shared_with_test, twice = "in val too", "in test too", "twice in train"
    train = [shared_with_val, "only train", twice, shared_with_test, twice]
    files = [
        write_jsonl(tmp_path / "train.jsonl", train),
        write_jsonl(tmp_path / "valid.jsonl", [shared_with_val, "val", "in val and test"]),
        write_jsonl(tmp_path / "test.jsonl", [shared_with_test, "test", "in val and test"]),
    ]
    meta = prepare("x", files, "bytes", tmp_path / "out")
    assert documents_of(tmp_path / "out", "train") == ["only train", twice, twice]
    assert documents_of(tmp_path / "out", "val") == [shared_with_val, "val", "in val and test"]
    assert documents_of(tmp_path / "out", "test") == [shared_with_test, "test"]
    assert meta["dropped_from_train_or_test"] == 3


def test_missing_splits_are_drawn_by_content_so_copies_stay_together(tmp_path):
    texts = make_documents(500)
    prepare("x", [write_jsonl(tmp_path / "a.jsonl", texts + texts)], "bytes", tmp_path / "out", held_out=0.1)
    parts = {split: documents_of(tmp_path / "out", split) for split in ("train", "val", "test")}
    assert sum(map(len, parts.values())) == 1000
    assert 30 < len(set(parts["val"])) < 75
    assert 30 < len(set(parts["test"])) < 75
    for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
        assert not set(parts[one]) & set(parts[other])
    assert all(parts["val"].count(text) == 2 for text in parts["val"])


def test_the_bpe_is_trained_on_the_train_split_alone(tmp_path):
    """Words that only the validation text has never become tokens."""
    files = [
        write_jsonl(tmp_path / "train.jsonl", make_documents(200)),
        write_jsonl(tmp_path / "valid.jsonl", ["qqvvjj " * 5000]),
        write_jsonl(tmp_path / "test.jsonl", ["kkzzxx " * 5000]),
    ]
    prepare("x", files, "bpe:300", tmp_path / "out")
    tokenizer = load_tokenizer("bpe:300", tmp_path / "out")
    assert len(tokenizer.encode("qqvvjj")) == len("qqvvjj")
    assert len(tokenizer.encode(" kkzzxx")) == len(" kkzzxx")
    assert len(tokenizer.encode(" tree")) < len(" tree")


def test_the_bpe_is_trained_on_train_wherever_it_stands_among_the_files(tmp_path):
    """Files as large as each other, train not the first: a sample of every third would be of the test split alone."""
    texts = make_documents(360)
    for i, split in enumerate(("test", "train", "valid")):
        write_jsonl(tmp_path / f"{split}.jsonl", texts[i::3])
    prepare("x", [tmp_path / f"{split}.jsonl" for split in ("test", "train", "valid")], "bpe:300", tmp_path / "one")
    prepare("x", [tmp_path / f"{split}.jsonl" for split in ("train", "test", "valid")], "bpe:300", tmp_path / "two")
    assert len({(tmp_path / name / "tokenizer.json").read_bytes() for name in ("one", "two")}) == 1


def test_line_ends_hide_no_document_that_stands_in_two_splits(tmp_path):
    texts = [f"one {i}\ntwo {i}" for i in range(40)]
    train = "<|endoftext|>".join([*texts, "only\nhere"]).replace("\n", "\r\n")
    (tmp_path / "train.txt").write_bytes(train.encode())
    (tmp_path / "valid.txt").write_text("<|endoftext|>".join(texts[:20]))
    meta = prepare("x", [tmp_path / "train.txt", tmp_path / "valid.txt"], "bytes", tmp_path / "out")
    assert meta["dropped_from_train_or_test"] == 20
    assert not any("\r" in text for text in documents_of(tmp_path / "out", "train"))


def test_a_split_whose_file_is_blank_is_said_by_its_name(tmp_path):
    train, val = write_jsonl(tmp_path / "train.jsonl", make_documents(90)), tmp_path / "valid.txt"
    val.write_text(" \n \n")
    with pytest.raises(UserError, match=r"val split of x is empty: .*valid.txt holds no text"):
        prepare("x", [train, val], "bytes", tmp_path / "out")


def test_tokens_of_another_encoder_are_not_replaced_unasked(tmp_path, encoder):
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(90))
    other = shutil.copytree(encoder, tmp_path / "other")
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocabulary["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    prepare("x", [], str(encoder), tmp_path / "out", placed={"train": [rows]})
    prepare("x", [], str(encoder), tmp_path / "out", placed={"train": [rows]})
    with pytest.raises(UserError, match="tokens of another encoder"):
        prepare("x", [], str(other), tmp_path / "out", placed={"train": [rows]})


def test_large_vocabularies_are_stored_as_uint32(tmp_path, monkeypatch):
    class Wide(ByteTokenizer):
        vocab_size, end_of_text = 70_000, 69_999

    monkeypatch.setattr(prepare_module, "load_tokenizer", lambda spec, folder: Wide())
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(100))
    meta = prepare("x", [source], "bytes", tmp_path / "out", workers=1, held_out=0.2)
    assert meta["dtype"] == "uint32"
    assert tokens_of(tmp_path / "out", "train", np.uint32).max() == 69_999


def test_a_full_disk_leaves_the_old_data_and_no_litter(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(100))
    out = tmp_path / "data/out"
    prepare("x", [source], "bytes", out, workers=1, held_out=0.2)
    before = (out / "train.bin").read_bytes()

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare_module, "fsync_file", full)
    with pytest.raises(UserError, match="disk full while preparing x"):
        prepare("x", [source], "bytes", out, workers=1, held_out=0.2)
    assert (out / "train.bin").read_bytes() == before
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_an_undecodable_file_leaves_nothing_behind(tmp_path, oelm):
    (tmp_path / "bad.txt").write_bytes(b"good\n<|endoftext|>\nb\xffad")
    result = oelm("prepare", "bad", "--from", tmp_path / "bad.txt", "--tokenizer", "bytes", "--out", tmp_path / "d/bad")
    assert (result.code, "byte 20" in result.err) == (2, True)
    assert not (tmp_path / "d").exists()


def test_it_says_what_makes_the_same_data_again_without_telling_where_the_files_lay(tmp_path, oelm, monkeypatch):
    source = write_jsonl(tmp_path / "train.jsonl", make_documents(200))
    val = write_jsonl(tmp_path / "my valid.jsonl", make_documents(20, seed=1))
    command = prepare("x", [source, val], "bpe:300", tmp_path / "one", held_out=0.1)["command"]
    expected = "oelm prepare x --from train.jsonl 'my valid.jsonl' --tokenizer bpe:300 --held_out 0.1 --out data/one"
    assert command == expected
    monkeypatch.chdir(tmp_path)
    assert oelm(*shlex.split(command)[1:]).code == 0
    assert tokens_of(tmp_path / "one", "train").tolist() == tokens_of(tmp_path / "data/one", "train").tolist()


def test_foreign_files_and_other_tokenizers_are_never_replaced(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(100))
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        prepare("x", [source], "bytes", tmp_path / "home", force=True)
    prepare("x", [source], "bytes", tmp_path / "out", workers=1, held_out=0.2)
    with pytest.raises(UserError, match="holds bytes tokens"):
        prepare("x", [source], "bpe:300", tmp_path / "out", workers=1, held_out=0.2)
    assert prepare("x", [source], "bpe:300", tmp_path / "out", workers=1, held_out=0.2, force=True)


def test_too_few_documents_to_split_is_said(tmp_path):
    with pytest.raises(UserError, match=r"1 document\(s\) are too few"):
        prepare("x", [write_jsonl(tmp_path / "a.jsonl", ["alone"])], "bytes", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_empty_files_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match="is empty"):
        prepare("x", [tmp_path / "a.txt"], "bytes", tmp_path / "out")


def test_the_standard_library_is_always_there():
    files = find_files("python-stdlib", [])
    assert len(files) > 100
    assert "argparse.py" in {file.path.name for file in files}


def test_real_corpora_are_cut_into_their_documents(shared, tmp_path, monkeypatch):
    """Counts from the corpora's own descriptions: 10,763 + 500 stories, 900 pages, 600 + 60 + 60 articles."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "tiktoken_cache"))
    stories = prepare("tinystories", [shared / "data/tinystories"], None, tmp_path / "stories")
    counts = {split: part["documents"] for split, part in stories["splits"].items()}
    assert counts["val"] == 500
    assert counts["train"] + counts["test"] + stories["dropped_from_train_or_test"] == 10_763
    assert 2.2e6 < sum(part["tokens"] for part in stories["splits"].values()) < 2.5e6
    wiki = prepare("wikitext2", [shared / "data/wikitext2"], None, tmp_path / "wiki")
    assert [wiki["splits"][split]["documents"] for split in ("train", "val", "test")] == [600, 60, 60]
    pages = prepare("openwebtext", [shared / "data/openwebtext"], None, tmp_path / "pages")
    assert sum(part["documents"] for part in pages["splits"].values()) == 900
