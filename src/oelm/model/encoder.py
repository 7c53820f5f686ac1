"""Encoders of `transformers` with a classifier on top, and the surgery on their Query/Key that makes an arm.

What an arm's frames mean here, where Q/K are pretrained:

    pretrained        untouched
    factor            per head: the orthonormal factor (QR, signs fixed) of its pretrained block
    factor-scale      ... times the block's own scale (root mean square of its rows' lengths)
    normal, matched, orthogonal, global
                      drawn anew, as for a GPT (oelm.model.frames); the pretrained matrix is lost

Biases are never replaced; they freeze with their matrices.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oelm import encoders, policy
from oelm.config import INIT_STD, RunConfig
from oelm.errors import UserError
from oelm.model.frames import draw_frame, gaussian, orthonormal_rows

DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "seq_classif_dropout",
)  # fmt: skip
"""What the libraries' configs call it."""


@dataclass(frozen=True)
class Change:
    """What the surgery did to one matrix."""

    name: str
    before: float
    after: float
    """Standard deviation of the entries."""
    kept: float
    """Cosine between the matrix before and after."""


def encoder_settings(config: RunConfig) -> dict[str, Any]:
    """What the run's encoder is built from, for transformers: the pretrained config, labels and dropout set."""
    return _hf_config(config, encoders.settings_of(config.arch)).to_dict()


def empty_encoder(config: RunConfig, settings: dict[str, Any] | None = None) -> nn.Module:
    """The encoder with whatever weights its library draws; `settings` are those of a run, or the pretrained one's."""
    made = _hf_config(config, encoders.settings_of(config.arch) if settings is None else settings)
    if not config.labels:
        made.num_labels = 2  # not known yet: a classifier needs some
    try:
        return _classes().from_config(made)
    except Exception as error:
        raise UserError(f"arch {config.arch}: {_first_line(error)}") from None


def build_encoder(config: RunConfig) -> tuple[nn.Module, list[Change]]:
    """The arm's encoder on the CPU, and what was changed about the pretrained one."""
    if encoders.is_pretrained(config.arch):
        model, drawn = _load(config)
    else:
        with torch.device("meta"):
            model = empty_encoder(config)
        model = model.to_empty(device="cpu")
        _fill_buffers(model)
        drawn = [name for name, _ in model.named_parameters()]
    _draw(model, drawn, config.seed)
    return model.eval(), operate(model, config)


def _classes() -> Any:
    try:
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging as chatter
    except ImportError:
        raise UserError("encoders need transformers: make hf (or pip install 'oelm[hf]')") from None
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return AutoModelForSequenceClassification


def _hf_config(config: RunConfig, settings: dict[str, Any]) -> Any:
    _classes()
    from transformers import AutoConfig

    own = {key: value for key, value in settings.items() if key not in ("num_labels", "id2label", "label2id")}
    if own.pop("quantization_config", None):
        raise UserError(f"arch {config.arch}: its weights are quantised, which cannot be trained")
    try:
        made = AutoConfig.for_model(**own, num_labels=config.labels)
    except Exception as error:  # whatever the library makes of settings that are not its own
        raise UserError(f"arch {config.arch}: {_first_line(error)}") from None
    for key in DROPOUTS:
        if hasattr(made, key):
            setattr(made, key, config.dropout)
    made.classifier_dropout = None
    made.return_dict = True
    made.problem_type = "single_label_classification"
    if not encoders.is_pretrained(config.arch):
        made.vocab_size = config.vocab_size
    return made


def _load(config: RunConfig) -> tuple[nn.Module, list[str]]:
    """The pretrained encoder, and the names of what it lacks: the classifier, perhaps the pooler."""
    made = _hf_config(config, encoders.settings_of(config.arch))
    try:
        model, report = _classes().from_pretrained(
            str(encoders.folder_of(config.arch) or config.arch),
            config=made,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # a classifier of other classes is drawn anew
            use_safetensors=True,  # other weights are pickles
        )
    except Exception as error:  # a damaged file, or an architecture that does not classify
        raise UserError(f"arch {config.arch} cannot be loaded: {_first_line(error)}") from None
    unfit = {key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]}
    missing = sorted({*report["missing_keys"], *unfit})
    lost = [name for name in missing if policy.layer_of(name) is not None or "embeddings" in name]
    if lost:
        raise UserError(f"arch {config.arch}: its weights lack {lost[0]} and {len(lost) - 1} more: not whole")
    spare = sorted(name for name in report["unexpected_keys"] if policy.layer_of(name) is not None)
    if spare:
        raise UserError(f"arch {config.arch}: its weights have {spare[0]}, which its config.json does not speak of")
    return model, missing


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}" if str(error).strip() else repr(error)


