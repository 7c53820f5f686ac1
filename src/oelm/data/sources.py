"""Where documents come from: named corpora, and files of text, WikiText, JSONL or Parquet.

A corpus is cut into pieces, byte ranges of a file, that workers read on their own; a document belongs
to the piece in which it starts, so the pieces in order give every document once and in order.
"""

import hashlib
import json
import os
import re
import shlex
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oelm.data.tokenizer import END_OF_TEXT
from oelm.data.tokens import SPLITS
from oelm.errors import UserError, nearest

PIECE_BYTES = 4 << 20
MAX_DOCUMENT_BYTES = 64 << 20
PLAIN_BLOCK_BYTES = 16 << 10
LOOK_AHEAD = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """A corpus known by name."""

    about: str
    hub: tuple[str, str | None] | None = None
    """Data set and configuration on the Hugging Face hub."""
    lines: bool = False
    """The hub's rows are lines of one long text, not documents."""
    tokenizer: str = "gpt2"
    """Default tokenizer."""
    labels: tuple[str, ...] = ()
    """Classes, in the order of their numbers, of a set of labelled sentences or pairs."""
    columns: tuple[str, ...] = ()
    """The hub's columns of the texts, and the label's."""


NLI = ("entailment", "neutral", "contradiction")
CORPORA: dict[str, Corpus] = {
    "tinystories": Corpus("short synthetic stories", ("roneneldan/TinyStories", None)),
    "openwebtext": Corpus("web pages linked from Reddit", ("Skylion007/openwebtext", None)),
    "wikitext103": Corpus("Wikipedia articles", ("Salesforce/wikitext", "wikitext-103-raw-v1"), lines=True),
    "wikitext2": Corpus("Wikipedia, the small set", ("Salesforce/wikitext", "wikitext-2-raw-v1"), lines=True),
    "python-stdlib": Corpus("the running Python's standard library", tokenizer="bpe:1024"),
    "xnli": Corpus("natural-language inference, English (trained on MNLI's pairs)", ("facebook/xnli", "en"),
                   labels=NLI, columns=("premise", "hypothesis", "label")),
    "mnli": Corpus("natural-language inference", ("nyu-mll/glue", "mnli"), labels=NLI,
                   columns=("premise", "hypothesis", "label")),
    "sst2": Corpus("sentiment of film reviews' sentences", ("nyu-mll/glue", "sst2"),
                   labels=("negative", "positive"), columns=("sentence", "label")),
    "imdb": Corpus("sentiment of film reviews", ("stanfordnlp/imdb", None),
                   labels=("negative", "positive"), columns=("text", "label")),
    "ag_news": Corpus("topics of news", ("fancyzhx/ag_news", None),
                      labels=("world", "sports", "business", "science"), columns=("text", "label")),
}  # fmt: skip


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


def find_files(name: str, given: list[Path], placed: Mapping[str, list[Path]] | None = None) -> list[SourceFile]:
    """The files of corpus `name` that are here: the given ones or the standard library; none if it is on the hub.

    The split of a given file is told by its name; that of a placed one is said.
    """
    sources = {"": given, **(placed or {})}
    if any(sources.values()):
        return _local_files(sources)
    if name == "python-stdlib":
        return _stdlib_files()
    if name not in CORPORA:
        raise UserError(f"unknown data set {name}: {nearest(name, CORPORA)}; for your own text add --from PATH")
    return []


def names_by_split(files: list[SourceFile]) -> dict[str, list[str]]:
    """File names for the meta data, twenty of a split at most."""
    found = {split: sorted({file.path.name for file in files if file.split == split}) for split in SPLITS}
    return {split: names[:20] for split, names in found.items()}


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


_SPLIT_WORDS = {"train": "train", "valid": "val", "validation": "val", "val": "val", "dev": "val", "test": "test"}
_FORMATS = {".txt": "text", ".text": "text", ".raw": "text", ".tokens": "text", ".jsonl": "jsonl", ".ndjson": "jsonl",
            ".json": "jsonl", ".parquet": "parquet", ".csv": "csv", ".tsv": "tsv"}  # fmt: skip
_WHOLE_FILES = {".py", ".md", ".rst", ".c", ".h", ".tex"}


