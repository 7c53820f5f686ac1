"""What surrounds the arithmetic: reading batches, evaluating, and sharing a step between two processes.

    oelm prepare tinystories --out data/tinystories-gpt2
    python -m bench.loop_cost --data data/tinystories-gpt2 --out results/bench-loop

Medium-512, 4 x 512 tokens a step. Reading and evaluation are interleaved with training steps in one process;
one process with two threads and two processes (torchrun) with one thread each take turns. Writes PREFIX.json
and PREFIX.md.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench import again, run
from oelm.bench.measure import Apart, interleave, ratio
from oelm.config import RunConfig, resolve
from oelm.data.tokens import TokenData, open_data
from oelm.files import write_atomic
from oelm.machine import cores, tune
from oelm.train import metrics
from oelm.train.distributed import World
from oelm.train.language import LanguageModelling
from oelm.train.step import Update

EVALUATED = 16_384
"""Tokens of an evaluation."""


def inside(config: RunConfig, data: TokenData, repeats: int) -> dict[str, float]:
    """Share of a step that reading its batch takes; tokens per second of evaluation over those of training."""
    world = World(0, 1, torch.device("cpu"))
    cut = replace(data, splits={**data.splits, "val": data.splits["val"][: EVALUATED + 1]})
    task = LanguageModelling(config, cut, world)
    model = task.build_model()
    update = Update(model, config, world, task.loss)
    step = iter(range(10**9))

    def train() -> None:
        update.gradient(next(step), batch)
        update.apply(config.max_lr)

    def evaluate() -> None:
        model.eval()
        task.evaluate(model, "val", lambda: False)

    batch = task.micro_batches(0)
    seconds = interleave(
        {"train": train, "read": lambda: task.micro_batches(next(step)), "evaluate": evaluate}, repeats
    )
    found = ratio(seconds["train"] / config.tokens_per_step, seconds["evaluate"] / EVALUATED)
    return {
        "reading_share": float(np.median(seconds["read"]) / np.median(seconds["train"])),
        "evaluation_over_training": found.value,
        "evaluation_over_training_low": found.low if found.low is not None else math.nan,
    }


def evaluator(config: RunConfig) -> Callable[[], None]:
    """Evaluation of EVALUATED tokens (32 x 512) by a model whose optimizer has its moments already."""
    world = World(0, 1, torch.device("cpu"))
    data = open_data("", config.data_path)
    cut = replace(data, splits={**data.splits, "val": data.splits["val"][: EVALUATED + 1]})
    task = LanguageModelling(config, cut, world)
    model = task.build_model()
    moments = [torch.ones(2, parameter.numel()) for parameter in model.parameters()]

    def evaluate(held: object = moments) -> None:
        model.eval()
        task.evaluate(model, "val", lambda: False)

    tune()
    return evaluate


def processes(config: RunConfig, data: TokenData, rounds: int, steps: int) -> dict[str, float]:
    """Speed of two processes with one thread each over one process with two threads, the same batch in all."""
    medians: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as place:
        short = Path(place) / "data"  # a run ends with a validation, which is not what is timed here
        short.mkdir()
        (short / "train.bin").symlink_to((data.folder / "train.bin").resolve())
        data.splits["val"][: config.seq_len + 1].tofile(short / "val.bin")
        for turn in range(rounds):
            for size in (1, 2) if turn % 2 == 0 else (2, 1):
                out = Path(place) / f"{turn}-{size}"
                torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}"]
                flags = {"data_path": short, "dropout": 0.0, "max_steps": steps, "threads": 2 // size,
                         "batch_size": config.batch_size // size,
                         "out_dir": out, "device": "cpu"}  # fmt: skip
                words = [f"--{key}={value}" for key, value in flags.items()]
                command = [sys.executable, *(torchrun if size > 1 else []), "-m", "oelm", "train", *words]
                subprocess.run(command, check=True, capture_output=True)
                times = [record["seconds"] for record in metrics.read(out / "metrics.jsonl", "train")]
                medians[size].append(float(np.median(times[2:])))
    ratios = [one / two for one, two in zip(medians[1], medians[2], strict=True)]
    return {"two_processes_over_one": float(np.median(ratios)), "lowest": min(ratios), "highest": max(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="prepared tokens of GPT-2's vocabulary")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(cores())
    tune()
    data = open_data("", options.data)
    config = resolve({"data_path": options.data, "batch_size": 4, "dropout": 0.0})
    found = inside(config, data, options.repeats)
    print(json.dumps(found, indent=2), flush=True)
    with Apart(evaluator, config) as evaluation:
        evaluation.settled_turn()
        found["evaluation_gigabytes"] = evaluation.memory() / 1e9
    found |= processes(config, data, options.rounds, options.steps)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out.with_name(f"{options.out.name}.json"), json.dumps(found, indent=2))
    text = (
        f"# Around the arithmetic\n\nMedium-512, 4 x 512 tokens a step, dropout 0, {cores()} cores.\n\n"
        "| figure | value |\n|---|---|\n"
        f"| reading a batch, share of a step | {found['reading_share']:.2%} |\n"
        f"| evaluation, tokens/s over training's | {found['evaluation_over_training']:.2f} "
        f"(lower 95 % bound {found['evaluation_over_training_low']:.2f}) |\n"
        f"| peak memory of evaluating 32 x 512 tokens, over weights and optimizer | "
        f"{found['evaluation_gigabytes']:.2f} GB |\n"
        f"| 2 processes x 1 thread over 1 process x 2 threads | {found['two_processes_over_one']:.3f} "
        f"({options.rounds} rounds: {found['lowest']:.3f} to {found['highest']:.3f}) |\n{again('loop_cost', options)}"
    )
    write_atomic(options.out.with_name(f"{options.out.name}.md"), text)
    print(text)


if __name__ == "__main__":
    run(main)
