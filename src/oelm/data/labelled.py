"""Sentences and pairs of sentences with labels: rows of files to token files, and the order they are seen in.

    data/<name>/  train.bin  train.rows.npy  val…  test…  meta.json  tokenizer.json

A `.bin` holds the tokens of all texts of a split, a row of `.rows.npy` where an example's first text starts,
where its second does, where that ends, and the label. What a model puts before, between and behind the texts
is the tokenizer's `Template`, in the meta data.
"""

import csv
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from oelm.data.sources import SourceFile, hash_texts, parquet_rows
from oelm.data.tokenizer import Template, Tokenizer
from oelm.data.tokens import SPLITS, TokenData, keyed, open_data
from oelm.errors import UserError

TEXT_COLUMNS = (("premise", "hypothesis"), ("sentence1", "sentence2"), ("question", "sentence"), ("text",),
                ("sentence",))  # fmt: skip
LABEL_COLUMNS = ("label", "gold_label")
MOST_CLASSES = 1_000
BUCKET_STEPS = 64
"""So many steps' examples are sorted by length together."""


@dataclass(frozen=True)
class Row:
    texts: tuple[str, ...]
    label: str


@dataclass
class Skips:
    """Rows that were left out, by reason, and where the first of each stood."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, where)

    def __str__(self) -> str:
        return "; ".join(f"{n:,} {reason} (first: {self.first[reason]})" for reason, n in self.counts.items())


def read_rows(file: SourceFile, columns: Sequence[str], skips: Skips) -> Iterator[Row]:
    """Rows with texts and a label; `columns` names those of the texts and then the label's, or none to find them."""
    names: tuple[str, ...] = tuple(columns)
    for number, record in records(file, skips):
        where = f"{file.path.name}, row {number}"
        if not names:
            names = _find_columns(file.path, record)
        if any(name not in record for name in names):
            if number == 1:
                raise UserError(f"{file.path} has no column {_first_missing(names, record)}, only: {_shown(record)}")
            skips.add("without all columns", where)
            continue
        *texts, label = (record[name] for name in names)
        label = "" if label is None else str(label).strip()
        if not all(isinstance(text, str) and text.strip() for text in texts):
            skips.add("with an empty text", where)
        elif any(_not_text(text) for text in (*texts, label)):
            skips.add("not in UTF-8", where)
        elif not label:
            skips.add("without a label", where)
        else:
            yield Row(tuple(text.strip() for text in texts), label)


