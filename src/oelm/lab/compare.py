"""Validation curves of a few runs side by side, as a table and as a chart of characters."""

import math
from collections.abc import Callable
from pathlib import Path

from oelm.errors import UserError
from oelm.lab.score import PERPLEXITY, score_of
from oelm.lab.watch import make_console
from oelm.tables import table
from oelm.train import metrics
from oelm.train.folder import RunFolder


def compare_runs(runs: list[Path]) -> None:
    """A table of validation losses at common steps, and the curves as a chart of characters."""
    console = make_console()
    curves: dict[str, dict[int, float]] = {}
    """Scores by step."""
    alone = {run: sum(other.resolve().name == run.resolve().name for other in runs) == 1 for run in runs}
    shapes = set()
    for run in runs:
        config = RunFolder(run).config()
        score = score_of(config)
        shapes.add((score, config.dataset, config.vocab_size, config.d_model, config.num_layers, config.seq_len))
        name = run.resolve().name if alone[run] else str(run)
        curves[name] = {
            r["step"]: score.from_record(r[score.summary])
            for r in metrics.read(RunFolder(run).metrics, "val")
            if isinstance(r.get(score.summary), float) and math.isfinite(r[score.summary])
        }
        if not curves[name]:
            raise UserError(f"{run} has no validation yet: there is nothing to compare")
    common = sorted(set.intersection(*(set(curve) for curve in curves.values())))
    if not common:
        raise UserError("the runs have no validated step in common: compare runs with the same val_interval")
    shown = common if len(common) <= 12 else [common[round(i * (len(common) - 1) / 11)] for i in range(12)]
    names, rows = list(curves), []
    for step in shown:
        gaps = (f"{score.said(curves[name][step] - curves[names[0]][step])} {score.unit}" for name in names[1:])
        rows.append([f"{step:,}", *(score.text(curves[name][step]) for name in names), *gaps])
    headings = ["step", *(f"{name} {score.label}" for name in names), *(f"{name} vs {names[0]}" for name in names[1:])]
    console.print(table(headings, rows))
    if score is not PERPLEXITY:  # better is higher up
        curves = {name: {step: -value for step, value in curve.items()} for name, curve in curves.items()}
    text = score.text if score is PERPLEXITY else lambda value: score.text(-value)
    console.print(chart(curves, text, min(72, console.width - 14)))
    if len(shapes) > 1:
        console.print("The runs differ in data, task or model shape: their scores cannot be set against each other.")


def chart(curves: dict[str, dict[int, float]], shown: Callable[[float], str], width: int = 72, height: int = 16) -> str:
    """Curves of scores over steps: losses, so that perplexity's axis is logarithmic, or errors."""
    marks = "ox+*#@%&"
    points = [(step, value) for curve in curves.values() for step, value in curve.items()]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    grid = [[" "] * width for _ in range(height)]
    for mark, curve in zip(marks * len(curves), curves.values(), strict=False):
        for step, value in curve.items():
            column = round((step - left) / max(1, right - left) * (width - 1))
            row = round((high - value) / max(1e-9, high - low) * (height - 1))
            grid[row][column] = mark
    labels = [f"{shown(high):>10}", *[" " * 10] * (height - 2), f"{shown(low):>10}"]
    lines = [f"{label} ┤{''.join(row)}" for label, row in zip(labels, grid, strict=True)]
    lines.append(" " * 11 + "└" + "─" * width)
    lines.append(" " * 12 + f"{left:,}".ljust(width - 10) + f"{right:,}".rjust(10))
    lines.append(" " * 12 + "   ".join(f"{m} {n}" for m, n in zip(marks * len(curves), curves, strict=False)))
    return "\n".join(lines)
