"""What a run costs, by arithmetic: parameters, FLOPs, checkpoint size, memory, and the bound on freezing."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from oelm import encoders, policy
from oelm.arms import ARMS
from oelm.config import ARM_KEYS, RunConfig
from oelm.model import freeze
from oelm.model.build import empty_model, skeleton

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
    """Parameters by part, counted on the real model (without allocating it), and what is frozen for the whole run."""
    model = skeleton(config)
    frozen = set(freeze.policy_of(model, config).always(name for name, _ in model.named_parameters()))
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
    qk = (config.sliced_from if config.frames == "sliced" else layers) * 2 * d * d
    extras = layers * d * (config.d_head * config.core + config.key_conv + 4 * config.lora)
    other = layers * (2 * d * d + 2 * d * config.d_ff) + (0 if _classifies(config) else d * config.vocab_size)
    attention = layers * 2 * d * config.seq_len // (2 if causal and config.arch == encoders.GPT else 1)
    forward = 2 * (qk + other + extras + attention)
    return Flops(forward, 2 * forward - 2 * _weights_at_rest(config), 2 * qk)


def _weights_at_rest(config: RunConfig) -> int:
    """Entries of matrices that need no gradient, on average over the run; as often as the matrix is used."""
    policy = config.policy
    if not policy.clauses:
        return 0
    model = skeleton(config)
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    sizes = {
        name: p.numel() * uses[id(p)]
        for name, p in model.named_parameters()
        if p.ndim == 2 and not ("position" in name or "embeddings" in name)
    }
    total = 0.0
    for length, steps in policy.samples():
        rests = [sum(sizes[name] for name in policy.frozen(sizes, step)) for step in steps]
        total += length * sum(rests) / len(rests)
    return round(total / config.max_steps)


def speed_bound(config: RunConfig) -> float:
    """Largest speed-up of a step over one that trains drawn Q/K, if everything ran at one speed."""
    return flops(_all_trained(config)).step / flops(config).step


def _all_trained(config: RunConfig) -> RunConfig:
    """The baseline of the same size."""
    plain = {key: RunConfig.model_fields[key].default for key in ARM_KEYS}
    plain |= ARMS["baseline"].settings_for(encoders.is_pretrained(config.arch)) or {}
    return config.replace(**plain, model_type="baseline")


def freezing_bounds(config: RunConfig) -> dict[str, float]:
    """Largest speed-up of a whole step that frozen Q/K could give, if everything ran at one speed."""
    full = flops(_all_trained(config))
    return {
        "no_qk_weight_gradient": full.step / (full.step - full.qk),
        "free_qk_projection": full.step / (full.step - 3 * full.qk),
    }


def checkpoint_bytes(config: RunConfig) -> dict[str, int]:
    """Tensor bytes of the largest checkpoint (weights and both Adam moments) and of the frozen file, written once.

    What is frozen for a while is in every checkpoint; its moments are in those of the time when it is trained.
    """
    sizes, policy = {name: p.numel() for name, p in skeleton(config).named_parameters()}, config.policy
    stays = set(policy.always(sizes))
    moments = max(
        sum(size for name, size in sizes.items() if not policy.out_of_training(name, step)) for step in policy.phases()
    )
    weights = sum(size for name, size in sizes.items() if name not in stays)
    once = sum(sizes.values()) - weights
    return {"checkpoint": (weights + 2 * moments) * FLOAT_BYTES, "frozen_once": once * FLOAT_BYTES}


def activation_bytes(config: RunConfig) -> int:
    """Bytes that autograd keeps for the backward pass of one micro-batch in float32.

    Traced, not estimated: the real model runs on fake tensors and every distinct storage that is
    saved for the backward pass, other than a parameter, is counted. The loss keeps the gradients that it
    has made already: of the hidden states and of the output matrix.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    windows = config.micro_batch or config.batch_size
    with FakeTensorMode():
        model = empty_model(config)
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
            if _classifies(config):
                model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
                made: list[torch.Tensor] = []
            else:
                hidden = model.hidden(tokens)  # type: ignore[operator]
                made = [hidden, *(weight for weight in (model.tokens.weight,) if weight.requires_grad)]  # type: ignore
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
        "phases": phases(config),
        "bounds": freezing_bounds(config),
    }


def phases(config: RunConfig) -> list[dict[str, Any]]:
    """What is frozen from which update on; of Q/K, what is not there at all counts as frozen."""
    names = {name: p.numel() for name, p in skeleton(config).named_parameters()}
    qk = {name: size for name, size in names.items() if policy.matches("qk", name)}
    rows = []
    for step in config.policy.phases():
        frozen = config.policy.mostly_frozen(names, step)
        absent = config.num_layers - config.sliced_from if config.frames == "sliced" else 0
        whole = sum(qk.values()) + 2 * absent * config.d_model**2
        share = 1 - sum(size for name, size in qk.items() if name not in frozen) / whole
        trainable = sum(size for name, size in names.items() if name not in frozen)
        rests = not all(config.policy.out_of_training(name, step) for name in frozen)
        rows.append({"step": step, "frozen": frozen, "qk_share": share, "trainable": trainable, "rests": rests})
    return rows


def _classifies(config: RunConfig) -> bool:
    """It has no output head over the vocabulary; an encoder's classes may not be known yet."""
    return bool(config.labels) or config.arch != encoders.GPT


def _part_of(name: str) -> str:
    pieces = name.split(".")
    if pieces[0] not in ("tokens", "positions", "blocks", "final_norm"):
        return _encoder_part(name)
    if pieces[0] in ("tokens", "positions"):
        return f"{pieces[0][:-1]} embedding"
    if "norm" in name:
        return "norms"
    return f"{pieces[2]} {pieces[3]}" if pieces[2] == "attention" else "ffn"


def _encoder_part(name: str) -> str:
    """Of a parameter of an encoder, or of the classifier on a GPT."""
    if "embeddings" in name:
        return "embeddings"
    if "norm" in name.lower():
        return "norms"
    for part in ("q", "k", "v", "o"):
        if policy.matches(part, name):
            return f"attention {part}"
    return "ffn" if policy.layer_of(name) is not None else "pooler and classifier"