def records(file: SourceFile, skips: Skips) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, record) of every row that can be read at all."""
    if file.format == "parquet":
        yield from enumerate(parquet_rows(file.path), 1)
        return
    with open(file.path, encoding="utf-8-sig", errors="surrogateescape", newline="") as source:
        if file.format == "jsonl":
            for number, line in enumerate(source, 1):
                try:
                    record = json.loads(line) if line.strip() else None
                except (ValueError, RecursionError):
                    record = line
                if isinstance(record, dict):
                    yield number, record
                elif record is not None:
                    skips.add("not a JSON object", f"{file.path.name}, row {number}")
            return
        csv.field_size_limit(1 << 27)
        tabs = file.format == "tsv"
        reader = csv.DictReader(source, delimiter="\t" if tabs else ",", quoting=csv.QUOTE_NONE if tabs else 0)
        try:
            yield from enumerate(reader, 1)
        except csv.Error as error:
            raise UserError(f"{file.path}, line {reader.line_num}: {error}") from None


def _find_columns(path: Path, record: dict[str, Any]) -> tuple[str, ...]:
    texts = next((names for names in TEXT_COLUMNS if all(name in record for name in names)), None)
    label = next((name for name in LABEL_COLUMNS if name in record), None)
    if texts is None or label is None:
        known = "premise and hypothesis, sentence1 and sentence2, text or sentence; label"
        raise UserError(
            f"{path} has the columns {_shown(record)}; expected {known}. Name yours with --columns TEXT[,TEXT],LABEL"
        )
    return (*texts, label)


def _shown(record: dict[str, Any]) -> str:
    return ", ".join(str(name)[:30] for name in itertools.islice(record, 12))


def _first_missing(names: Sequence[str], record: dict[str, Any]) -> str:
    return next(name for name in names if name not in record)


def _not_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def label_names(rows: dict[str, list[Row]], given: Sequence[str]) -> list[str]:
    """The classes, in the order of their numbers: as given, or those of the training rows."""
    if given:
        if len(set(given)) < len(given) or len(given) < 2:
            raise UserError(f"--labels {','.join(given)}: name two or more different classes")
        return list(given)
    found = {row.label for row in rows["train"]}
    if len(found) < 2 or len(found) > MOST_CLASSES:
        seen = ", ".join(sorted(found)[:5])
        raise UserError(f"the training rows have {len(found):,} different labels ({seen} …): a column of classes?")
    return sorted(found, key=int if all(name.isdigit() for name in found) else str)


def number_labels(rows: list[Row], names: list[str], skips: Skips) -> list[tuple[tuple[str, ...], int]]:
    """Examples with the number of their class; a label may be its name or its number."""
    numbers = {name: i for i, name in enumerate(names)}
    numbers |= {str(i): i for i in range(len(names)) if str(i) not in numbers}
    kept = []
    for row in rows:
        if row.label in numbers:
            kept.append((row.texts, numbers[row.label]))
        else:
            skips.add("with an unknown label", repr(row.label[:30]))
    return kept


Examples = list[tuple[tuple[str, ...], int]]


def read_examples(files: list[SourceFile], columns: Sequence[str], given: Sequence[str]) -> tuple[
    dict[str, Examples], list[str], Skips
]:  # fmt: skip
    """Examples by split, the names of the classes, and what was left out. Refused if half of a file is no use."""
    skips, rows = Skips(), dict[str, list[Row]]()
    for file in files:
        before = sum(skips.counts.values())
        found = list(read_rows(file, columns, skips))
        if sum(skips.counts.values()) - before > len(found) or not found:
            raise UserError(f"{file.path}: {len(found):,} usable rows; left out: {skips or 'none, the file is empty'}")
        rows.setdefault(file.split, []).extend(found)
    if len({len(row.texts) for part in rows.values() for row in part}) > 1:
        raise UserError("some of the files have one text in a row, others two: prepare them apart")
    names = label_names(rows, given)
    examples = {split: number_labels(part, names, skips) for split, part in rows.items()}
    for split, part in examples.items():
        if 2 * len(part) < len(rows[split]):
            seen = ", ".join(label for label, _ in Counter(row.label for row in rows[split]).most_common(5))
            raise UserError(f"the labels of the {split} rows are {seen}; the classes are {', '.join(names)}")
        if not part and split == "train":
            raise UserError("no training row has a known label")
    absent = set(range(len(names))) - {label for _, label in examples["train"]}
    if absent:
        raise UserError(f"no training row has the label {names[min(absent)]}: check --labels")
    return examples, names, skips


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

    @property
    def labels(self) -> list[str]:
        assert self.meta
        return self.meta["labels"]

    def identity(self) -> dict[str, Any]:
        digests = {split: hashlib.sha256(rows.tobytes()).hexdigest()[:16] for split, rows in self.rows.items()}
        examples = {split: len(rows) for split, rows in self.rows.items()}
        return {**super().identity(), "labels": self.labels, "rows": digests, "examples": examples}

    def lengths(self, split: str, seq_len: int) -> np.ndarray:
        """Tokens of each example in the model, special ones included."""
        rows = self.rows[split]
        special = self.template.length(pair=True) if (rows[:, 1] < rows[:, 2]).any() else self.template.length(False)
        return np.minimum(rows[:, 2] - rows[:, 0] + special, seq_len)

    def fullness(self, seq_len: int) -> float:
        return float(self.lengths("train", seq_len).mean()) / seq_len

    def cut(self, split: str, seq_len: int) -> int:
        """How many examples are longer than `seq_len` tokens and lose their end."""
        return int((self.lengths(split, 1 << 60) > seq_len).sum())

    def example(self, split: str, index: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        start, middle, end, _ = self.rows[split][index]
        tokens = self.splits[split]
        texts = [tokens[start:middle]] + ([tokens[middle:end]] if middle < end else [])
        return self.template.join(texts, seq_len)


def open_labelled(dataset: str, data_path: str = "") -> LabelledData | None:
    """A prepared set of labelled texts; None if it is of running text."""
    data = open_data(dataset, data_path)
    if not data.meta or "labels" not in data.meta:
        return None
    rows = {}
    for split in SPLITS:
        path = data.folder / f"{split}.rows.npy"
        try:
            found = np.load(path, allow_pickle=False)
            assert found.shape == (len(found), 4)
            assert found.dtype == np.int64
            assert (np.diff(found[:, :3]) >= 0).all()
            assert found.min() >= 0
            assert found[:, 2].max() <= len(data.splits[split])
            assert found[:, 3].max() < len(data.meta["labels"])
        except FileNotFoundError:
            raise UserError(f"{path} is missing: run oelm prepare again") from None
        except (OSError, ValueError, EOFError, AssertionError):
            raise UserError(f"{path} is damaged: run oelm prepare again with --force") from None
        rows[split] = found
    return LabelledData(data.folder, data.meta, data.splits, rows, Template(**data.meta["template"]))


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
