import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data import sources
from oelm.data.sources import SourceFile, cut, documents, find_files
from oelm.errors import UserError

WIKI = " \n = First = \n \n Some text . \n \n = = Part = = \n \n More . \n \n = Second title = \n \n x = y = z \n"


def read(path, format):
    return [text for piece in cut(SourceFile(path, "train", format)) for text in documents(piece)]


def test_marked_text_is_cut_at_its_markers(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\nline\n<|endoftext|>\n two \n<|endoftext|>\nthree\n")
    assert find_files("x", [path])[0].format == "marked"
    assert read(path, "marked") == ["one\nline", "two", "three"]


def test_wikitext_is_cut_at_titles_not_at_section_headings_or_formulas(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_text(WIKI)
    assert find_files("x", [path])[0].format == "wikitext"
    assert [text for text in read(path, "wikitext") if text] == [
        "= First = \n \n Some text . \n \n = = Part = = \n \n More .",
        "= Second title = \n \n x = y = z",
    ]


def test_plain_text_is_cut_at_blank_lines_into_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PLAIN_BLOCK_BYTES", 20)
    path = tmp_path / "book.txt"
    path.write_text("first paragraph\n\nsecond one\n\n\nthird paragraph is here\n\nend")
    assert find_files("x", [path])[0].format == "plain"
    assert read(path, "plain") == ["first paragraph\n\nsecond one", "third paragraph is here", "end"]


def test_a_byte_order_mark_is_not_text(tmp_path):
    path = tmp_path / "a.py"
    path.write_bytes(b"\xef\xbb\xbfx = 1\n")
    assert read(path, "file") == ["x = 1"]


@pytest.mark.parametrize("format", ["marked", "jsonl", "wikitext", "plain"])
@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="<=\r\n\u2028\x1c"), max_size=40), max_size=12
    ),
    size=st.integers(1, 90),
)
def test_documents_do_not_depend_on_where_the_pieces_are_cut(tmp_path_factory, format, texts, size):
    """Every document once and in order, whatever the piece size: what makes parallel equal to serial."""
    path = tmp_path_factory.mktemp("pieces") / "file"
    joined = {
        "marked": "\n<|endoftext|>\n".join(texts),
        "jsonl": "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts),
        "wikitext": "".join(f" \n = T{i} = \n \n {t} \n" for i, t in enumerate(texts)),
        "plain": "\n\n".join(texts),
    }[format]
    path.write_bytes(joined.encode())
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(sources, "PLAIN_BLOCK_BYTES", 0)
        patched.setattr(sources, "PIECE_BYTES", 1 << 20)
        whole = read(path, format)
        patched.setattr(sources, "PIECE_BYTES", size)
        patched.setattr(sources, "LOOK_AHEAD", 7)
        assert read(path, format) == whole
    if format in ("marked", "jsonl"):
        expected = [t.strip() for t in texts]
        while format == "marked" and expected and not expected[-1]:
            expected.pop()
        assert [t for t in whole if t] == [t for t in expected if t]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "a"}\n{"txt": "b"}\n', ["line 2", '{"text"']),
        (b'{"text": "a"}\nnot json\n', ["line 2"]),
        (b'{"text": 5}\n', ["line 1"]),
        (b'{"text": "\\ud800"}\n', ["line 1"]),
        (b'{"text": "a"}\n{"text": "\xff"}\n', ["line 2"]),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, content, words):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read(path, "jsonl")
    for word in ("a.jsonl", *words):
        assert word in str(error.value)


def test_undecodable_bytes_are_named_with_their_place(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n<|endoftext|>\nba\xffd\n")
    with pytest.raises(UserError, match=r"a\.txt: byte 21 is not valid UTF-8"):
        read(path, "marked")


def test_a_document_without_end_is_refused_not_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 100)
    monkeypatch.setattr(sources, "LOOK_AHEAD", 100)
    monkeypatch.setattr(sources, "MAX_DOCUMENT_BYTES", 5_000)
    path = tmp_path / "a.txt"
    path.write_text("short\n<|endoftext|>\n" + "x" * 20_000)
    with pytest.raises(UserError, match="over"):
        read(path, "marked")


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
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"text"))
    for place in (tmp_path, tmp_path / "b.txt.gz"):
        with pytest.raises(UserError, match=r"b.txt.gz is compressed: unpack it"):
            find_files("x", [place])


def test_a_parquet_column_that_is_no_text_is_refused(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"text": [1, 2]})
    parquet.write_table(table, tmp_path / "a.parquet")
    (file,) = find_files("x", [tmp_path / "a.parquet"])
    with pytest.raises(UserError, match="its column text holds int64"):
        list(documents(cut(file)[0]))


def test_only_validation_files_is_an_error(tmp_path):
    (tmp_path / "valid.txt").write_text("x")
    with pytest.raises(UserError, match="no training text"):
        find_files("x", [tmp_path / "valid.txt"])


def test_parquet_is_read_by_row_groups(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(
        arrow.table({"text": [f" doc {i} " for i in range(10)], "n": range(10)}), path, row_group_size=3
    )
    assert len(cut(SourceFile(path, "train", "parquet"))) == 4
    assert read(path, "parquet") == [f"doc {i}" for i in range(10)]
    parquet.write_table(arrow.table({"body": ["x"]}), path)
    with pytest.raises(UserError, match="no column text, only: body"):
        read(path, "parquet")
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match="not a readable Parquet"):
        read(path, "parquet")


def test_the_hub_is_read_through_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(repository, configuration):
        asked.append((repository, configuration))
        rows = WIKI.splitlines(keepends=True) if "wikitext" in repository else ["one story", "another"]
        made = datasets.Dataset.from_dict({"text": rows})
        return datasets.DatasetDict({"train": made, "validation": made})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    stories = sources.download("tinystories", tmp_path / "a")
    assert [(f.split, f.format) for f in stories] == [("train", "parquet"), ("val", "parquet")]
    assert read(stories[0].path, "parquet") == ["one story", "another"]
    wiki = sources.download("wikitext103", tmp_path / "b")
    assert wiki[0].path.read_text() == WIKI
    assert wiki[1].format == "wikitext"
    assert asked == [("roneneldan/TinyStories", None), ("Salesforce/wikitext", "wikitext-103-raw-v1")]


def test_splits_whose_labels_the_hub_keeps_to_itself_are_left_out(tmp_path, monkeypatch):
    """As of SST-2's test split and of IMDB's unsupervised one."""
    datasets = pytest.importorskip("datasets")
    splits = {"train": [0, 1], "unsupervised": [-1, -1], "validation": [1, 0], "test": [-1, -1]}
    made = {name: datasets.Dataset.from_dict({"sentence": ["a", "b"], "label": ls}) for name, ls in splits.items()}
    monkeypatch.setattr(datasets, "load_dataset", lambda *hub: datasets.DatasetDict(made))
    assert [file.path.stem for file in sources.download("sst2", tmp_path)] == ["train", "validation"]


def test_a_hub_out_of_reach_is_one_line_with_the_way_out(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def offline(*arguments):
        raise ConnectionError("Couldn't reach the hub\nmore\nlines")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match="--from PATH") as error:
        sources.download("openwebtext", tmp_path)
    assert "\n" not in str(error.value)
