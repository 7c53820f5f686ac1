"""How a 57 % speed-up can be measured where none is: time half of a batch and call it a step.

    python -m bench.half_batches --arch ENCODER --out results/bench-half-batches

The baseline and oelm_v2 of one encoder, interleaved: the same batch for both, then the baseline's whole batch against
oelm_v2's half. Writes PREFIX.json and PREFIX.md.
"""

import argparse
import json
from contextlib import ExitStack
from pathlib import Path

import torch

from bench import again, run
from oelm.bench.contest import configure, contender
from oelm.bench.measure import Apart, interleave, ratio
from oelm.files import write_atomic
from oelm.machine import cores
from oelm.model.cost import speed_bound

CONTENDERS = {"baseline, whole batch": ("baseline", 1), "oelm_v2, whole batch": ("oelm_v2", 1),
              "oelm_v2, half batch": ("oelm_v2", 2)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", required=True)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--seq_len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(cores())
    with ExitStack() as stack:
        steps = {}
        for name, (arm, part) in CONTENDERS.items():
            settings = {"arch": options.arch, "batch_size": options.batch_size // part, "seq_len": options.seq_len}
            config = configure("encoder", settings, arm)
            steps[name] = stack.enter_context(Apart(contender, arm, config))
        seconds = interleave(steps, options.repeats)
    first = next(iter(CONTENDERS))
    found = {name: ratio(seconds[first], times) for name, times in seconds.items()}
    bound = speed_bound(configure("encoder", {"arch": options.arch, "seq_len": options.seq_len}, "oelm_v2"))
    rows = "".join(
        f"| {name} | {1000 * float(torch.tensor(seconds[name]).median()):.0f} | {ratio_} | "
        f"{1 - 1 / ratio_.value:.0%} |\n"
        for name, ratio_ in found.items()
    )
    text = (
        f"# Half a batch, called a step\n\n{options.arch}, batch {options.batch_size} x {options.seq_len} tokens, "
        f"{options.repeats} interleaved repeats, {cores()} cores. Freezing Q/K allows {bound:.3f} x at most.\n\n"
        f"| timed | ms | speed-up | 'time saved' |\n|---|---|---|---|\n{rows}{again('half_batches', options)}"
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out.with_name(f"{options.out.name}.md"), text)
    numbers = {name: list(times) for name, times in seconds.items()}
    write_atomic(options.out.with_name(f"{options.out.name}.json"), json.dumps({"seconds": numbers}, indent=1))
    print(text)


if __name__ == "__main__":
    run(main)
