"""The report's pictures: matplotlib to SVG, text kept as text so that the reader's own fonts show it."""

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from oelm.lab.score import Score, signed
from oelm.lab.stats import Gap
from oelm.lab.study import Setting

INK = "#333333"
COLOURS = ("#333333", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
"""Told apart by colour-blind readers too (Okabe and Ito); the baseline is the ink's colour."""
VERDICTS = {"PASS": "#18794e", "FAIL": "#b42318", "INCONCLUSIVE": "#8a5a00"}
STYLE: Any = {
    "svg.fonttype": "none", "text.parse_math": False,
    "svg.hashsalt": "oelm", "font.family": "sans-serif", "font.size": 10,
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#999999",
    "grid.alpha": 0.3, "legend.frameon": False, "figure.facecolor": "none", "axes.facecolor": "none",
}  # fmt: skip
WIDTH = 5.6
"""Inches; narrow enough for the labels to be read where a telephone shrinks the picture to its width."""
Curve = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""x, middle, low, high."""


@contextmanager
def drawing(width: float, height: float) -> Iterator[tuple[Figure, Any]]:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.subplots()


def svg(figure: Figure) -> str:
    out = io.StringIO()
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the reader's font has them
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"^.*?(?=<svg)", "", out.getvalue(), count=1, flags=re.DOTALL)


def colours(setting: Setting) -> dict[str, str]:
    """The same arm has the same colour in every picture of a setting."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(setting.arms)}


def gaps(rows: Sequence[tuple[str, Gap]], score: Score, criterion: float, label: str, limit: str) -> str:
    """Gap per arm with its bounds, and the line that decides."""
    with drawing(WIDTH, 0.9 + 0.42 * len(rows)) as (figure, ax):
        for y, (_, gap) in enumerate(rows):
            colour = VERDICTS[gap.verdict]
            low, high, centre = (score.change(difference) for difference in (gap.low, gap.high, gap.mean))
            if gap.n > 1:
                ax.plot([low, high], [y, y], color=colour, linewidth=2, solid_capstyle="butt")
            ax.plot([centre], [y], "o", color=colour, markersize=7)
        bar = score.change(score.bar(criterion))
        ax.axvline(0, color=INK, linewidth=1)
        ax.axvline(bar, color=VERDICTS["FAIL"], linewidth=1.2, linestyle="--")
        ax.annotate(limit, (bar, 1.0), xycoords=("data", "axes fraction"), xytext=(4, 2), textcoords="offset points",
                    fontsize=8.5, color=VERDICTS["FAIL"])  # fmt: skip
        _horizontal(ax, [name for name, _ in rows], label)
        return svg(figure)


def short(name: str, most: int = 40) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _horizontal(ax: Axes, names: Sequence[str], label: str) -> None:
    ax.set_yticks(range(len(names)), [short(name) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(label)


def curves(
    found: Mapping[str, Curve], shades: Mapping[str, str], x_label: str, y_label: str, logarithmic: bool = True
) -> str:
    """A score over training, with bands over seeds; perplexity on a logarithmic axis."""
    with drawing(WIDTH, _height(found)) as (figure, ax):
        lines = _lines([shades[name] for name in found])
        for (name, (x, middle, low, high)), line in zip(found.items(), lines, strict=True):
            ax.plot(x, middle, line, color=shades[name], label=name, linewidth=1.6)
            ax.fill_between(x, low, high, color=shades[name], alpha=0.18, linewidth=0)
        if logarithmic:
            _logarithmic(ax, np.concatenate([middle for _, middle, _, _ in found.values()]))
        labels(ax, x_label, y_label)
        _legend(ax)
        return svg(figure)


def _lines(shades: Sequence[str]) -> list[str]:
    """Where there are more curves than colours, what tells those of one colour apart."""
    styles = ("-", "--", ":", "-.")
    return [styles[shades[:i].count(shade) % len(styles)] for i, shade in enumerate(shades)]


def _logarithmic(ax: Axes, values: np.ndarray) -> None:
    ax.set_yscale("log")
    low, high = float(values.min()), float(values.max())
    wide = [m * 10.0**e for e in range(-2, 8) for m in (1, 2, 5)]
    ticks = [t for t in (wide if high > 8 * low else MaxNLocator(6).tick_values(low, high)) if low <= t <= high]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()


def labels(ax: Axes, x_label: str, y_label: str) -> None:
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label, rotation_mode="anchor", horizontalalignment="center")


def _height(found: Sized) -> float:
    """Inches, enough for the legend beside the picture."""
    return max(3.6, 0.2 * len(found) + 0.4)


def _legend(ax: Axes) -> None:
    """Beside the picture, where it hides nothing."""
    ax.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))


