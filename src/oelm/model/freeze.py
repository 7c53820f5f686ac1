"""What is trainable at a step, and the proof that the rest did not change."""

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from oelm.config import RunConfig
from oelm.errors import UserError
from oelm.policy import Policy, matches, parse_rates


def policy_of(model: nn.Module, config: RunConfig) -> Policy:
    """The config's policy; refused if a clause of it, or a factor on the learning rate, is of nothing in the model."""
    names = [name for name, _ in model.named_parameters()]
    idle = [pattern for pattern in parse_rates(config.lr_scale) if not any(matches(pattern, name) for name in names)]
    lost = [
        what for what in config.policy.unmatched(names) if not (config.frames == "sliced" and what in ("q", "k", "qk"))
    ]
    for setting, text, patterns in (("freeze", config.freeze, lost), ("lr_scale", config.lr_scale, idle)):
        if patterns:
            raise UserError(
                f"{setting} {text}: {patterns[0]} matches no parameter of the model; their names are like "
                "blocks.0.attention.q.weight, blocks.3.ffn.up.bias, tokens.weight"
            )
    for step in (step for _, steps in config.policy.samples() for step in steps):
        if len(config.policy.frozen(names, step)) == len(names):
            raise UserError(f"freeze {config.freeze}: at step {step:,} nothing would be trained")
    return config.policy


def apply(model: nn.Module, config: RunConfig, step: int = 0) -> list[str]:
    """Set `requires_grad` of every parameter for `step`; returns the frozen names."""
    frozen = policy_of(model, config).frozen((name for name, _ in model.named_parameters()), step)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return frozen


@torch.no_grad()
def orthogonalise(model: nn.Module, config: RunConfig, step: int) -> list[str]:
    """Replace heads that freeze before `step` by their polar factor where the policy says so; returns the names."""
    changed = []
    for name, parameter in model.named_parameters():
        kind = config.policy.polar(name, step)
        if kind and parameter.ndim == 2:  # a bias freezes as it is
            heads = parameter.cpu().double().view(config.num_heads, config.d_head, config.d_model)
            factor = polar_rows(heads)
            if kind == "polar-scale":
                factor *= heads.norm(dim=(1, 2), keepdim=True) / config.d_head**0.5
            parameter.copy_(factor.view_as(parameter))
            changed.append(name)
    return changed


def polar_rows(blocks: torch.Tensor) -> torch.Tensor:
    """The nearest matrices with orthonormal rows: the polar factors of (..., rows, columns) blocks."""
    left, _, right = torch.linalg.svd(blocks, full_matrices=False)
    return left @ right


def fingerprint(model: nn.Module, names: Iterable[str]) -> str:
    """SHA-256 over names, shapes and bits of the named parameters."""
    digest = hashlib.sha256()
    parameters = dict(model.named_parameters())
    for name in sorted(names):
        tensor = parameters[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.view(-1).numpy().tobytes())
    return digest.hexdigest()
