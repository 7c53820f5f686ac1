"""Token files: memory-mapped, checked before the first step, and the order in which windows are seen.

The global batch is a pure function of (seed, step): no loader state exists, so none can be lost.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oelm.data.tokenizer import Tokenizer
from oelm.errors import UserError, nearest

SPLITS = ("train", "val", "test")
META_FILE = "meta.json"


def data_root() -> Path:
    return Path(os.environ.get("OELM_DATA") or "data")


def read_meta(folder: Path) -> dict[str, Any] | None:
    """What `oelm prepare` wrote about the folder's tokens; None for token files from elsewhere."""
    path = folder / META_FILE
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        assert meta["dtype"] in ("uint16", "uint32")
        assert isinstance(meta["vocab_size"], int)
        assert meta["vocab_size"] > 0
        assert all(isinstance(meta[key], str) and meta[key] for key in ("tokenizer", "tokenizer_hash", "source_hash"))
        for split in SPLITS:
            assert all(isinstance(meta["splits"][split][key], int) for key in ("tokens", "bytes"))
            assert meta["splits"][split]["bytes"] > 0
        return meta
    except FileNotFoundError:
        return None
    except PermissionError:
        raise UserError(f"no right to read {path}: ask its owner") from None
    except (OSError, ValueError, AssertionError, KeyError, TypeError):
        raise UserError(f"{path} is damaged: run oelm prepare again with --force") from None


def make_meta(
    name: str, encoder: Tokenizer, dtype: type, counts: dict[str, Any], drawn: dict[str, float], dropped: int,
    files: dict[str, list[str]], source_hash: str,
) -> dict[str, Any]:  # fmt: skip
    """What is written about a folder's tokens, for text and labelled texts alike."""
    return {
        "name": name,
        "tokenizer": encoder.name,
        "tokenizer_hash": encoder.hash,
        "vocab_size": encoder.vocab_size,
        "end_of_text": encoder.end_of_text,
        "dtype": np.dtype(dtype).name,
        "splits": counts,
        "drawn_from_train": drawn,
        "dropped_from_train_or_test": dropped,
        "files": files,
        "source_hash": source_hash,
    }


@dataclass(frozen=True)
class TokenData:
    """The splits of one prepared data set."""

    folder: Path
    meta: dict[str, Any] | None
    splits: dict[str, np.ndarray]

    @property
    def vocab_size(self) -> int | None:
        return self.meta["vocab_size"] if self.meta else None

    @property
    def tokenizer(self) -> str:
        """Token files without meta data are the published ones: GPT-2 BPE."""
        return self.meta["tokenizer"] if self.meta else "gpt2"

    @property
    def tokenizer_hash(self) -> str:
        return self.meta["tokenizer_hash"] if self.meta else ""

    @property
    def end_of_text(self) -> int | None:
        """The token that ends a document; None where that is not known."""
        return self.meta.get("end_of_text") if self.meta else None

    def tokens_per_byte(self, split: str) -> float | None:
        if not self.meta:
            return None
        counts = self.meta["splits"][split]
        return counts["tokens"] / counts["bytes"]

    def fullness(self, seq_len: int) -> float:
        """Share of a window that is text, on average."""
        return 1.0

    def identity(self) -> dict[str, Any]:
        """What must be equal for two runs, or two parts of one run, to be comparable."""
        return {
            "tokenizer": self.tokenizer,
            "tokenizer_hash": self.tokenizer_hash,
            "source_hash": (self.meta or {}).get("source_hash", ""),
            "tokens": {split: len(tokens) for split, tokens in self.splits.items()},
            "edges": {split: _edge_hash(tokens) for split, tokens in self.splits.items()},
        }


def open_data(dataset: str, data_path: str = "") -> TokenData:
    """Open the splits of a prepared data set; train and val must be there, test may be missing in old files."""
    folder = Path(data_path) if data_path else data_root() / dataset
    if not folder.is_dir():
        if data_path:
            raise UserError(f"no such data folder: {folder} (--data_path)")
        raise UserError(_not_prepared(dataset, folder))
    meta = read_meta(folder)
    splits = {}
    for split in SPLITS:
        path = folder / f"{split}.bin"
        if not path.exists():
            if split == "test" and meta is None:
                continue
            raise UserError(f"{path} is missing: run oelm prepare {dataset}, or give --data_path")
        splits[split] = _open_tokens(path, np.dtype(meta["dtype"]) if meta else np.dtype(np.uint16))
        expected = meta["splits"][split]["tokens"] if meta else len(splits[split])
        if len(splits[split]) != expected:
            raise UserError(
                f"{path} holds {len(splits[split]):,} tokens where {META_FILE} says {expected:,}: "
                "run oelm prepare again"
            )
    return TokenData(folder, meta, splits)


