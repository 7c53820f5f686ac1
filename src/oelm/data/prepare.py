"""From text to token files: split by document, tokenise in parallel, write atomically.

    data/<name>/  train.bin  val.bin  test.bin  meta.json  [tokenizer.json]

Memory stays bounded whatever the corpus: workers read pieces of a few MiB and hand back token bytes,
which are appended in order.
"""

import hashlib
import itertools
import multiprocessing
import shlex
import shutil
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oelm import encoders
from oelm.data.documents import Piece, SourceFile, cut, documents, hash_texts
from oelm.data.examples import Labelling
from oelm.data.labelled import write_labelled
from oelm.data.sources import CORPORA, download, find_files, names_by_split
from oelm.data.splits import Rules
from oelm.data.tokenizer import (
    TOKENIZER_FILE,
    EncoderTokenizer,
    Tokenizer,
    check_spec,
    encoder_tokenizer,
    load_tokenizer,
    train_bpe,
)
from oelm.data.tokens import META_FILE, SPLITS, data_root, make_meta, read_meta
from oelm.errors import UserError
from oelm.files import disk_errors, fsync_file, fsync_folder, lock_file, write_atomic, write_json
from oelm.machine import cores, leave_with_parent

BPE_SAMPLE_BYTES = 48 << 20
HELD_OUT_BYTES = 4 << 20
OUR_FILES = {*(f"{split}.{kind}" for split in SPLITS for kind in ("bin", "rows.npy")), META_FILE, TOKENIZER_FILE}

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done, bytes in all."""


@dataclass
class SplitPart:
    tokens: bytes = b""
    documents: int = 0
    text_bytes: int = 0


@dataclass
class PieceResult:
    parts: dict[str, SplitPart]
    dropped: int
    empty: int
    digest: bytes


def prepare(
    name: str,
    given: list[Path],
    tokenizer: str | None,
    out: Path | None,
    workers: int = 0,
    force: bool = False,
    held_out: float | None = None,
    progress: Progress = lambda doing, done, total: None,
    labelling: Labelling | None = None,
    placed: Mapping[str, list[Path]] | None = None,
) -> dict[str, Any]:
    """Write the token files of corpus `name` and return their meta data.

    The split of a given file is told by its name; that of a placed one is said.
    """
    local = [*given, *(path for paths in (placed or {}).values() for path in paths)]
    known = CORPORA.get(name)
    if known and known.labels:
        labelling = labelling or Labelling(known.labels, () if local else known.columns)
    spec = tokenizer or (known.tokenizer if known else "gpt2")
    encoder = _encoder_folder(spec)
    spec = EncoderTokenizer.name if encoder else spec
    check_spec(spec)
    if held_out is not None and not 0 < held_out <= 0.4:
        raise UserError(f"--held_out {held_out:g}: take a share above 0 and up to 0.4")
    if not name or "/" in name or name.startswith("."):
        raise UserError(f"data set name {name!r}: use letters, digits, - and _")
    if not 0 <= workers <= 1024:
        raise UserError(f"--workers {workers}: take 1 to 1024")
    out = (out or data_root() / name).resolve()
    _refuse_to_replace(out, spec, encoder, force)
    files = find_files(name, given, placed)
    if labelling is None and (encoder or any(file.format in ("csv", "tsv") for file in files)):
        labelling = Labelling()  # running text is neither kept in tables nor tokenised for an encoder
    advice = "free some space or choose another place with --out; nothing was changed"
    with disk_errors(f"preparing {name}", advice), ExitStack() as stack:
        if not out.parent.exists():
            out.parent.mkdir(parents=True)
            stack.callback(_remove_if_empty, out.parent)
        work = out.parent / f".{out.name}.preparing"
        refusal = f"another prepare is writing {out}"
        stack.enter_context(lock_file(prepare_lock(out), refusal, remove=True))
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        files = files or download(name, work / "download")
        if encoder:
            write_atomic(work / TOKENIZER_FILE, encoder_tokenizer(encoder).serialised)
        if labelling:
            meta = write_labelled(name, files, spec, labelling, work, held_out, progress)
        else:
            meta = _write_tokens(name, files, spec, work, workers or cores(), held_out, progress)
        shutil.rmtree(work / "download", ignore_errors=True)
        meta["command"] = _command(name, {"from": given, **(placed or {})}, tokenizer, out, labelling, held_out)
        write_json(work / META_FILE, meta)
        _put_in_place(work, out)
    return meta


def _command(
    name: str, sources: Mapping[str, list[Path]], tokenizer: str | None, out: Path, labelling: Labelling | None,
    held_out: float | None,
) -> str:  # fmt: skip
    """What makes the same data again, for whoever has the files: their names, not where they lie here."""
    words = ["oelm", "prepare", name]
    for flag, paths in sources.items():
        words += [f"--{flag}", *(path.name for path in paths)] if paths else []
    if tokenizer:
        words += ["--tokenizer", Path(tokenizer).name if Path(tokenizer).is_dir() else tokenizer]
    for flag, texts in (("labels", labelling.labels), ("columns", labelling.columns)) if labelling else ():
        words += [f"--{flag}", ",".join(texts)] if texts and name not in CORPORA else []
    if held_out is not None:
        words += ["--held_out", f"{held_out:g}"]
    place = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else Path("data", out.name)
    return shlex.join([*words, "--out", str(place)] if place != Path("data", name) else words)


def prepare_lock(out: Path) -> Path:
    """Held while the data of the folder `out` are written."""
    return out.parent / f".{out.name}.lock"


def _write_tokens(
    name: str, files: list[SourceFile], spec: str, work: Path, workers: int, held_out: float | None, progress: Progress
) -> dict[str, Any]:
    pieces = [piece for file in files for piece in cut(file)]
    sizes = {split: sum(f.path.stat().st_size for f in files if f.split == split) for split in SPLITS}
    rules = Rules(drawn=_shares(sizes, held_out))
    for split in ("val", "test"):
        given = [piece for piece in pieces if piece.file.split == split]
        if given:
            rules.given[split] = _content_hashes(given)
    encoder = _tokenizer(spec, pieces, rules, work, progress)
    dtype = np.uint16 if encoder.vocab_size <= 65_536 else np.uint32

    counts = {split: {"documents": 0, "tokens": 0, "bytes": 0} for split in SPLITS}
    dropped, empty, done, source = 0, 0, 0, hashlib.sha256()
    total = sum(sizes.values())
    with ExitStack() as stack:
        outputs = {split: stack.enter_context(open(work / f"{split}.bin", "wb")) for split in SPLITS}
        setting = (spec, work, rules, dtype)
        for piece, result in _in_order(pieces, workers, setting):
            for split, part in result.parts.items():
                outputs[split].write(part.tokens)
                counts[split]["documents"] += part.documents
                counts[split]["tokens"] += len(part.tokens) // np.dtype(dtype).itemsize
                counts[split]["bytes"] += part.text_bytes
            dropped += result.dropped
            empty += result.empty
            source.update(f"{piece.file.path.name}:{piece.file.split}\n".encode() + result.digest)
            done += _piece_bytes(piece)
            progress("tokenising", done, total)
    for split in SPLITS:
        if not counts[split]["tokens"]:
            blank = next((file.path for file in files if file.split == split), None)
            if blank and split != "train":
                raise UserError(f"the {split} split of {name} is empty: {blank} holds no text of its own")
            found = sum(c["documents"] for c in counts.values())
            raise UserError(
                f"the {split} split of {name} is empty: {found} document(s) are too few to draw it from; "
                f"give more text, or a file with {split} in its name"
            )
        fsync_file(work / f"{split}.bin")
    meta = {
        **make_meta(name, encoder, dtype, counts, rules.drawn, dropped, names_by_split(files), source.hexdigest()),
        "empty_documents": empty,
    }
    return meta


def _encoder_folder(spec: str) -> Path | None:
    """Where an encoder's tokenizer lies, if `spec` names an encoder."""
    return None if spec in ("gpt2", "bytes") or ":" in spec.removeprefix("package:") else encoders.with_tokenizer(spec)


