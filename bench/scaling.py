"""Time per token of a training step against its arithmetic: over the context length and over the width.

    python -m bench.scaling --out results/bench-scaling

All sizes are interleaved, 2,048 tokens a step, GPT-2's vocabulary. Writes PREFIX.json, PREFIX.md and PREFIX.svg.
If everything ran at one speed, the points would lie on a line through the origin. The last column is the share of the
matrix-product peak, which is measured between them.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import again
from oelm.bench.contest import arithmetic, configure, contender
from oelm.bench.measure import gemm, interleave, peak
from oelm.files import write_atomic
from oelm.machine import cores
from oelm.report import figures

TOKENS = 2_048
SIZES = [
    *((f"context {length}", dict(seq_len=length)) for length in (256, 512, 1024, 2048)),
    *((f"width {width}", dict(d_model=width, num_heads=width // 64, d_ff=4 * width)) for width in (128, 256, 384, 768)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(cores())
    settings = {name: {**size, "batch_size": TOKENS // size.get("seq_len", 512)} for name, size in SIZES}
    steps = {name: contender("baseline", configure("medium-512", values)) for name, values in settings.items()}
    products = gemm()
    seconds = interleave({**steps, **products}, options.repeats, warmup=1)
    best = peak(products, seconds)
    rows: list[tuple[str, float, float]] = []
    for name, values in settings.items():
        flops = arithmetic(configure("medium-512", values), "medium-512", causal=True) / TOKENS
        rows.append((name, flops / 1e6, 1e6 * float(np.median(seconds[name])) / TOKENS))
    table = "\n".join(
        f"| {size} | {work:.0f} | {time:.0f} | {1000 * work / time:.0f} | {1e12 * work / time / best:.0%} |"
        for size, work, time in rows
    )
    found = [{"size": size, "megaflop": work, "microseconds": time} for size, work, time in rows]
    name = options.out.name
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(
        options.out.with_name(f"{name}.json"),
        json.dumps({"repeats": options.repeats, "gemm_peak": best, "sizes": found}, indent=2),
    )
    write_atomic(options.out.with_name(f"{name}.svg"), proportional(rows, "MFLOP per token", "µs per token"))
    text = (
        f"# Time per token against arithmetic\n\nMedium-512 with one size changed, {TOKENS:,} tokens a step, "
        f"{torch.get_num_threads()} threads, medians of {options.repeats} interleaved repeats; GEMM peak "
        f"{best / 1e9:.0f} GFLOP/s in the same run.\n\n"
        f"| size | MFLOP per token | µs per token | GFLOP/s | of peak |\n|---|---|---|---|---|\n{table}\n\n"
        f"![time]({name}.svg)\n{again('scaling', options)}"
    )
    write_atomic(options.out.with_name(f"{name}.md"), text)
    print(text)


def proportional(points: Sequence[tuple[str, float, float]], x_label: str, y_label: str) -> str:
    """Named points, and the line through the origin that fits them best."""
    x, y = (np.array([point[i] for point in points]) for i in (1, 2))
    slope = float((x * y).sum() / (x * x).sum())
    with figures.drawing(figures.WIDTH, 3.6) as (figure, ax):
        ax.plot([0, x.max()], [0, slope * x.max()], color=figures.INK, linewidth=1, linestyle="--")
        ax.plot(x, y, "o", color=figures.COLOURS[1])
        for name, at_x, at_y in points:  # names are on the points' side of the line
            above = at_y > slope * at_x
            side: dict[str, Any] = dict(xytext=(-5, 4), ha="right") if above else dict(xytext=(5, -9))
            ax.annotate(name, (at_x, at_y), textcoords="offset points", fontsize=8, **side)
        ax.set_xlim(0, 1.2 * x.max())
        ax.set_ylim(0, 1.1 * y.max())
        figures.labels(ax, x_label, y_label)
        return figures.svg(figure)


if __name__ == "__main__":
    main()
