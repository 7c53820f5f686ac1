import gzip

import pytest

from oelm.data.documents import cut, documents
from oelm.data.sources import download, find_files
from oelm.errors import UserError
from tests.data.test_documents import WIKI


def test_splits_follow_words_in_names_below_the_given_folder(tmp_path):
    root = tmp_path / "test" / "corpus"
    for name in ("train.txt", "my_valid.txt", "TEST/part-1.jsonl", "contest.txt", "notes/a.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text('{"text": "x"}')
    found = {str(f.path.relative_to(root)): f.split for f in find_files("x", [root])}
    assert found == {
        "train.txt": "train", "my_valid.txt": "val", "TEST/part-1.jsonl": "test", "contest.txt": "train",
        "notes/a.md": "train",
    }  # fmt: skip


def test_source_files_are_split_by_folders_and_not_by_what_they_are_called(tmp_path):
    for name in ("app/test_x.py", "app/validation.py", "app/dev/tool.py", "app/main.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    assert {file.split for file in find_files("x", [tmp_path / "app"])} == {"train"}
    for name in ("docs/train/a.md", "docs/test/b.md"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("text\n")
    assert [file.split for file in find_files("x", [tmp_path / "docs"])] == ["test", "train"]


def test_compressed_files_are_neither_read_as_text_nor_left_out_unsaid(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "old.txt.gz").write_bytes(b"hidden")
    assert [file.path.name for file in find_files("x", [tmp_path])] == ["a.txt"]
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"text"))
    for place in (tmp_path, tmp_path / "b.txt.gz"):
        with pytest.raises(UserError, match=r"b.txt.gz is compressed: unpack it"):
            find_files("x", [place])


def test_only_validation_files_is_an_error(tmp_path):
    (tmp_path / "valid.txt").write_text("x")
    with pytest.raises(UserError, match="no training text"):
        find_files("x", [tmp_path / "valid.txt"])


def test_the_hub_is_read_through_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(repository, configuration):
        asked.append((repository, configuration))
        rows = WIKI.splitlines(keepends=True) if "wikitext" in repository else ["one story", "another"]
        made = datasets.Dataset.from_dict({"text": rows})
        return datasets.DatasetDict({"train": made, "validation": made})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    stories = download("tinystories", tmp_path / "a")
    assert [(f.split, f.format) for f in stories] == [("train", "parquet"), ("val", "parquet")]
    assert list(documents(cut(stories[0])[0])) == ["one story", "another"]
    wiki = download("wikitext103", tmp_path / "b")
    assert wiki[0].path.read_text() == WIKI
    assert wiki[1].format == "wikitext"
    assert asked == [("roneneldan/TinyStories", None), ("Salesforce/wikitext", "wikitext-103-raw-v1")]


def test_splits_whose_labels_the_hub_keeps_to_itself_are_left_out(tmp_path, monkeypatch):
    """As of SST-2's test split and of IMDB's unsupervised one."""
    datasets = pytest.importorskip("datasets")
    splits = {"train": [0, 1], "unsupervised": [-1, -1], "validation": [1, 0], "test": [-1, -1]}
    made = {name: datasets.Dataset.from_dict({"sentence": ["a", "b"], "label": ls}) for name, ls in splits.items()}
    monkeypatch.setattr(datasets, "load_dataset", lambda *hub: datasets.DatasetDict(made))
    assert [file.path.stem for file in download("sst2", tmp_path)] == ["train", "validation"]


def test_a_hub_out_of_reach_is_one_line_with_the_way_out(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def offline(*arguments):
        raise ConnectionError("Couldn't reach the hub\nmore\nlines")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match="--from PATH") as error:
        download("openwebtext", tmp_path)
    assert "\n" not in str(error.value)
