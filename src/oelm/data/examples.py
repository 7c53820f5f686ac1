"""Rows of files as examples: one text or two with a label. What is of no use is left out and counted."""

import csv
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oelm.data.documents import SourceFile, parquet_rows
from oelm.errors import UserError

TEXT_COLUMNS = (("premise", "hypothesis"), ("sentence1", "sentence2"), ("question", "sentence"), ("text",),
                ("sentence",))  # fmt: skip
LABEL_COLUMNS = ("label", "gold_label")
MOST_CLASSES, LONGEST_LABEL = 1_000, 100


@dataclass(frozen=True)
class Labelling:
    """Files are tables of labelled texts. Empty fields are found out from them."""

    labels: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


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


def read_rows(
    file: SourceFile, columns: Sequence[str], skips: Skips, labelled: bool = True
) -> Iterator[tuple[dict[str, Any], Row]]:
    """Records with their texts and label; `columns` names those of the texts and then the label's, or none to find
    them."""
    names: tuple[str, ...] = tuple(columns)
    for number, record in records(file, skips):
        where = f"{file.path.name}, row {number}"
        names = names or _find_columns(file.path, record, labelled)
        if any(name not in record for name in names):
            if number == 1 and labelled:
                lacking = next(name for name in names if name not in record)
                raise UserError(f"{file.path} has no column {lacking}, only: {_shown(record)}")
            skips.add("without all columns", where)
            continue
        texts = [record[name] for name in names]
        label = _label(texts.pop()) if labelled else ""
        if None in record:  # more fields than columns: which is which is not known
            skips.add("with too many columns", where)
        elif not all(isinstance(text, str) and text.strip() for text in texts):
            skips.add("with an empty text", where)
        elif not all(is_text(text) for text in (*texts, label)):
            skips.add("not in UTF-8", where)
        elif labelled and not label:
            skips.add("without a label", where)
        else:
            yield record, Row(tuple(text.strip() for text in texts), label)


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
        quoting: Any = csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL
        reader = csv.DictReader(source, delimiter="\t" if tabs else ",", quoting=quoting, strict=True)
        try:
            names = reader.fieldnames or []
            if len(set(names)) < len(names):
                raise UserError(f"{file.path} has two columns of one name: {_shown(dict.fromkeys(names))}")
            yield from enumerate(reader, 1)
        except csv.Error as error:
            raise UserError(f"{file.path}, line {reader.line_num}: {error}") from None


def _label(value: Any) -> str:
    """The text of a label; "" for what is none (SNLI's "-" says that its annotators did not agree)."""
    if isinstance(value, bool | int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    text = value.strip() if isinstance(value, str) else ""
    return text if text != "-" else ""


def check_columns(columns: Sequence[str], label: bool) -> None:
    """One text or two, and the label where there is one."""
    texts = len(columns) - label
    if columns and (not 1 <= texts <= 2 or len(set(columns)) < len(columns)):
        raise UserError(f"--columns {','.join(columns)}: name one text or two{', then the label' if label else ''}")


def _find_columns(path: Path, record: dict[str, Any], labelled: bool) -> tuple[str, ...]:
    texts = next((names for names in TEXT_COLUMNS if all(name in record for name in names)), None)
    label = [name for name in LABEL_COLUMNS if name in record][:1] if labelled else []
    if texts is None or len(label) < labelled:
        known = "premise and hypothesis, sentence1 and sentence2, text or sentence" + ("; label" if labelled else "")
        how = "oelm prepare … --columns TEXT[,TEXT],LABEL" if labelled else "--columns TEXT[,TEXT]"
        raise UserError(f"{path} has the columns {_shown(record)}; expected {known}. Name yours with {how}")
    return (*texts, *label)


def _shown(record: dict[str, Any]) -> str:
    return ", ".join(str(name)[:30] for name in itertools.islice(record, 12))


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
    odd = next((name for name in found if not name.isprintable() or len(name) > LONGEST_LABEL), None)
    if odd is not None:
        raise UserError(f"the label {odd[:LONGEST_LABEL]!r} is no name of a class")
    return sorted(found, key=int if all(_is_number(name) for name in found) else str)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


def number_labels(rows: list[Row], names: list[str], ordered: bool, skips: Skips) -> "Examples":
    """Examples with the number of their class; a label is its name or, if the order was given, its number."""
    numbers = {name: i for i, name in enumerate(names)}
    if ordered and not any(_is_number(name) for name in names):
        numbers |= {str(i): i for i in range(len(names))}
    kept = []
    for row in rows:
        if row.label in numbers:
            kept.append((row.texts, numbers[row.label]))
        else:
            skips.add("with an unknown label", repr(row.label[:30]))
    return kept


Examples = list[tuple[tuple[str, ...], int]]


def read_examples(files: list[SourceFile], labelling: Labelling) -> tuple[dict[str, Examples], list[str], Skips]:
    """Examples by split, the names of the classes, and what was left out. Refused if half of a file is no use."""
    check_columns(labelling.columns, label=True)
    skips, rows = Skips(), dict[str, list[Row]]()
    for file in files:
        before = sum(skips.counts.values())
        found = [row for _, row in read_rows(file, labelling.columns, skips)]
        if sum(skips.counts.values()) - before > len(found) or not found:
            raise UserError(f"{file.path}: {len(found):,} usable rows; left out: {str(skips) or 'none, it is empty'}")
        rows.setdefault(file.split, []).extend(found)
    if len({len(row.texts) for part in rows.values() for row in part}) > 1:
        raise UserError("some of the files have one text in a row, others two: prepare them apart")
    names = label_names(rows, labelling.labels)
    examples = {split: number_labels(part, names, bool(labelling.labels), skips) for split, part in rows.items()}
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
