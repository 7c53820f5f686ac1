"""A file's documents: text with end marks, WikiText, paragraphs, JSONL, Parquet, or whole files.

A file is cut into pieces, byte ranges, that workers read on their own; a document belongs to the
piece in which it starts, so the pieces in order give every document once and in order.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oelm.data.tokenizer import END_OF_TEXT
from oelm.errors import UserError

PIECE_BYTES = 4 << 20
MAX_DOCUMENT_BYTES = 64 << 20
PLAIN_BLOCK_BYTES = 16 << 10
LOOK_AHEAD = 1 << 20
FORMATS = {".txt": "text", ".text": "text", ".raw": "text", ".tokens": "text", ".jsonl": "jsonl", ".ndjson": "jsonl",
            ".json": "jsonl", ".parquet": "parquet", ".csv": "csv", ".tsv": "tsv"}  # fmt: skip
WHOLE_FILES = {".py", ".md", ".rst", ".c", ".h", ".tex"}


@dataclass(frozen=True)
class SourceFile:
    path: Path
    split: str
    """train, val or test, from the file's name; a corpus without val or test has them drawn from train."""
    format: str


@dataclass(frozen=True)
class Piece:
    file: SourceFile
    start: int
    stop: int
    """Bytes; for Parquet, row groups."""