def _local_files(given: dict[str, list[Path]]) -> list[SourceFile]:
    paths: list[tuple[Path, Path, str]] = []
    """Each file with the part of its path that names its split, and the split that was said."""
    for said, path in ((said, path) for said, some in given.items() for path in some):
        if path.is_dir():
            known = {*_FORMATS, *_WHOLE_FILES}
            if packed := next((p for p in path.rglob("*.gz") if Path(p.stem).suffix.lower() in known), None):
                raise UserError(f"{packed} is compressed: unpack it (gunzip) or move it out of {path}")
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in known and _is_text(p, path))
            if not inside:
                raise UserError(f"no text in folder {path}: expected files ending in {' '.join(sorted(known))}")
            paths += [(file, file.relative_to(path), said) for file in inside]
        elif path.is_file():
            paths.append((path, Path(path.name), said))
        else:
            raise UserError(f"no such file or folder: {path} (--from takes ordinary files and folders)")
    sources, seen = [], set()
    sorted_out = any(_SPLIT_WORDS.get(named.parts[0].lower()) == "train" for _, named, _ in paths)

    def by_folder(named: Path) -> str:
        """A source file is called test_x.py for what it does: its split is that of its folder, where one is train."""
        return _SPLIT_WORDS.get(named.parts[0].lower(), "train") if sorted_out else "train"

    for path, named, said in paths:
        if path.resolve() in seen:
            raise UserError(f"{path} is given twice")
        seen.add(path.resolve())
        if not os.access(path, os.R_OK):
            raise UserError(f"no right to read {path}: ask its owner, or leave it out")
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty: leave it out or give a file with text")
        whole = path.suffix.lower() in _WHOLE_FILES
        sources.append(SourceFile(path, said or (_split_of(named) if not whole else by_folder(named)), format_of(path)))
    if not any(source.split == "train" for source in sources):
        names = ", ".join(str(named) for _, named, _ in paths[:5])
        raise UserError(f"no training text: {names} are all validation or test files (--train PATH says otherwise)")
    return sources


def _is_text(path: Path, root: Path) -> bool:
    """Whether a file in a folder is meant: not hidden, not empty."""
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return not hidden and path.is_file() and path.stat().st_size > 0


def _split_of(named: Path) -> str:
    """From a word in the file's name or a folder's: tinystories_valid.txt and valid/part-1.txt are validation."""
    for name in (named.stem, *reversed(named.parent.parts)):
        for word in re.split(r"[^a-z]+", name.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return "train"


def format_of(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix in _WHOLE_FILES:
        return "file"
    known = _FORMATS.get(suffix, "text")
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


def _stdlib_files() -> list[SourceFile]:
    """Modules of the standard library, without its tests and bundled third-party code."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "_vendor"}
    files = []
    for path in sorted(root.rglob("*.py")):
        if skipped & set(path.relative_to(root).parts) or not path.stat().st_size:
            continue
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        files.append(SourceFile(path, "train", "file"))
    if not files:
        raise UserError(f"the standard library's source is not in {root}: use --from with text of your own")
    return files


def download(name: str, cache: Path) -> list[SourceFile]:
    """Bring a corpus from the hub to local files, which are then read like any others."""
    corpus = CORPORA[name]
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"downloading {name} needs the datasets library: make hf (or pip install 'oelm[hf]'), or give local "
            f"files with --from PATH"
        ) from None
    assert corpus.hub is not None
    repository, configuration = corpus.hub
    try:
        loaded = datasets.load_dataset(repository, configuration)
    except Exception as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise UserError(
            f"cannot download {name} ({repository}) from the hub: {reason}; offline, give local files with --from PATH"
        ) from None
    cache.mkdir(parents=True, exist_ok=True)
    files = []
    for split, rows in loaded.items():
        if corpus.lines:
            path = cache / f"{split}.txt"
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(row["text"] for row in rows)
        else:
            path = cache / f"{split}.parquet"
            if corpus.labels and all(label == -1 for label in rows.unique(corpus.columns[-1])):
                continue  # the hub keeps the labels of some splits to itself: what is missing is drawn from train
            _check_classes(name, rows)
            rows.select_columns(list(corpus.columns) or ["text"]).to_parquet(str(path))
        files.append(SourceFile(path, _split_of(Path(path.name)), format_of(path)))
    return files


def _check_classes(name: str, rows: Any) -> None:
    """The hub's own names of the classes, where it has them, must be in our order."""
    corpus = CORPORA[name]
    theirs = getattr(rows.features.get(corpus.columns[-1]), "names", None) if corpus.columns else None
    if theirs and corpus.labels and len(theirs) != len(corpus.labels):
        raise UserError(f"{name} on the hub has the classes {', '.join(theirs)}, not {', '.join(corpus.labels)}")


def hash_texts(texts: list[bytes]) -> np.ndarray:
    """64-bit content hashes: they decide the split of a document and find it again in another."""
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype="<u8")


def prepare_command(dataset: str, tokenizer: str, place: str, labels: Sequence[str] = ()) -> str:
    """What to type for the data set; a suffix that names the tokenizer is not part of the corpus's name."""
    name = dataset.removesuffix("-" + tokenizer.replace(":", ""))
    words = ["oelm", "prepare", name, *([] if name in CORPORA else ["--from", "PATH"])]
    if labels and name not in CORPORA:
        words += ["--labels", ",".join(labels)]
    if tokenizer != "gpt2" or place != f"data/{name}":
        words += ["--tokenizer", tokenizer, "--out", place]
    return shlex.join(words)
