"""The language-modelling task: windows of tokens, next-token loss, token-weighted perplexity."""

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from oelm.config import RunConfig
from oelm.data.tokens import TokenData, WindowOrder, read_windows
from oelm.model.build import build_model
from oelm.model.gpt import GPT
from oelm.model.sample import sample
from oelm.train.distributed import World
from oelm.train.metrics import perplexity
from oelm.train.task import Batch, Evaluation, Interrupted, Task, evaluation_tokens

PROMPT_TOKENS, SAMPLE_TOKENS = 16, 120


class LanguageModelling(Task):
    def __init__(self, config: RunConfig, data: TokenData, world: World) -> None:
        self.config, self.data, self.world = config, data, world
        self.order = WindowOrder(len(data.splits["train"]), config.seq_len, config.windows_per_step, config.seed)

    def build_model(self) -> nn.Module:
        return build_model(self.config)

    def micro_batches(self, step: int) -> Sequence[Batch]:
        config = self.config
        mine = self.order.starts(step)[self.world.rank * config.batch_size :][: config.batch_size]
        windows = torch.from_numpy(read_windows(self.data.splits["train"], mine, config.seq_len))
        return [(part[:, :-1], part[:, 1:]) for part in windows.split(config.micro_batch or config.batch_size)]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(*batch)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, split: str, stop: Callable[[], bool]) -> Evaluation:
        """Every token but the first is predicted once, from at most seq_len tokens before it."""
        tokens, seq_len, world = self.data.splits[split], self.config.seq_len, self.world
        rows = max(1, evaluation_tokens(world.device) // seq_len)
        predicted = len(tokens) - 1
        whole = predicted // seq_len
        batches = [(first, min(rows, whole - first)) for first in range(0, whole, rows)]
        if predicted % seq_len:
            batches.append((whole, 0))
        total = 0.0
        documents = _DocumentSums(tokens, self.data.end_of_text if split == "test" else None)
        for index in range(0, len(batches), world.size):
            if world.any(stop()):
                raise Interrupted
            if index + world.rank < len(batches):
                first, count = batches[index + world.rank]
                start = first * seq_len
                length = seq_len if count else predicted - start
                starts = start + seq_len * torch.arange(max(1, count)).numpy()
                windows = torch.from_numpy(read_windows(tokens, starts, length)).to(world.device)
                losses = model(windows[:, :-1], windows[:, 1:], reduction="none").cpu().double().numpy()
                total += float(losses.sum())
                documents.add(start + 1, losses)
        loss = world.sum(total)[0] / predicted
        values = {"loss": loss, **derived(loss, self.data.tokens_per_byte(split)), "tokens": predicted}
        return Evaluation(values, documents.rows(world))

    def sample(self, model: nn.Module) -> dict[str, list[int]]:
        """How the model goes on from the first words of the validation split; the same prompt for every arm."""
        prompt = self.data.splits["val"][:PROMPT_TOKENS].tolist()
        ids = sample(cast(GPT, model), prompt, SAMPLE_TOKENS, temperature=0.8, top_k=50, top_p=1.0, seed=0)
        return {"prompt": prompt, "sample": list(ids)}


class _DocumentSums:
    """Adds losses of single tokens up to sums per document. A document ends with its end-of-text token."""

    def __init__(self, tokens: np.ndarray, end_of_text: int | None) -> None:
        self.ends = np.empty(0, dtype=np.int64)
        if end_of_text is not None:
            self.ends = np.flatnonzero(tokens == end_of_text)
        self.sums = np.zeros((len(self.ends) + 1, 2))

    def add(self, first: int, losses: np.ndarray) -> None:
        """`losses` of the tokens at `first`, `first` + 1, …"""
        index = np.searchsorted(self.ends, np.arange(first, first + len(losses)))
        low, count = index[0], index[-1] - index[0] + 1
        self.sums[low : low + count, 0] += np.bincount(index - low, losses, minlength=count)
        self.sums[low : low + count, 1] += np.bincount(index - low, minlength=count)

    def rows(self, world: World) -> np.ndarray | None:
        if len(self.ends) < 2:
            return None
        rows = np.array(world.sum(*self.sums.ravel().tolist())).reshape(-1, 2)
        return rows[rows[:, 1] > 0]


def derived(loss: float, tokens_per_byte: float | None) -> dict[str, float]:
    """Perplexity per token, and bits per byte where the number of bytes is known."""
    values = {"ppl": perplexity(loss)}
    if tokens_per_byte is not None:
        values["bpb"] = loss / math.log(2) * tokens_per_byte
    return values
