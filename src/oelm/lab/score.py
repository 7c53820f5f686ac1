"""What arms are judged by: perplexity for language models, accuracy for classifiers.

A score is kept as a number that should be low, in which differences are what is tested: the loss in nats, or the
error in points. How it and its differences are shown is said here alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oelm.config import RunConfig
from oelm.train.metrics import perplexity

HIGHEST = 50.0
"""Losses above it are shown as this one: no axis reaches further."""


def signed(value: float) -> str:
    """With one digit, a real minus, and nothing less than 0.0."""
    return f"{round(value, 1) + 0.0:+.1f}".replace("-", "−")


@dataclass(frozen=True)
class Score:
    name: str
    label: str
    """A column's heading."""
    summary: str
    """Of which figure in a summary it is made, behind final_val_ and test_."""
    criterion: float
    """By default."""
    unit: str

    def of(self, figures: Mapping[str, Any], split: str) -> float:
        """From a run's summary; infinite where there is none."""
        found = figures.get(("final_val_" if split == "val" else "test_") + self.summary)
        return math.inf if found is None else self.from_record(found)

    def from_record(self, figure: float) -> float:
        return figure

    def bar(self, criterion: float) -> float:
        """The largest difference that passes."""
        return math.log(criterion)

    def shown(self, score: float) -> float:
        return perplexity(score)

    def change(self, difference: float) -> float:
        """A difference of scores as people say it: more perplexity in per cent."""
        return 100 * math.expm1(min(difference, 700.0))

    def said(self, difference: float) -> str:
        return signed(self.change(difference))

    def said_bounds(self, low: float, high: float) -> str:
        first, second = sorted((low, high), key=self.change)
        return f" [{self.said(first)}, {self.said(second)}]"

    def text(self, score: float | None) -> str:
        if score is None:
            return ""
        value = self.shown(score)
        return "∞" if score == math.inf else f"{value:.3f}" if value < 100 else f"{value:,.2f}"

    def limit(self, criterion: float) -> str:
        return f"{100 * (criterion - 1):g} %"


class _Accuracy(Score):
    def from_record(self, figure: float) -> float:
        return 100 * (1 - figure)

    def bar(self, criterion: float) -> float:
        return criterion

    def shown(self, score: float) -> float:
        return 100 - score

    def change(self, difference: float) -> float:
        """Points of accuracy: less is worse."""
        return -difference

    def text(self, score: float | None) -> str:
        return "" if score is None else "–" if score == math.inf else f"{100 - score:.2f} %"

    def limit(self, criterion: float) -> str:
        return f"{criterion:g}"


PERPLEXITY = Score("perplexity", "PPL", "loss", 1.05, "%")
ACCURACY = _Accuracy("accuracy", "accuracy", "accuracy", 1.0, "points")


def score_of(config: RunConfig) -> Score:
    """Of a run; a plan may not know yet that its data have labels."""
    return ACCURACY if config.labels else PERPLEXITY


def score_in(summary: Mapping[str, Any]) -> Score:
    return PERPLEXITY if summary.get("final_val_accuracy") is None else ACCURACY
