"""Sentences and pairs of sentences with labels: rows of files to token files, and the order they are seen in.

    data/<name>/  train.bin  train.rows.npy  val…  test…  meta.json  tokenizer.json

A `.bin` holds the tokens of all texts of a split, a row of `.rows.npy` where an example's first text starts,
where its second does, where that ends, and the label. What a model puts before, between and behind the texts
is the tokenizer's `Template`, in the meta data.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from oelm.data.documents import SourceFile, hash_texts
from oelm.data.examples import Examples, Labelling, read_examples
from oelm.data.sources import names_by_split
from oelm.data.splits import Rules
from oelm.data.tokenizer import TOKENIZER_FILE, Template, Tokenizer, load_tokenizer, train_bpe
from oelm.data.tokens import META_FILE, SPLITS, TokenData, keyed, make_meta
from oelm.errors import UserError
from oelm.files import fsync_file, write_atomic

HELD_OUT = 0.1
"""Share of the training examples for each split that has no file."""
BUCKET_STEPS = 64
"""So many steps' examples are sorted by length together."""


def write_labelled(
    name: str, files: list[SourceFile], spec: str, labelling: Labelling, work: Path, held_out: float | None,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:  # fmt: skip
    """Write the token files of labelled texts into `work`; returns their meta data."""
    examples, names, skips = read_examples(files, labelling)
    share = held_out or HELD_OUT
    rules = Rules(drawn={split: share for split in ("test", "val") if split not in examples})
    rules.given = {split: np.unique(example_hashes(examples[split])) for split in examples if split != "train"}
    splits: dict[str, Examples] = {split: [] for split in SPLITS}
    dropped = 0
    for source, part in examples.items():
        for example, split in zip(part, rules.splits_of(source, example_hashes(part)), strict=True):
            if split:
                splits[split].append(example)
            else:
                dropped += 1
    absent = set(range(len(names))) - {label for _, label in splits["train"]}
    if absent:
        raise UserError(
            f"no row of the label {names[min(absent)]} is left to train on: give more, or files with --val and --test"
        )
    if spec.startswith("bpe:"):
        seen = (text for texts, _ in splits["train"] for text in texts)
        write_atomic(work / TOKENIZER_FILE, train_bpe(seen, int(spec.partition(":")[2])).serialised)
    encoder = load_tokenizer(spec, work)
    dtype = np.uint16 if encoder.vocab_size <= 65_536 else np.uint32
    counts, source_hash, done, total = {}, hashlib.sha256(), 0, sum(map(len, splits.values()))
    for split, part in splits.items():
        if not part:
            raise UserError(f"the {split} split of {name} is empty: give more rows, or a file with --{split} PATH")
        tokens, rows = encode(part, encoder, dtype)
        (work / f"{split}.bin").write_bytes(tokens.tobytes())
        np.save(work / f"{split}.rows.npy", rows)
        size = sum(len(text.encode()) for texts, _ in part for text in texts)
        counts[split] = {"documents": len(part), "tokens": len(tokens), "bytes": size,
                         "labels": np.bincount(rows[:, 3], minlength=len(names)).tolist()}  # fmt: skip
        for texts, label in part:
            source_hash.update(f"{split}\0{label}\0".encode() + "\0".join(texts).encode())
        for kind in ("bin", "rows.npy"):
            fsync_file(work / f"{split}.{kind}")
        done += len(part)
        progress("tokenising", done, total)
    meta = {
        **make_meta(name, encoder, dtype, counts, rules.drawn, dropped, names_by_split(files), source_hash.hexdigest()),
        "labels": names,
        "pair": len(splits["train"][0][0]) == 2,
        "template": asdict(encoder.template()),
        "left_out": dict(skips.counts),
        "left_out_shown": str(skips),
    }
    return meta


def encode(examples: Examples, tokenizer: Tokenizer, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, rows): see the head of this module."""
    pieces: list[np.ndarray] = []
    rows = np.empty((len(examples), 4), dtype=np.int64)
    at = 0
    for i, (texts, label) in enumerate(examples):
        encoded = [tokenizer.encode_array(text) for text in texts]
        pieces += encoded
        first, size = len(encoded[0]), sum(map(len, encoded))
        rows[i] = at, at + first, at + size, label
        at += size
    return (np.concatenate(pieces) if pieces else np.empty(0)).astype(dtype), rows


def example_hashes(examples: Examples) -> np.ndarray:
    """Of the first texts alone: pairs that share one stay in one split."""
    return hash_texts([texts[0].encode() for texts, _ in examples])


@dataclass(frozen=True)
class LabelledData(TokenData):
    rows: dict[str, np.ndarray]
    template: Template
    pair: bool
    """Two texts in an example."""

    @property
    def labels(self) -> list[str]:
        assert self.meta
        return self.meta["labels"]

    def identity(self) -> dict[str, Any]:
        digests = {split: hashlib.sha256(rows.tobytes()).hexdigest()[:16] for split, rows in self.rows.items()}
        examples = {split: len(rows) for split, rows in self.rows.items()}
        more = {"labels": self.labels, "rows": digests, "examples": examples, "pair": self.pair}
        return {**super().identity(), **more, "template": asdict(self.template)}

    def lengths(self, split: str, seq_len: int) -> np.ndarray:
        """Tokens of each example in the model, special ones included."""
        rows = self.rows[split]
        return np.minimum(rows[:, 2] - rows[:, 0] + self.template.length(self.pair), seq_len)

    def fullness(self, seq_len: int) -> float:
        return float(self.lengths("train", seq_len).mean()) / seq_len

    def cut(self, split: str, seq_len: int) -> int:
        """How many examples are longer than `seq_len` tokens and lose their end."""
        return int((self.lengths(split, 1 << 60) > seq_len).sum())

    def example(self, split: str, index: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        start, middle, end, _ = self.rows[split][index]
        tokens = self.splits[split]
        texts = [tokens[start:middle]] + ([tokens[middle:end]] if self.pair else [])
        return self.template.join(texts, seq_len)


def open_labelled(data: TokenData) -> LabelledData | None:
    """The rows beside the tokens of labelled texts; None if the data are of running text."""
    if not data.meta or "labels" not in data.meta:
        return None
    try:
        labels, template, pair = data.meta["labels"], Template(**data.meta["template"]), data.meta["pair"]
        assert len({name for name in labels if isinstance(name, str)}) == len(labels) >= 2
        assert isinstance(pair, bool)
        special = [*template.start, *template.between, *template.end, template.pad]
        assert all(isinstance(token, int) and 0 <= token < data.meta["vocab_size"] for token in special)
    except (AssertionError, TypeError, KeyError):
        raise UserError(
            f"{data.folder / META_FILE} is damaged or from an older oelm: run oelm prepare again with --force"
        ) from None
    if data.tokenizer not in ("gpt2", "bytes") and not (data.folder / TOKENIZER_FILE).is_file():
        raise UserError(f"{data.folder / TOKENIZER_FILE} is missing: run oelm prepare again with --force")
    rows = {}
    for split in SPLITS:
        path = data.folder / f"{split}.rows.npy"
        try:
            found = np.load(path, allow_pickle=False)
            assert found.shape == (data.meta["splits"][split]["documents"], 4)
            assert found.dtype == np.int64
            assert (np.diff(found[:, :3]) >= 0).all()
            assert found.min() >= 0
            assert found[:, 2].max() <= len(data.splits[split])
            assert np.bincount(found[:, 3], minlength=len(labels)).tolist() == data.meta["splits"][split]["labels"]
        except FileNotFoundError:
            raise UserError(f"{path} is missing: run oelm prepare again") from None
        except Exception:  # whatever numpy makes of a file that is not one of its own
            raise UserError(f"{path} is damaged: run oelm prepare again with --force") from None
        rows[split] = found
    return LabelledData(data.folder, data.meta, data.splits, rows, template, pair)


class BucketOrder:
    """Which examples make up a step: a pure function of (seed, step).

    Every example once per epoch but a remainder that fills no step; the examples of some steps are sorted by length
    together, so that a batch has few paddings, and the steps then taken in any order.
    """

    def __init__(self, lengths: np.ndarray, per_step: int, seed: int) -> None:
        self.lengths, self.per_step, self.seed = lengths, per_step, seed
        self.per_epoch = len(lengths) // per_step
        if self.per_epoch < 1:
            raise ValueError("fewer examples than one step takes")
        self._epoch = lru_cache(maxsize=2)(self._steps_of)

    def examples(self, step: int) -> np.ndarray:
        epoch, place = divmod(step, self.per_epoch)
        return self._epoch(epoch)[place]

    def epochs(self, steps: int) -> float:
        return steps * self.per_step / len(self.lengths)

    def _steps_of(self, epoch: int) -> np.ndarray:
        chance = np.random.default_rng(keyed(self.seed, epoch))
        order = chance.permutation(len(self.lengths))[: self.per_epoch * self.per_step]
        bucket = BUCKET_STEPS * self.per_step
        for start in range(0, len(order), bucket):
            part = order[start : start + bucket]
            order[start : start + bucket] = part[np.argsort(self.lengths[part], kind="stable")]
        return chance.permutation(order.reshape(self.per_epoch, self.per_step), axis=0)