@torch.no_grad()
def _draw(model: nn.Module, names: list[str], seed: int) -> None:
    """Matrices from N(0, 0.02²), each from its own generator; norms 1; biases 0."""
    parameters = dict(model.named_parameters())
    for name in names:
        parameter = parameters[name]
        if parameter.ndim > 1:
            parameter.copy_(gaussian(tuple(parameter.shape), seed, name) * INIT_STD)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _fill_buffers(model: nn.Module) -> None:
    """Position ids and token types, which a model made without memory has lost."""
    for name, buffer in model.named_buffers():
        if name.endswith("position_ids"):
            buffer.copy_(torch.arange(buffer.shape[-1]).expand_as(buffer))
        else:
            buffer.zero_()


@torch.no_grad()
def operate(model: nn.Module, config: RunConfig) -> list[Change]:
    """Make the arm's Q/K out of the model's; returns what was changed, nothing for untouched ones."""
    found = query_key_weights(model, config)
    if config.frames == "pretrained":
        return []
    changes = []
    for role, layer, name, weight in found:
        before = weight.double()
        frame = _frame(before, config, layer, role)
        weight.copy_(frame.float())
        after = weight.double()
        cosine = (before * after).sum() / (before.norm() * after.norm()).clamp(min=1e-30)
        changes.append(Change(name, float(before.std()), float(after.std()), float(cosine)))
    return changes


def query_key_weights(model: nn.Module, config: RunConfig) -> list[tuple[str, int, str, Tensor]]:
    """(q or k, layer, name, weight) of every layer; refused unless each has one of each, of the expected shape."""
    found: list[tuple[str, int, str, Tensor]] = []
    for name, parameter in model.named_parameters():
        role = next((role for role in ("q", "k") if policy.matches(role, name)), None)
        layer = policy.layer_of(name)
        if role and layer is not None and name.endswith("weight"):
            if tuple(parameter.shape) != (config.d_model, config.d_model):
                raise UserError(
                    f"arch {config.arch}: {name} is {tuple(parameter.shape)}, "
                    f"not {config.d_model} x {config.d_model} for {config.num_heads} heads"
                )
            found.append((role, layer, name, parameter))
    if sorted((role, layer) for role, layer, *_ in found) != sorted(
        (role, layer) for role in "qk" for layer in range(config.num_layers)
    ):
        raise UserError(
            f"arch {config.arch}: found {len(found)} Query/Key matrices for {config.num_layers} layers; "
            "encoders like BERT, RoBERTa, ELECTRA and DistilBERT have two in each"
        )
    return found


def _frame(before: Tensor, config: RunConfig, layer: int, role: str) -> Tensor:
    if config.frames not in ("factor", "factor-scale"):
        return draw_frame(config.frames, config.num_heads, config.d_model, layer, role, config.seed)
    heads = before.view(config.num_heads, config.d_head, config.d_model)
    factor = orthonormal_rows(heads)
    if config.frames == "factor-scale":
        factor = factor * heads.norm(dim=(1, 2), keepdim=True) / config.d_head**0.5
    return factor.reshape_as(before)


def audit_lines(config: RunConfig, changes: list[Change]) -> list[str]:
    """What the surgery did, for people."""
    what = {
        "pretrained": "untouched",
        "factor": "each head's pretrained block replaced by its orthonormal factor",
        "factor-scale": "each head's pretrained block replaced by its orthonormal factor, at the block's scale",
    }.get(config.frames, f"pretrained matrices overwritten (frames {config.frames})")
    if not encoders.is_pretrained(config.arch):
        what = f"drawn (frames {config.frames}): nothing here is pretrained"
    lines = [f"Q/K of {config.arch}: {what}; freeze {config.freeze}"]
    if changes and encoders.is_pretrained(config.arch):
        lowest, highest = (pick(change.kept for change in changes) for pick in (min, max))
        lines.append(
            f"  {len(changes)} matrices changed; entries' std {changes[0].before:.4f} -> {changes[0].after:.4f} in the "
            f"first; cosine to the pretrained ones {lowest:.2f} to {highest:.2f}; biases left as they were"
        )
    return lines
