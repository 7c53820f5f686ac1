"""The classification task: sentences or pairs with labels, padded batches of like length, accuracy and macro-F1."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm import encoders
from oelm.config import RunConfig
from oelm.data.labelled import BucketOrder, LabelledData
from oelm.model.build import build_model
from oelm.model.encoder import Change, audit_lines, build_encoder
from oelm.train.distributed import World
from oelm.train.metrics import macro_f1
from oelm.train.task import Batch, Evaluation, Interrupted, Task, evaluation_tokens


class Classification(Task):
    data: LabelledData
    order: BucketOrder

    def __init__(self, config: RunConfig, data: LabelledData, world: World) -> None:
        self.config, self.data, self.world = config, data, world
        self.lengths = {split: data.lengths(split, config.seq_len) for split in data.rows}
        self.order = BucketOrder(self.lengths["train"], config.windows_per_step, config.seed)
        self.changes: list[Change] = []

    def build_model(self) -> nn.Module:
        if self.config.arch == encoders.GPT:
            return build_model(self.config)
        model, self.changes = build_encoder(self.config)
        return model

    def opening(self) -> list[str]:
        cut = {split: self.data.cut(split, self.config.seq_len) for split in self.data.rows}
        lines = [f"labels: {', '.join(f'{i} = {name}' for i, name in enumerate(self.data.labels))}"]
        if any(cut.values()):
            shown = ", ".join(f"{n:,} of {len(self.data.rows[split]):,} in {split}" for split, n in cut.items())
            lines.append(f"WARNING: texts longer than {self.config.seq_len} tokens are cut at their end: {shown}")
        return lines if self.config.arch == encoders.GPT else [*audit_lines(self.config, self.changes), *lines]

    def micro_batches(self, step: int) -> Sequence[Batch]:
        mine = self.order.examples(step)[self.world.rank :: self.world.size]
        size = self.config.micro_batch or self.config.batch_size
        return [self._batch("train", mine[i : i + size]) for i in range(0, len(mine), size)]

    def _batch(self, split: str, index: np.ndarray) -> Batch:
        examples = [self.data.example(split, i, self.config.seq_len) for i in index]
        return (*pad(examples, self.data.template.pad), torch.from_numpy(self.data.rows[split][index, 3]))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return class_loss(model, batch)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, split: str, stop: Callable[[], bool]) -> Evaluation:
        world, labels = self.world, self.data.rows[split][:, 3]
        sums, predicted = np.zeros(1), np.zeros(len(labels))
        batches = evaluation_batches(self.lengths[split], evaluation_tokens(world.device))
        for start in range(0, len(batches), world.size):
            if world.any(stop()):
                raise Interrupted
            if start + world.rank < len(batches):
                index = batches[start + world.rank]
                batch = tuple(tensor.to(world.device) for tensor in self._batch(split, index))
                logits = class_logits(model, batch).float()
                sums += F.cross_entropy(logits, batch[-1], reduction="sum").item()
                predicted[index] = logits.argmax(-1).cpu().numpy()
        total, *told = world.sum(float(sums[0]), *predicted.tolist())
        answers = np.array(told).round().astype(np.int64)
        values = {"loss": total / len(labels), "accuracy": float((answers == labels).mean()),
                  "f1": macro_f1(labels, answers, self.config.labels), "examples": len(labels)}  # fmt: skip
        return Evaluation(values, answers=np.stack([labels, answers], 1) if split == "test" else None)


def pad(examples: Sequence[tuple[np.ndarray, np.ndarray]], padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, mask, token types) of examples as long as the longest."""
    shape = (len(examples), max(len(tokens) for tokens, _ in examples))
    tokens, mask, kinds = torch.full(shape, padding), torch.zeros(shape, dtype=torch.long), torch.zeros(shape).long()
    for row, (ids, types) in enumerate(examples):
        tokens[row, : len(ids)] = torch.from_numpy(ids)
        mask[row, : len(ids)] = 1
        kinds[row, : len(ids)] = torch.from_numpy(types)
    return tokens, mask, kinds


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(class_logits(model, batch), batch[-1])


def class_logits(model: nn.Module, batch: Batch) -> Tensor:
    tokens, mask, kinds = batch[:3]
    told = model(input_ids=tokens, attention_mask=mask, **({"token_type_ids": kinds} if kinds.any() else {}))
    return told if isinstance(told, Tensor) else told.logits


def evaluation_batches(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Indices of examples of like length, about so many tokens at a time."""
    order = np.argsort(lengths, kind="stable")[::-1]
    batches, start = [], 0
    while start < len(order):
        count = max(1, tokens // int(lengths[order[start]]))
        batches.append(order[start : start + count])
        start += count
    return batches
