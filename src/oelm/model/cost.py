"""What a run costs, by arithmetic: parameters, FLOPs, checkpoint size, memory, and the bound on freezing."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oelm.config import RunConfig
from oelm.model import freeze
from oelm.model.gpt import GPT

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Part:
    """Parameters of one part of the model."""

    name: str
    total: int
    frozen: int

    @property
    def trainable(self) -> int:
        return self.total - self.frozen


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token; a multiply-add counts two."""

    forward: int
    backward: int
    qk: int
    """Forward share of the Q/K projections."""

    @property
    def step(self) -> int:
        return self.forward + self.backward


def parts(config: RunConfig) -> list[Part]:
    """Parameters by part, counted on the real model (without allocating it)."""
    model = skeleton(config)
    frozen = set(freeze.frozen_names(model, config))
    table: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        row = table.setdefault(_part_of(name), [0, 0])
        row[0] += parameter.numel()
        row[1] += parameter.numel() if name in frozen else 0
    result = [Part(name, *row) for name, row in table.items()]
    assert sum(part.total for part in result) == sum(p.numel() for p in model.parameters())
    return result


def flops(config: RunConfig, causal: bool = False) -> Flops:
    """FLOPs per token of one training step, from the shapes.

    `causal` counts only the half of the attention square that is needed; the full square is what
    dense attention computes and what the bounds below rest on.
    """
    d, layers = config.d_model, config.num_layers
    qk = 0 if config.frames == "sliced" else layers * 2 * d * d
    other = layers * (2 * d * d + 2 * d * config.d_ff) + d * config.vocab_size
    attention = layers * 2 * d * config.seq_len // (2 if causal else 1)
    forward = 2 * (qk + other + attention)
    weight_gradient_saved = 2 * qk if config.freeze == "qk" else 0
    return Flops(forward, 2 * forward - weight_gradient_saved, 2 * qk)


def speed_bound(config: RunConfig) -> float:
    """Largest speed-up of a step over one that trains drawn Q/K, if everything ran at one speed."""
    return flops(config.replace(frames="normal", freeze="none")).step / flops(config).step


def freezing_bounds(config: RunConfig) -> dict[str, float]:
    """Largest speed-up of a whole step that frozen Q/K could give, if everything ran at one speed."""
    full = flops(config.replace(frames="normal", freeze="none"))
    return {
        "no_qk_weight_gradient": full.step / (full.step - full.qk),
        "free_qk_projection": full.step / (full.step - 3 * full.qk),
    }


def checkpoint_bytes(config: RunConfig) -> dict[str, int]:
    """Tensor bytes of a full checkpoint (weights and both Adam moments) and of the frozen file, written once."""
    table = parts(config)
    trainable = sum(part.trainable for part in table)
    return {
        "checkpoint": 3 * trainable * FLOAT_BYTES,
        "frozen_once": sum(part.frozen for part in table) * FLOAT_BYTES,
    }


def activation_bytes(config: RunConfig) -> int:
    """Bytes that autograd keeps for the backward pass of one micro-batch in float32.

    Traced, not estimated: the real model runs on fake tensors and every distinct storage that is
    saved for the backward pass, other than a parameter, is counted. The loss keeps the gradients that it
    has made already: of the hidden states and of the output matrix.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    windows = config.micro_batch or config.batch_size
    with FakeTensorMode():
        model = GPT(config)
        freeze.apply(model, config)
        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                saved[storage._cdata] = storage.nbytes()
            return tensor

        tokens = torch.zeros(windows, config.seq_len, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = model.hidden(tokens)
        made = [hidden, *(weight for weight in (model.tokens.weight,) if weight.requires_grad)]
    return sum(saved.values()) + sum(tensor.nbytes for tensor in made)


def report(config: RunConfig) -> dict[str, Any]:
    """Everything `oelm inspect` shows, as plain values."""
    table = parts(config)
    full, causal = flops(config), flops(config, causal=True)
    sizes = checkpoint_bytes(config)
    return {
        "model_type": config.model_type,
        "preset": config.preset,
        "frames": config.frames,
        "freeze": config.freeze,
        "total": sum(part.total for part in table),
        "trainable": sum(part.trainable for part in table),
        "frozen": sum(part.frozen for part in table),
        "parts": [{"part": p.name, "total": p.total, "trainable": p.trainable, "frozen": p.frozen} for p in table],
        "flops_per_token": {
            "forward": full.forward,
            "backward": full.backward,
            "step": full.step,
            "step_causal": causal.step,
        },
        "checkpoint_bytes": sizes["checkpoint"],
        "frozen_file_bytes": sizes["frozen_once"],
        "activation_bytes": activation_bytes(config),
        "bounds": freezing_bounds(config),
    }


def skeleton(config: RunConfig) -> nn.Module:
    """The model's parameters as shapes only."""
    with torch.device("meta"):
        return GPT(config)


def _part_of(name: str) -> str:
    pieces = name.split(".")
    if pieces[0] in ("tokens", "positions"):
        return f"{pieces[0][:-1]} embedding"
    if "norm" in name:
        return "norms"
    return f"{pieces[2]} {pieces[3]}" if pieces[2] == "attention" else "ffn"
