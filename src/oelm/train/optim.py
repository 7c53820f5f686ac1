"""Optimizer and learning-rate schedule."""

import math

import torch
from torch import nn

from oelm.config import RunConfig

DECAY_SHARE = 0.2
"""Share of a WSD run that is spent in the final decay."""


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


def build_optimizer(model: nn.Module, config: RunConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW over the trainable parameters alone; matrices and embeddings decay, biases and norms do not."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.max_lr,
        betas=(config.beta1, config.beta2),
        fused=device.type in ("cpu", "cuda"),
    )


def allocate_moments(optimizer: torch.optim.Optimizer) -> None:
    """Make AdamW's state, side by side. AdamW makes it behind the first backward pass, scattered over the memory that
    the activations have left, and those of the second step no longer fit in between."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            step = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": step, **moments}


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
