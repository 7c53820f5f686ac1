"""What the loop asks of a task: batches, loss and evaluation. The loop knows everything else."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from oelm.data.labelled import BucketOrder
from oelm.data.tokens import TokenData, WindowOrder

Batch = tuple[Tensor, ...]

CACHED_TOKENS, MANY_TOKENS = 2_048, 8_192


def evaluation_tokens(device: torch.device) -> int:
    """Tokens of an evaluation batch. On a CPU, what a layer makes of more than these does not fit a cache: 8,192 take
    1.5 x the time of four times 2,048 with MiniLM, 1.15 x with pocket, the same with medium-512."""
    return CACHED_TOKENS if device.type == "cpu" else MANY_TOKENS


@dataclass(frozen=True)
class Evaluation:
    """What a model reached on a whole split."""

    values: dict[str, float]
    """Metrics, `loss` among them."""
    documents: np.ndarray | None = None
    """Rows (summed loss, tokens), one per document, where the data say where documents end."""
    answers: np.ndarray | None = None
    """Rows (label, answer), one per example, where there are labels."""


class Interrupted(Exception):
    """A stop was asked for in the middle of an evaluation."""


class Task(Protocol):
    data: TokenData
    order: WindowOrder | BucketOrder

    def build_model(self) -> nn.Module:
        """The model with its initial weights, on the CPU."""
        ...

    def micro_batches(self, step: int) -> Sequence[Batch]:
        """This process's share of update `step`, a pure function of (seed, step), in equal micro-batches."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss of a micro-batch."""
        ...

    def evaluate(self, model: nn.Module, split: str, stop: Callable[[], bool]) -> Evaluation:
        """The same on every process; may raise Interrupted."""
        ...

    def sample(self, model: nn.Module) -> dict[str, list[int]]:
        """A prompt and what the model makes of it, as token ids; nothing for tasks that do not speak."""
        return {}

    def opening(self) -> list[str]:
        """What people want to know of the data and the model before they wait."""
        return []


class ReadAhead:
    """Reads the next steps' batches in background threads; possible because a batch depends on its step alone."""

    def __init__(self, read: Callable[[int], Sequence[Batch]], workers: int, last: int) -> None:
        self._read, self._last = read, last
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="read-ahead") if workers else None
        self._depth = 2 * workers
        self._ahead: dict[int, Future[Sequence[Batch]]] = {}

    def __call__(self, step: int) -> Sequence[Batch]:
        if self._pool is None:
            return self._read(step)
        for next_step in range(step, min(step + self._depth, self._last) + 1):
            if next_step not in self._ahead:
                self._ahead[next_step] = self._pool.submit(self._read, next_step)
        return self._ahead.pop(step).result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