def check_data(data: TokenData, seq_len: int, vocab_size: int) -> None:
    """Refuse, before anything is written, data that the model could not be trained or judged on."""
    for split, tokens in data.splits.items():
        if len(tokens) < seq_len + 1:
            raise UserError(
                f"the {split} split of {data.folder} has {len(tokens):,} tokens, fewer than the {seq_len + 1:,} "
                f"of seq_len {seq_len:,} + 1: prepare more text or lower --seq_len"
            )
        largest = _largest(tokens)
        if largest >= vocab_size:
            raise UserError(
                f"token id {largest} in {data.folder / (split + '.bin')} is outside the vocabulary of "
                f"{vocab_size:,}: raise --vocab_size or prepare the data with another tokenizer"
            )


class WindowOrder:
    """Which windows of the training tokens make up a step.

    Windows of seq_len + 1 tokens, each starting where the previous one's targets end, every window once
    per epoch in an order keyed by (seed, epoch). The tail that does not fill a window moves the grid by
    an offset that differs between epochs.
    """

    def __init__(self, length: int, seq_len: int, windows_per_step: int, seed: int) -> None:
        self.seq_len = seq_len
        self.windows_per_step = windows_per_step
        self.seed = seed
        self.per_epoch = (length - 1) // seq_len
        self._slack = (length - 1) % seq_len
        if self.per_epoch < 1:
            raise ValueError("fewer tokens than one window")

    def starts(self, step: int) -> np.ndarray:
        """First tokens of the windows of update `step` (0, 1, …), for all processes together."""
        first = step * self.windows_per_step
        index = np.arange(first, first + self.windows_per_step)
        starts = np.empty_like(index)
        for epoch in np.unique(index // self.per_epoch):
            chosen = index // self.per_epoch == epoch
            key = keyed(self.seed, int(epoch))
            offset = key % (self._slack + 1)
            window = permute((index[chosen] % self.per_epoch).astype(np.uint64), self.per_epoch, key)
            starts[chosen] = window.astype(np.int64) * self.seq_len + offset
        return starts

    def epochs(self, steps: int) -> float:
        return steps * self.windows_per_step / self.per_epoch


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Keyed permutation of range(size), computed for the given indices alone.

    A Feistel network over the next even power of two, walked until it lands inside: a shuffle of any
    size without holding it in memory.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    out = index.copy()
    outside = np.ones(len(out), dtype=bool)
    while outside.any():
        left, right = out[outside] >> shift, out[outside] & mask
        for round_number in range(6):
            left, right = right, left ^ (_mix(right, key + round_number) & mask)
        out[outside] = (left << shift) | right
        outside = out >= size
    return out


def _mix(values: np.ndarray, key: int) -> np.ndarray:
    """SplitMix64 finaliser of value + key."""
    with np.errstate(over="ignore"):
        z = values + np.uint64((key * 0x9E3779B97F4A7C15) & (2**64 - 1))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def keyed(seed: int, epoch: int) -> int:
    """The number that an epoch's order hangs on."""
    return int.from_bytes(hashlib.blake2b(f"order/{seed}/{epoch}".encode(), digest_size=7).digest(), "little")


def read_windows(tokens: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
    """(windows, seq_len + 1) token ids as int64."""
    out = np.empty((len(starts), seq_len + 1), dtype=np.int64)
    for row, start in zip(out, starts, strict=True):
        row[:] = tokens[start : start + seq_len + 1]
    return out


def _open_tokens(path: Path, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size
    if size == 0:
        raise UserError(f"{path} is empty")
    if size % dtype.itemsize:
        raise UserError(f"{path} is cut off: {size:,} bytes are not a whole number of {dtype.name} tokens")
    try:
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _largest(tokens: np.ndarray, chunk: int = 1 << 24) -> int:
    return max(int(tokens[i : i + chunk].max()) for i in range(0, len(tokens), chunk))


def _edge_hash(tokens: np.ndarray, edge: int = 1 << 16) -> str:
    digest = hashlib.sha256(tokens[:edge].tobytes())
    digest.update(tokens[-edge:].tobytes())
    return digest.hexdigest()[:16]


def _not_prepared(dataset: str, folder: Path) -> str:
    from oelm.data.sources import CORPORA

    if dataset in CORPORA:
        offline = " (offline: with --from PATH)" if CORPORA[dataset].hub else ""
        return f"{folder} is not there yet: run oelm prepare {dataset}{offline}"
    known = {*CORPORA, *(p.name for p in data_root().glob("*") if p.is_dir() and not p.name.startswith("."))}
    return f"unknown data set {dataset}: {nearest(dataset, known)} (your own text: oelm prepare NAME --from PATH)"