def _shares(sizes: dict[str, int], held_out: float | None) -> dict[str, float]:
    """Draw about 4 MiB for each split that has no file of its own, but 0.5 % to 5 % of the text."""
    share = held_out or min(0.05, max(0.005, HELD_OUT_BYTES / max(1, sizes["train"])))
    return {split: share for split in ("test", "val") if not sizes[split]}


def _content_hashes(pieces: list[Piece]) -> np.ndarray:
    """Sorted, once each."""
    parts = [hash_texts([text.encode() for text in documents(piece) if text]) for piece in pieces]
    return np.unique(np.concatenate(parts))


def _tokenizer(spec: str, pieces: list[Piece], rules: Rules, work: Path, progress: Progress) -> Tokenizer:
    if not spec.startswith("bpe:"):
        return load_tokenizer(spec, work)
    total = min(BPE_SAMPLE_BYTES, sum(_piece_bytes(piece) for piece in pieces if piece.file.split == "train"))
    texts = _training_texts(pieces, rules, total, progress)
    first = next(texts, None)
    if first is None:
        raise UserError("the train split is empty: one document or none is too few to split; give more text")
    encoder = train_bpe(itertools.chain([first], texts), int(spec.partition(":")[2]))
    progress("training the tokenizer", total, total)
    write_atomic(work / TOKENIZER_FILE, encoder.serialised)
    return load_tokenizer(spec, work)


def _training_texts(pieces: list[Piece], rules: Rules, total: int, progress: Progress) -> Iterator[str]:
    """Documents of the train split alone, from pieces spread evenly over the corpus."""
    pieces = [piece for piece in pieces if piece.file.split == "train"]
    stride = max(1, round(sum(map(_piece_bytes, pieces)) / max(1, total)))
    seen = 0
    for piece in pieces[::stride]:
        texts = [text for text in documents(piece) if text]
        splits = rules.splits_of(piece.file.split, hash_texts([text.encode() for text in texts]))
        for text, split in zip(texts, splits, strict=True):
            if split == "train":
                seen += len(text)
                progress("training the tokenizer", min(seen, total), total)
                yield text
        if seen >= BPE_SAMPLE_BYTES:
            return


