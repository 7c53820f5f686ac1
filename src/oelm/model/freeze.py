"""What is trainable at a step, and the proof that the rest did not change."""

import hashlib
from collections.abc import Iterable

from torch import nn

from oelm.config import RunConfig

PARTS = {"none": (), "qk": ("attention.q.weight", "attention.k.weight")}


def frozen_names(model: nn.Module, config: RunConfig, step: int = 0) -> list[str]:
    """Names of the parameters that step `step` (the next update) must not change.

    The one place that decides it. Every policy there is holds for the whole run, so `step` does not
    matter yet; callers ask for the step they are at all the same.
    """
    endings = PARTS[config.freeze]
    names = [name for name, _ in model.named_parameters() if name.endswith(endings)] if endings else []
    if endings and not names and config.frames != "sliced":
        raise ValueError(f"freeze = {config.freeze!r} matches no parameter of the model")
    return names


def apply(model: nn.Module, config: RunConfig, step: int = 0) -> list[str]:
    """Set `requires_grad` of every parameter for `step`; returns the frozen names."""
    frozen = frozen_names(model, config, step)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return frozen


def fingerprint(model: nn.Module, names: Iterable[str]) -> str:
    """SHA-256 over names, shapes and bits of the named parameters."""
    digest = hashlib.sha256()
    parameters = dict(model.named_parameters())
    for name in sorted(names):
        tensor = parameters[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.view(-1).numpy().tobytes())
    return digest.hexdigest()
