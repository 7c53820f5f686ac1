"""Have a run classify: a sentence or a pair, or the rows of a file."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch

from oelm.data.documents import SourceFile, format_of
from oelm.data.examples import Skips, check_columns, read_rows
from oelm.data.tokenizer import Template
from oelm.errors import UserError
from oelm.generate import load_run
from oelm.train.classify import class_logits, pad
from oelm.train.folder import RunFolder

BATCH = 32


@dataclass(frozen=True)
class Answer:
    label: str
    shares: dict[str, float]
    """Probability of each class."""

    def as_json(self) -> dict[str, Any]:
        return {"answer": self.label, **{f"p_{name}": round(share, 6) for name, share in self.shares.items()}}


class Classifier:
    """A run's model with what it needs to read texts."""

    def __init__(self, run: Path, which: str = "last", device: str = "auto") -> None:
        folder = RunFolder(run)
        self.config = folder.config()
        if not self.config.labels:
            raise UserError(f"{run} is a language model: let it speak with oelm generate")
        loaded = load_run(run, which, device, lambda line: print(line, file=sys.stderr))
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        try:
            self.template, self.pair = Template(**loaded.data["template"]), bool(loaded.data["pair"])
            self.labels = [str(name) for name in loaded.data["labels"]]
            assert len(self.labels) == self.config.labels
        except (KeyError, TypeError, AssertionError):
            raise UserError(f"the checkpoint in {run} does not say what its classes are") from None
        self.device = next(self.model.parameters()).device
        self.cut = 0
        """Texts so far that were longer than the model reads."""

    def warn(self) -> None:
        if self.cut:
            texts = f"{self.cut:,} text{'s were' if self.cut > 1 else ' was'} longer than {self.config.seq_len} tokens"
            print(f"WARNING: {texts}, and cut at the end", file=sys.stderr)

    @torch.inference_mode()
    def answer(self, texts: Sequence[Sequence[str]]) -> list[Answer]:
        """The classes of some texts, or pairs of texts, as the run was trained on."""
        if any(len(some) != 1 + self.pair for some in texts):
            raise UserError(
                f"the run was trained on {'pairs of texts' if self.pair else 'single texts'}: give it those"
            )
        encoded = [[self.tokenizer.encode_array(text.strip()) for text in some] for some in texts]
        room = self.config.seq_len - self.template.length(self.pair)
        self.cut += sum(sum(map(len, some)) > room for some in encoded)
        examples = [self.template.join(some, self.config.seq_len) for some in encoded]
        batch = tuple(tensor.to(self.device) for tensor in pad(examples, self.template.pad))
        shares = class_logits(self.model, batch).float().softmax(-1).tolist()
        return [
            Answer(self.labels[max(range(len(row)), key=row.__getitem__)], dict(zip(self.labels, row, strict=True)))
            for row in shares
        ]


def predict_file(classifier: Classifier, path: Path, columns: Sequence[str], out: TextIO) -> Skips:
    """One JSON line per row: the row, its answer and the probabilities; returns what was left out."""
    skips = Skips()
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    check_columns(columns, label=False)
    answered = 0
    rows = read_rows(SourceFile(path, "test", format_of(path)), columns, skips, labelled=False)
    while some := list(islice(rows, BATCH)):
        for (record, _), answer in zip(some, classifier.answer([row.texts for _, row in some]), strict=True):
            told = answer.as_json()
            if lost := record.keys() & told.keys():
                raise UserError(f"{path} has a column {min(lost)}, which the answers would take: rename it")
            out.write(json.dumps({**record, **told}, ensure_ascii=False, default=str) + "\n")
            answered += 1
    if not answered:
        raise UserError(f"no row of {path} could be answered{f'; left out: {skips}' if skips.counts else ''}")
    return skips
