"""Differences and lists as a report writes them."""

from oelm.lab import announce
from oelm.lab.score import Score
from oelm.lab.stats import Gap
from oelm.report.words import Words


def show_gap(gap: Gap, score: Score, w: Words, unit: str = "") -> str:
    return announce.show_gap(gap, score, unit, w("one_seed"))


def listed(names: list[str], w: Words) -> str:
    return ("、" if w.language == "zh" else ", ").join(names)
