"""One update of a model: gradients of its micro-batches, their norm, AdamW. The loop and the benchmarks share it."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from oelm.config import RunConfig
from oelm.model import freeze
from oelm.train.distributed import World
from oelm.train.optim import allocate_moments, build_optimizer
from oelm.train.task import Batch


class Update:
    def __init__(
        self, model: nn.Module, config: RunConfig, world: World, loss: Callable[[nn.Module, Batch], Tensor]
    ) -> None:
        self.config, self.world, self.loss = config, world, loss
        self.frozen = freeze.apply(model, config)
        self.trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(model, config, world.device)
        self.autocast, self.scaler = _precision(config, world.device)
        self.parallel = world.wrap(cast(nn.Module, torch.compile(model)) if config.compile else model)

    @property
    def scales(self) -> bool:
        """The loss is scaled: a gradient that is not finite only means that this update is left out."""
        return self.scaler.is_enabled()

    def gradient(self, step: int, batches: Sequence[Batch]) -> tuple[float, float]:
        """Mean loss and gradient norm of this process's share of update `step`; the gradient is clipped."""
        if not self.optimizer.state:
            allocate_moments(self.optimizer)
        if self.config.dropout:
            torch.manual_seed(_dropout_seed(self.config.seed, step, self.world.rank))
        self.parallel.train()
        losses = [self.backward(b, len(batches), sync=i == len(batches) - 1) for i, b in enumerate(batches)]
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.trainable, self.config.grad_clip or math.inf, foreach=True)
        return torch.stack(losses).sum().item(), norm.item()

    def backward(self, batch: Batch, parts: int, sync: bool) -> Tensor:
        """Accumulate the gradient of one micro-batch; processes exchange it with the last one only."""
        quiet = nullcontext() if sync or self.world.size == 1 else self.parallel.no_sync()  # type: ignore[operator]
        with quiet:
            with self.autocast():
                inputs = tuple(tensor.to(self.world.device, non_blocking=True) for tensor in batch)
                loss = self.loss(self.parallel, inputs) / parts
            self.scaler.scale(loss).backward()
        return loss.detach()

    def apply(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.forget()

    def forget(self) -> None:
        """Drop the gradient."""
        self.optimizer.zero_grad(set_to_none=True)


def _precision(config: RunConfig, device: torch.device) -> tuple[Callable[[], Any], torch.amp.GradScaler]:
    """Autocast and loss scaling for the device: bfloat16 where the GPU has it, else float16; off on the CPU."""
    on = config.use_amp and device.type == "cuda"
    dtype = torch.bfloat16 if not on or torch.cuda.is_bf16_supported() else torch.float16
    scaler = torch.amp.GradScaler(device.type, enabled=on and dtype == torch.float16)
    if not on:
        return nullcontext, scaler
    return lambda: torch.autocast(device.type, dtype), scaler


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """Dropout's randomness is a function of (seed, step, rank), so there is no generator state to lose."""
    return (seed * 1_000_003 + step * 4_099 + rank) % 2**63