def format_of(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix in WHOLE_FILES:
        return "file"
    known = FORMATS.get(suffix, "text")
    if known != "text":
        return known
    with open(path, "rb") as file:
        head = file.read(LOOK_AHEAD)
    if head.startswith(b"\x1f\x8b"):
        raise UserError(f"{path} is compressed: unpack it (gunzip)")
    for kind in ("marked", "wikitext"):
        if BOUNDARIES[kind].search(b"\n" + head):
            return kind
    return "plain"


def cut(file: SourceFile) -> list[Piece]:
    """Pieces of a file, small enough to hold in memory."""
    if file.format == "parquet":
        return [Piece(file, group, group + 1) for group in range(_open_parquet(file.path).num_row_groups)]
    if file.format == "file":
        return [Piece(file, 0, file.path.stat().st_size)]
    size = file.path.stat().st_size
    return [Piece(file, start, min(start + PIECE_BYTES, size)) for start in range(0, size, PIECE_BYTES)]


def documents(piece: Piece) -> Iterator[str]:
    """The documents that start in `piece`, stripped of surrounding white space; empty ones included."""
    file = piece.file
    if file.format == "parquet":
        yield from _parquet_documents(piece)
        return
    if file.format == "file":
        raw = file.path.read_bytes()
        if len(raw) > MAX_DOCUMENT_BYTES:
            raise UserError(f"{file.path} is one document of over {MAX_DOCUMENT_BYTES >> 20} MiB: split it")
        yield _decode(raw, file.path, 0)
        return
    for start, raw in _spans(piece, BOUNDARIES[file.format]):
        if file.format == "jsonl":
            if raw.strip():
                yield _json_text(raw, file.path, start)
        else:
            yield _decode(raw, file.path, start)


# A boundary's match ends where a document starts; the document before it stops where the match starts.
BOUNDARIES: dict[str, re.Pattern[bytes]] = {
    "marked": re.compile(re.escape(END_OF_TEXT.encode())),
    "wikitext": re.compile(rb"(?<=\n)(?= = [^=\n][^\n]* = ?\r?\n[ \r]*\n)"),
    "jsonl": re.compile(rb"\n"),
    "plain": re.compile(rb"(?:(?<=\n\n)|(?<=\n\r\n)|(?<=\n \n))(?=\S)"),
}
_LONGEST_BOUNDARY = 16


def _spans(piece: Piece, boundary: re.Pattern[bytes]) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of each document that starts in the piece."""
    path, plain = piece.file.path, piece.file.format == "plain"
    base = max(0, piece.start - _LONGEST_BOUNDARY)
    with open(path, "rb") as file:
        file.seek(base)
        # Look ahead a little: a boundary may be recognised only by the line after it.
        buffer = file.read(piece.stop - base + 4096)
        stop = piece.stop - base
        cuts = [(0, 0)] if piece.start == 0 else []
        cuts += [m.span() for m in boundary.finditer(buffer) if piece.start - base <= m.end() < stop and m.end() > 0]
        if not cuts:
            return
        search_from = max(stop - _LONGEST_BOUNDARY, cuts[-1][1])
        while (end := _first_at(boundary, buffer, search_from, stop)) is None:
            more = file.read(LOOK_AHEAD)
            if not more:
                end = len(buffer)
                break
            search_from = max(search_from, len(buffer) - 4096)
            buffer += more
            if len(buffer) - cuts[-1][1] > MAX_DOCUMENT_BYTES:
                where = base + cuts[-1][1]
                raise UserError(f"{path}: the document at byte {where} is over {MAX_DOCUMENT_BYTES >> 20} MiB")
    starts = [start for _, start in cuts]
    stops = [stop for stop, _ in cuts[1:]] + [end]
    block_start = None
    for start, stop in zip(starts, stops, strict=True):
        if plain:  # paragraphs, joined to blocks of a useful size
            block_start = start if block_start is None else block_start
            if stop - block_start < PLAIN_BLOCK_BYTES and stop != end:
                continue
            start, block_start = block_start, None
        yield base + start, buffer[start:stop]


def _first_at(boundary: re.Pattern[bytes], buffer: bytes, search_from: int, stop: int) -> int | None:
    """Where the first document that starts at or after `stop` cuts off the one before it."""
    for match in boundary.finditer(buffer, search_from):
        if match.end() >= stop and match.end() < len(buffer):
            return match.start()
    return None


def _decode(raw: bytes, path: Path, offset: int) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {offset + error.start} is not valid UTF-8: convert the file "
            "(for example: iconv -t utf-8) or leave it out"
        ) from None
    return _tidy(text.removeprefix("\ufeff"))


def _tidy(text: str) -> str:
    """A document as it is compared and tokenised, whatever ends its lines."""
    return text.replace("\r\n", "\n").strip()


def _json_text(raw: bytes, path: Path, offset: int) -> str:
    try:
        text = json.loads(raw)["text"]
        if not isinstance(text, str):
            raise TypeError
        text.encode()  # lone surrogates are valid JSON and no text
    except (ValueError, KeyError, TypeError, RecursionError):
        with open(path, "rb") as file:
            line = file.read(offset).count(b"\n") + 1
        raise UserError(
            f'{path}, line {line}: expected an object {{"text": "…"}} in UTF-8 (labelled rows: --labelled)'
        ) from None
    return _tidy(text)


def _open_parquet(path: Path):  # type: ignore[no-untyped-def]  # pyarrow is an extra
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"reading {path.name} needs pyarrow: make hf (or pip install 'oelm[hf]')") from None
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:
        raise UserError(f"{path} is not a readable Parquet file: {error}") from None
    return file


def parquet_rows(path: Path, **options: Any) -> Iterator[dict[str, Any]]:
    batches = _open_parquet(path).iter_batches(batch_size=1024, **options)
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:
            raise UserError(f"{path} is damaged: {error}") from None
        if batch is None:
            return
        yield from batch.to_pylist()


def _parquet_documents(piece: Piece) -> Iterator[str]:
    path, schema = piece.file.path, _open_parquet(piece.file.path).schema_arrow
    if "text" not in schema.names:
        raise UserError(f"{path} has no column text, only: {', '.join(schema.names)}")
    kind = str(schema.field("text").type)
    if "string" not in kind:
        raise UserError(f"{path}: its column text holds {kind}, not text")
    for row in parquet_rows(path, row_groups=list(range(piece.start, piece.stop)), columns=["text"]):
        yield _tidy(row["text"] or "")


def hash_texts(texts: list[bytes]) -> np.ndarray:
    """64-bit content hashes: they decide the split of a document and find it again in another."""
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype="<u8")
