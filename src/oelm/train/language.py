"""The language-modelling task: windows of tokens, next-token loss, token-weighted perplexity."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oelm.config import RunConfig
from oelm.data.tokens import TokenData, WindowOrder, read_windows
from oelm.model.gpt import build_gpt
from oelm.train.distributed import World
from oelm.train.task import Batch, Interrupted

EVAL_TOKENS = 8_192
"""Tokens per evaluation batch."""


class LanguageModelling:
    def __init__(self, config: RunConfig, data: TokenData, world: World) -> None:
        self.config, self.data, self.world = config, data, world
        self.order = WindowOrder(len(data.splits["train"]), config.seq_len, config.windows_per_step, config.seed)

    def build_model(self) -> nn.Module:
        return build_gpt(self.config)

    def micro_batches(self, step: int) -> Sequence[Batch]:
        config = self.config
        mine = self.order.starts(step)[self.world.rank * config.batch_size :][: config.batch_size]
        windows = torch.from_numpy(read_windows(self.data.splits["train"], mine, config.seq_len))
        return [(part[:, :-1], part[:, 1:]) for part in windows.split(config.micro_batch or config.batch_size)]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(*batch)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, split: str, stop: Callable[[], bool]) -> dict[str, float]:
        """Every token but the first is predicted once, from at most seq_len tokens before it."""
        tokens, seq_len, world = self.data.splits[split], self.config.seq_len, self.world
        rows = max(1, EVAL_TOKENS // seq_len)
        predicted = len(tokens) - 1
        whole = predicted // seq_len
        batches = [(first, min(rows, whole - first)) for first in range(0, whole, rows)]
        if predicted % seq_len:
            batches.append((whole, 0))
        total = 0.0
        for index in range(0, len(batches), world.size):
            if world.any(stop()):
                raise Interrupted
            if index + world.rank < len(batches):
                first, count = batches[index + world.rank]
                start = first * seq_len
                length = seq_len if count else predicted - start
                starts = start + seq_len * torch.arange(max(1, count)).numpy()
                windows = torch.from_numpy(read_windows(tokens, starts, length)).to(world.device)
                total += model(windows[:, :-1], windows[:, 1:], reduction="sum").item()
        loss = world.sum(total)[0] / predicted
        return {"loss": loss, **derived(loss, self.data.tokens_per_byte(split)), "tokens": predicted}

    def has_split(self, split: str) -> bool:
        return split in self.data.splits

    def epochs(self, steps: int) -> float:
        return self.order.epochs(steps)

    def identity(self) -> dict[str, Any]:
        return self.data.identity()


def derived(loss: float, tokens_per_byte: float | None) -> dict[str, float]:
    """Perplexity per token, and bits per byte where the number of bytes is known."""
    values = {"ppl": math.exp(min(loss, 700.0))}
    if tokens_per_byte is not None:
        values["bpb"] = loss / math.log(2) * tokens_per_byte
    return values