def rates(found: Mapping[str, Mapping[float, float]], chosen: Mapping[str, float | None], shades: Mapping[str, str],
          x_label: str, y_label: str, better: int = -1) -> str:  # fmt: skip
    """Final validation score over the learning rate; the chosen one is filled, one that diverged a cross as bad as the
    worst. `better`: up or down."""
    with drawing(WIDTH, _height(found)) as (figure, ax):
        ended = [v for by_rate in found.values() for v in by_rate.values() if v < math.inf]
        worst = min(ended or [1.0], key=lambda v: v * better)
        lines = _lines([shades[name] for name in found])
        for (name, by_rate), line in zip(found.items(), lines, strict=True):
            x = sorted(by_rate)
            kept = [rate for rate in x if by_rate[rate] < math.inf]
            ax.plot(kept, [by_rate[r] for r in kept], f"o{line}", color=shades[name], mfc="none", label=name)
            lost = [rate for rate in x if by_rate[rate] == math.inf]
            ax.plot(lost, [worst] * len(lost), "x", color=shades[name])
            rate = chosen.get(name)
            if rate is not None and by_rate[rate] < math.inf:
                ax.plot([rate], [by_rate[rate]], "o", color=shades[name])
        ax.set_xscale("log")
        ticks = sorted({rate for by_rate in found.values() for rate in by_rate})
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()
        labels(ax, x_label, y_label)
        _legend(ax)
        return svg(figure)


def waterfall(steps: Sequence[tuple[str, float, float]], label: str, better: int = -1) -> str:
    """Bars from where one arm stands to where the next does; `steps` are (label, from, to), `better` up or down."""
    with drawing(WIDTH, 0.9 + 0.45 * len(steps)) as (figure, ax):
        ends = [x for _, *pair in steps for x in pair]
        span = max(ends) - min(ends)
        for y, (_, start, end) in enumerate(steps):
            colour = VERDICTS["PASS"] if (end - start) * better > 0 else VERDICTS["FAIL"]
            ax.barh(y, end - start, left=start, color=colour, alpha=0.55, height=0.6)
            inside = abs(end - start) > 0.12 * span  # else there is no room for the number in the bar
            place = dict(ha="center") if inside else dict(ha="left", xytext=(5, 0), textcoords="offset points")
            at = (start + end) / 2 if inside else max(start, end)
            ax.annotate(signed(end - start), (at, y), va="center", fontsize=9, **place)
            if y + 1 < len(steps):
                ax.plot([end, end], [y + 0.3, y + 0.7], color=INK, linewidth=0.8)
        ax.axvline(0, color=INK, linewidth=1)
        _horizontal(ax, [name for name, _, _ in steps], label)
        return svg(figure)


