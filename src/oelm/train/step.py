"""One update of a model: gradients of its micro-batches, their norm, AdamW. The loop and the benchmarks share it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from oelm.config import RunConfig
from oelm.machine import keep_compiled
from oelm.model import freeze
from oelm.train.distributed import World
from oelm.train.optim import allocate_moments, build_optimizer
from oelm.train.task import Batch

CLIP_MARGIN = 1e-6
"""Added to the norm by torch before it divides by it."""


class Update:
    def __init__(
        self, model: nn.Module, config: RunConfig, world: World, loss: Callable[[nn.Module, Batch], Tensor]
    ) -> None:
        self.model, self.config, self.world, self.loss = model, config, world, loss
        self.policy = freeze.policy_of(model, config)
        self._names = [name for name, _ in model.named_parameters()]
        self._phases = frozenset(self.policy.phases())
        self.stored_once = self.policy.always(self._names)
        """Frozen for the whole run."""
        self.autocast, self.scaler = _precision(config, world.device)
        self._compiled = model
        if config.compile:
            keep_compiled()
            self._compiled = cast(nn.Module, torch.compile(model))
        self.optimizer = build_optimizer(model, config, world.device, self.out(0))
        self._train(self.policy.frozen(self._names, 0))

    def out(self, step: int) -> list[str]:
        """What has no optimizer state at `step`: frozen, and not just resting until its turn comes."""
        return [name for name in self._names if self.policy.out_of_training(name, step)]

    def _train(self, frozen: list[str]) -> None:
        """Have everything but `frozen` take part from now on. Processes must agree anew on what they exchange."""
        self.frozen = frozen
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        self.trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.parallel: nn.Module = self._compiled
        self.parallel = self.world.wrap(self._compiled)

    def enter(self, step: int) -> list[str] | None:
        """Make ready for update `step`; where a phase begins there, the names that are frozen in it, else None.

        What thaws begins with fresh Adam moments; what freezes loses them. A head may be orthogonalised then.
        """
        begins = step in self._phases
        if self.policy.constant:
            return self.frozen if begins else None
        frozen = self.policy.frozen(self._names, step)
        if begins and step:
            freeze.orthogonalise(self.model, self.config, step)
            before = self.optimizer.state
            self.optimizer = build_optimizer(self.model, self.config, self.world.device, self.out(step))
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in before:
                        self.optimizer.state[parameter] = before[parameter]
        if frozen != self.frozen:
            self._train(frozen)
        return self.out(step) if begins else None

    def stand_before(self, step: int) -> None:
        """Take up the phase of the update before `step`, as a run that is to go on from there has left it."""
        last = max(0, step - 1)
        self.optimizer = build_optimizer(self.model, self.config, self.world.device, self.out(last))
        self._train(self.policy.frozen(self._names, last))

    @property
    def scales(self) -> bool:
        """The loss is scaled up: a gradient that is not finite only means that this update is left out. Each time the
        scale is halved; where there is nothing left to halve, the gradient itself is at fault."""
        return self.scaler.is_enabled() and self.scaler.get_scale() >= 1

    def gradient(self, step: int, batches: Sequence[Batch]) -> tuple[float, float]:
        """Mean loss and gradient norm of this process's share of update `step`; the gradient is clipped."""
        if not self.optimizer.state:
            allocate_moments(self.optimizer)
        if self.config.dropout:
            torch.manual_seed(_dropout_seed(self.config.seed, step, self.world.rank))
        if not self.model.training:
            self.parallel.train()
        losses = [self.backward(b, len(batches), sync=i == len(batches) - 1) for i, b in enumerate(batches)]
        self.scaler.unscale_(self.optimizer)
        return torch.stack(losses).sum().item(), self._clip()

    def _clip(self) -> float:
        """The gradient's norm. Where it is short enough nothing is touched: torch's own would multiply all by 1."""
        gradients = [parameter.grad for parameter in self.trainable if parameter.grad is not None]
        norm, most = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))), self.config.grad_clip
        length = norm.item()
        if most and not length + CLIP_MARGIN <= most:
            nn.utils.clip_grads_with_norm_(self.trainable, most, norm)
        return length

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
            group["lr"] = rate * group["factor"]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.forget()

    def forget(self) -> None:
        """Drop the gradient."""
        self.optimizer.zero_grad(set_to_none=True)


def _precision(config: RunConfig, device: torch.device) -> tuple[Callable[[], Any], torch.amp.GradScaler]:
    """Autocast and loss scaling for the device: bfloat16 where the GPU has it, else float16; off on the CPU."""
    on = config.use_amp and device.type == "cuda"
    dtype = torch.bfloat16 if not on or torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    scaler = torch.amp.GradScaler(device.type, enabled=on and dtype == torch.float16)
    if not on:
        return nullcontext, scaler
    return lambda: torch.autocast(device.type, dtype), scaler


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """Dropout's randomness is a function of (seed, step, rank), so there is no generator state to lose."""
    return (seed * 1_000_003 + step * 4_099 + rank) % 2**63