def _piece_bytes(piece: Piece) -> int:
    if piece.file.format != "parquet":
        return piece.stop - piece.start
    return piece.file.path.stat().st_size // max(1, len(cut(piece.file)))


def _in_order(
    pieces: list[Piece], workers: int, setting: tuple[str, Path, Rules, type]
) -> Iterator[tuple[Piece, PieceResult]]:
    """Encode pieces in parallel; results come in the order of the pieces, few of them in memory at once."""
    batches = _batches(pieces)
    workers = min(workers, len(batches))
    if workers <= 1:
        _start_worker(*setting)
        for piece in pieces:
            yield piece, _encode_piece(piece)
        return
    waiting: deque[tuple[list[Piece], Future[list[PieceResult]]]] = deque()
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=setting)
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(_encode_batch, batch)))
            while len(waiting) > 3 * workers:
                yield from _next(waiting)
        while waiting:
            yield from _next(waiting)
    except BrokenProcessPool:
        raise UserError("a tokenising process was killed, perhaps for lack of memory: try --workers 1") from None
    except BaseException:
        for process in list(pool._processes.values()):
            process.kill()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _next(waiting: deque[tuple[list[Piece], Future[list[PieceResult]]]]) -> Iterator[tuple[Piece, PieceResult]]:
    batch, future = waiting.popleft()
    yield from zip(batch, future.result(), strict=True)


def _batches(pieces: list[Piece], size: int = 1 << 20) -> list[list[Piece]]:
    """Group small pieces, such as source files, so that handing them out costs nothing."""
    batches: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if room <= 0:
            batches.append([])
            room = size
        batches[-1].append(piece)
        room -= _piece_bytes(piece)
    return batches


_worker: tuple[Tokenizer, Rules, type]


def _start_worker(spec: str, folder: Path, rules: Rules, dtype: type) -> None:
    global _worker
    if (parent := multiprocessing.parent_process()) is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        leave_with_parent(signal.SIGKILL, parent.pid or 0)
    _worker = (load_tokenizer(spec, folder), rules, dtype)


def _encode_batch(batch: list[Piece]) -> list[PieceResult]:
    return [_encode_piece(piece) for piece in batch]


def _encode_piece(piece: Piece) -> PieceResult:
    tokenizer, rules, dtype = _worker
    everything = list(documents(piece))
    texts = [text for text in everything if text]
    raw = [text.encode() for text in texts]
    hashes = hash_texts(raw)
    splits = rules.splits_of(piece.file.split, hashes)
    end: np.ndarray = np.array([tokenizer.end_of_text], dtype=dtype)
    arrays: dict[str, list[np.ndarray]] = {}
    parts: dict[str, SplitPart] = {}
    for text, size, split in zip(texts, map(len, raw), splits, strict=True):
        if split:
            try:
                arrays.setdefault(split, []).extend((tokenizer.encode_array(text), end))
            except ValueError as error:  # of white space alone, a million characters are too many for GPT-2's
                where = f"{piece.file.path}: the document that begins {text[:40]!r}"
                raise UserError(f"{where} cannot be tokenised: {str(error)[:80]}") from None
            part = parts.setdefault(split, SplitPart())
            part.documents += 1
            part.text_bytes += size
    for split, part in parts.items():
        part.tokens = np.concatenate(arrays[split]).astype(dtype).tobytes()
    return PieceResult(parts, splits.count(""), len(everything) - len(texts), hashlib.sha256(hashes.tobytes()).digest())


def _refuse_to_replace(out: Path, spec: str, encoder: Path | None, force: bool) -> None:
    """Never delete what is not ours, nor token files of another tokenizer without being told to."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file: choose another place with --out")
    foreign = sorted(p.name for p in out.iterdir() if p.name not in OUR_FILES)
    if foreign:
        raise UserError(f"{out} holds other files ({foreign[0]}): choose an empty or new folder with --out")
    try:
        meta = read_meta(out)
    except UserError:
        if force:
            return
        raise UserError(f"{out / META_FILE} is damaged: replace the folder with --force") from None
    if not force and meta and meta["tokenizer"] != spec:
        raise UserError(
            f"{out} holds {meta['tokenizer']} tokens: write these beside it with "
            f"--out {out}-{spec.replace(':', '')}, or replace it with --force"
        )
    if not force and meta and encoder and meta["tokenizer_hash"] != encoder_tokenizer(encoder).hash:
        raise UserError(f"{out} holds tokens of another encoder: write these elsewhere with --out, or use --force")
    if not force and meta is None and any(out.iterdir()):
        raise UserError(f"{out} holds token files without {META_FILE}: choose another --out, or replace with --force")


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _put_in_place(work: Path, out: Path) -> None:
    old = out.parent / f".{out.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    fsync_folder(work)
    if out.exists():
        out.rename(old)
    work.rename(out)
    fsync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)