def speedups(
    rows: Sequence[tuple[str, float, float | None, float | None, float | None]], label: str, bound_label: str
) -> str:
    """Bars with bounds; `rows` are (name, value, low, high, what arithmetic allows at most or None)."""
    with drawing(WIDTH, 0.9 + 0.42 * len(rows)) as (figure, ax):
        for y, (_, value, low, high, bound) in enumerate(rows):
            ax.barh(y, value, color=COLOURS[1] if y else INK, alpha=0.6, height=0.6)
            if low is not None and high is not None:
                ax.plot([low, high], [y, y], color=INK, linewidth=1.6, solid_capstyle="butt")
            ax.annotate(f"{value:.3f}", (0, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
            if bound is not None and bound != 1:
                marker = dict(color=VERDICTS["FAIL"], markersize=12, markeredgewidth=1.6)
                ax.plot([bound], [y], "|", **marker)
        ax.axvline(1, color=INK, linewidth=1, linestyle="--")
        _horizontal(ax, [name for name, *_ in rows], label)
        if any(bound not in (None, 1) for *_, bound in rows):  # a legend beside the bars would look like one of them
            ax.annotate(f"| {bound_label}", (1, 0), xycoords="axes fraction", xytext=(0, -32), ha="right",
                        textcoords="offset points", color=VERDICTS["FAIL"])  # fmt: skip
        return svg(figure)


def trend(
    settings: Sequence[str], found: Mapping[str, Sequence[Gap | None]], score: Score, criterion: float, y_label: str
) -> str:
    """Gap per arm from setting to setting."""
    with drawing(WIDTH, _height(found)) as (figure, ax):
        for i, (name, row) in enumerate(found.items()):
            shift = 0.08 * (i - (len(found) - 1) / 2)
            colour = COLOURS[(i + 1) % len(COLOURS)]
            points = [(x + shift, gap) for x, gap in enumerate(row) if gap is not None]
            for x, gap in points:
                if gap.n > 1:
                    ends = [score.change(bound) for bound in (gap.low, gap.high)]
                    ax.plot([x, x], ends, color=colour, linewidth=1.6)
            centres = [score.change(gap.mean) for _, gap in points]
            ax.plot([x for x, _ in points], centres, "o--", color=colour, label=name)
        ax.axhline(score.change(score.bar(criterion)), color=VERDICTS["FAIL"], linewidth=1.2, linestyle="--")
        ax.axhline(0, color=INK, linewidth=1)
        ax.set_xticks(range(len(settings)), [short(name, 80 // len(settings)) for name in settings])
        labels(ax, "", y_label)
        _legend(ax)
        return svg(figure)


def run_curve(train: Sequence[tuple[int, float]], val: Sequence[tuple[int, float]], label: str) -> str:
    """A small picture of one run's losses, drawn by hand: two hundred of them must cost nothing."""
    width, height, left, bottom = 420, 150, 44, 22
    points = [*thin(train), *val]
    right, low, high = max(x for x, _ in points), min(y for _, y in points), max(y for _, y in points)
    high = high if high > low else low + 1

    def place(curve: Sequence[tuple[int, float]]) -> str:
        return " ".join(
            f"{left + (width - left - 4) * x / right:.1f},{6 + (height - bottom - 6) * (high - y) / (high - low):.1f}"
            for x, y in curve
        )

    texts = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" style="font: 10px sans-serif; fill: {INK}">{escape(text)}</text>'
        for x, y, anchor, text in (
            (left - 5, 14, "end", f"{high:.2f}"), (left - 5, height - bottom, "end", f"{low:.2f}"),
            (left, height - 7, "middle", "0"), (width - 4, height - 7, "end", f"{right:,}"),
            ((left + width) // 2, height - 7, "middle", label),
        )
    )  # fmt: skip
    axis = f'<path d="M{left} 6V{height - bottom}H{width - 4}" style="fill: none; stroke: {INK}"/>'
    lines = (
        f'<polyline points="{place(thin(train))}" style="fill: none; stroke: #56B4E9"/>'
        f'<polyline points="{place(val)}" style="fill: none; stroke: #D55E00; stroke-width: 2"/>'
    )
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{axis}{lines}{texts}</svg>'


def thin(curve: Sequence[tuple[int, float]], most: int = 150) -> list[tuple[int, float]]:
    """At most `most` points, each the mean of its neighbours."""
    size = max(1, math.ceil(len(curve) / most))
    groups = [curve[i : i + size] for i in range(0, len(curve), size)]
    return [(group[len(group) // 2][0], sum(y for _, y in group) / len(group)) for group in groups]
