import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data import documents as module
from oelm.data.documents import SourceFile, cut, documents, format_of
from oelm.errors import UserError

WIKI = " \n = First = \n \n Some text . \n \n = = Part = = \n \n More . \n \n = Second title = \n \n x = y = z \n"


def read(path, format):
    return [text for piece in cut(SourceFile(path, "train", format)) for text in documents(piece)]


def test_marked_text_is_cut_at_its_markers(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\nline\n<|endoftext|>\n two \n<|endoftext|>\nthree\n")
    assert format_of(path) == "marked"
    assert read(path, "marked") == ["one\nline", "two", "three"]


def test_wikitext_is_cut_at_titles_not_at_section_headings_or_formulas(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_text(WIKI)
    assert format_of(path) == "wikitext"
    assert [text for text in read(path, "wikitext") if text] == [
        "= First = \n \n Some text . \n \n = = Part = = \n \n More .",
        "= Second title = \n \n x = y = z",
    ]


def test_plain_text_is_cut_at_blank_lines_into_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PLAIN_BLOCK_BYTES", 20)
    path = tmp_path / "book.txt"
    path.write_text("first paragraph\n\nsecond one\n\n\nthird paragraph is here\n\nend")
    assert format_of(path) == "plain"
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
        patched.setattr(module, "PLAIN_BLOCK_BYTES", 0)
        patched.setattr(module, "PIECE_BYTES", 1 << 20)
        whole = read(path, format)
        patched.setattr(module, "PIECE_BYTES", size)
        patched.setattr(module, "LOOK_AHEAD", 7)
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
    monkeypatch.setattr(module, "PIECE_BYTES", 100)
    monkeypatch.setattr(module, "LOOK_AHEAD", 100)
    monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 5_000)
    path = tmp_path / "a.txt"
    path.write_text("short\n<|endoftext|>\n" + "x" * 20_000)
    with pytest.raises(UserError, match="over"):
        read(path, "marked")


def test_a_parquet_column_that_is_no_text_is_refused(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"text": [1, 2]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="its column text holds int64"):
        read(tmp_path / "a.parquet", "parquet")


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
