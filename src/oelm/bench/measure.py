"""Interleaved measurement: every contender takes a step, then all again, so that what disturbs one disturbs all."""

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from oelm.train.clock import peak_memory

REPEATS = 30
RESAMPLES = 2_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float
    """`low` and `high` are one-sided bounds, each at CONFIDENCE."""


def interleave(
    steps: Mapping[str, Callable[[], object]],
    repeats: int,
    warmup: int = 2,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
    """Seconds of each repeat of each contender; who begins a round changes from round to round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(warmup + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            begin = time.perf_counter()
            steps[name]()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - begin)
            tick()
    return {name: np.array(values) for name, values in seconds.items()}


def ratio(slower: np.ndarray, faster: np.ndarray) -> Interval:
    """How many times faster: the ratio of medians, with bounds from resampled rounds."""
    chance = np.random.default_rng(0)
    drawn = chance.integers(0, len(slower), (RESAMPLES, len(slower)))
    ratios = np.median(slower[drawn], axis=1) / np.median(faster[drawn], axis=1)
    low, high = np.quantile(ratios, (1 - CONFIDENCE, CONFIDENCE))
    return Interval(float(np.median(slower) / np.median(faster)), float(low), float(high))


def gemm(sizes: Sequence[tuple[int, int, int]] = ((2048, 2048, 2048), (4096, 1024, 4096))) -> dict[str, "Gemm"]:
    return {f"gemm {m} x {k} x {n}": Gemm(m, k, n) for m, k, n in sizes}


class Gemm:
    """A plain float32 matrix product: the fastest arithmetic that the machine's library offers."""

    def __init__(self, m: int, k: int, n: int) -> None:
        self.left, self.right, self.out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
        self.flops = 2 * m * k * n

    def __call__(self) -> None:
        torch.mm(self.left, self.right, out=self.out)


def memory_of(function: Callable[..., Callable[[], object]], *arguments: Any, steps: int = 3) -> int:
    """Peak resident bytes of `function(*arguments)` repeated, less those before the first; in its own process."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_peak, args=(send, function, arguments, steps, torch.get_num_threads()))
    process.start()
    send.close()
    try:
        return int(receive.recv())
    except EOFError:
        raise MemoryError("the measured process died: not enough memory?") from None
    finally:
        process.join()


def _peak(send: Any, function: Callable[..., Callable[[], object]], arguments: Any, steps: int, threads: int) -> None:
    torch.set_num_threads(threads)
    step = function(*arguments)
    torch.ones(1).sum()  # what torch loads with its first operations is not the step's
    _forget_peak()
    before = psutil.Process().memory_info().rss
    for _ in range(steps):
        step()
    send.send(peak_memory(torch.device("cpu")) - before)


def _forget_peak() -> None:
    """What was resident while modules were imported may be more than a small step needs (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
