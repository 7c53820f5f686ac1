"""Optimizer and learning-rate schedule."""

import inspect
import math
from collections.abc import Collection

import torch
from torch import nn

from oelm.config import RunConfig
from oelm.policy import parse_rates, rate_factor

DECAY_SHARE = 0.2
"""Share of a WSD run that is spent in the final decay."""


class AdamW(torch.optim.AdamW):
    """torch's own, without the wrappers that import its compiler: they took half of a short run's start.

    On a CPU the kernel is called at once, with what `build_optimizer` sets and nothing else: torch would sort all
    tensors by device and type before every step.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    _torchs_step = inspect.unwrap(torch.optim.AdamW.step)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        if not self.defaults["fused"] or self.param_groups[0]["params"][0].device.type != "cpu":
            self._torchs_step()
            return
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not moved:
                continue
            states = [self.state[parameter] or self.fresh_state(parameter) for parameter in moved]
            steps, averages, squares = ([state[key] for state in states] for key in ("step", "exp_avg", "exp_avg_sq"))
            torch._foreach_add_(steps, 1)
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(
                moved, [parameter.grad for parameter in moved], averages, squares, [], steps, lr=group["lr"],
                beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False,
                maximize=False,
            )  # fmt: skip

    def fresh_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Put moments of a parameter that has not moved yet in the place of its own."""
        step = torch.zeros((), device=parameter.device if self.defaults["fused"] else "cpu")
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        self.state[parameter] = {"step": step, **moments}
        return self.state[parameter]


def learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of update `step` (0, 1, …, max_steps - 1)."""
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    span = config.max_lr - config.min_lr
    match config.schedule:
        case "constant":
            return config.max_lr
        case "cosine":
            done = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
            return config.min_lr + span * 0.5 * (1 + math.cos(math.pi * done))
        case "wsd":
            decay_steps = max(1, round(DECAY_SHARE * config.max_steps))
            return config.min_lr + span * min(1.0, (config.max_steps - step) / decay_steps)


def build_optimizer(model: nn.Module, config: RunConfig, device: torch.device, frozen: Collection[str] = ()) -> AdamW:
    """AdamW over the parameters that are not frozen; matrices and embeddings decay, everything else does not.

    Each group has a `factor` on the learning rate.
    """
    factors = parse_rates(config.lr_scale)
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if name not in frozen:
            decays = parameter.ndim == 2 and not name.endswith("bias")
            groups.setdefault((decays, rate_factor(name, factors)), []).append(parameter)
    return AdamW(
        [
            {"params": parameters, "weight_decay": config.weight_decay if decays else 0.0, "factor": factor}
            for (decays, factor), parameters in groups.items()
        ],
        lr=config.max_lr,
        betas=(config.beta1, config.beta2),
        fused=device.type in ("cpu", "cuda"),
    )


def allocate_moments(optimizer: AdamW) -> None:
    """Make AdamW's state, side by side. AdamW makes it behind the first backward pass, scattered over the memory that
    the activations have left, and those of the second step no longer fit in between."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.fresh_state(parameter)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter name: `<name>/exp_avg`, …"""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, field = key.rpartition("/")
        # Only the fused optimizer keeps its step counter beside the parameter.
        on_cpu = field == "step" and not optimizer.defaults["fused"]
        optimizer.state[parameters[name]][field] = value.to("cpu" if on_cpu else parameters[name].device)
