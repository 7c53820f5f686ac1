"""Differences and lists as a report writes them."""

from oelm.lab.score import Score
from oelm.lab.stats import Gap
from oelm.report.words import Words


def show_gap(gap: Gap, score: Score, w: Words, unit: str = "") -> str:
    return said(gap.mean, score) + unit + (bounds(gap.low, gap.high, score) if gap.n > 1 else w("one_seed"))


def bounds(low: float, high: float, score: Score) -> str:
    first, second = sorted((low, high), key=score.change)
    return f" [{said(first, score)}, {said(second, score)}]"


def said(difference: float, score: Score) -> str:
    """A difference of scores as people say it, with a real minus."""
    return f"{round(score.change(difference), 1) + 0.0:+.1f}".replace("-", "−")


def listed(names: list[str], w: Words) -> str:
    return ("、" if w.language == "zh" else ", ").join(names)
