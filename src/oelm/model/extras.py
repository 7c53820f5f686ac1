"""What can be added to queries and keys, frozen or trained. Each starts as the identity where it can.

On the way from the input to the attention logits, in this order:

    projection (+ LoRA, + bias) -> key shift, key convolution -> core, gain, temperature -> QK-norm -> RoPE
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from oelm.config import RunConfig

ROPE_BASE = 10_000.0
START = {
    "core": "eye", "gain": "ones", "temperature": "ones", "conv": "delta", "lora_up": "zeros", "bias": "zeros",
    "relative_bias": "zeros",
}  # fmt: skip
"""How an extra's parameter, or any bias, starts, by the last part of its name; `lora_down` is drawn like a matrix."""


class Projection(nn.Linear):
    """A Q or K matrix with what is trained beside it."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config.d_model, config.d_model, bias=config.qk_bias)
        if config.lora:
            self.lora_down = nn.Parameter(torch.empty(config.lora, config.d_model))
            self.lora_up = nn.Parameter(torch.empty(config.d_model, config.lora))
        self.has_lora = bool(config.lora)

    @property
    def is_matrix(self) -> bool:
        """Nothing is added to its product."""
        return self.bias is None and not self.has_lora

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = F.linear(x_BTD, self.weight, self.bias)
        return y_BTD + F.linear(F.linear(x_BTD, self.lora_down), self.lora_up) if self.has_lora else y_BTD


class Mixing(nn.Module):
    """What happens to queries and keys, split into heads, on their way to the logits."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.shifted = round(config.key_shift * config.d_head)
        self.normed = config.qk_norm
        self.rotated = {"none": 0, "half": config.d_head // 2, "full": config.d_head}[config.rope]
        self.seq_len = config.seq_len
        self.turns: Tensor | None = None
        """Unit complex numbers by position and pair of channels; made when they are first needed."""
        heads, width = config.num_heads, config.d_head
        if config.key_conv:
            self.conv = nn.Parameter(torch.empty(heads, config.key_conv, 1, width))
        if config.core:
            self.core = nn.Parameter(torch.empty(heads, width, width))
        if config.qk_gain:
            self.gain = nn.Parameter(torch.empty(heads, 1, width))
        if config.temperature:
            self.temperature = nn.Parameter(torch.empty(heads, 1, 1))
        self.names = {name for name, _ in self.named_parameters()}

    def forward(self, q_BHTK: Tensor, k_BHTK: Tensor) -> tuple[Tensor, Tensor]:
        if self.shifted:
            k_BHTK = _Earlier.apply(k_BHTK, 1, self.shifted)
        if "conv" in self.names:
            earlier = (_Earlier.apply(k_BHTK, lag, k_BHTK.shape[-1]) for lag in range(1, self.conv.shape[1]))
            k_BHTK = sum((x * self.conv[:, lag] for lag, x in enumerate(earlier, 1)), start=k_BHTK * self.conv[:, 0])
        if "core" in self.names:
            q_HNK = torch.bmm(q_BHTK.transpose(0, 1).flatten(1, 2), self.core)  # all tokens of a head at once
            q_BHTK = q_HNK.unflatten(1, q_BHTK.shape[::2]).transpose(0, 1)
        if "gain" in self.names:
            q_BHTK = q_BHTK * self.gain
        if self.normed:
            q_BHTK, k_BHTK = (F.rms_norm(tensor, tensor.shape[-1:]) for tensor in (q_BHTK, k_BHTK))
        if "temperature" in self.names:  # behind the norm, which would take it out again
            q_BHTK = q_BHTK * self.temperature
        if self.rotated:
            q_BHTK, k_BHTK = self._turned(q_BHTK), self._turned(k_BHTK)
        return q_BHTK, k_BHTK

    def _turned(self, x_BHTK: Tensor) -> Tensor:
        length, device = x_BHTK.shape[-2], x_BHTK.device
        if x_BHTK.dtype != torch.float32 or torch.compiler.is_compiling():
            return _rotate(x_BHTK, _angles(length, x_BHTK.shape[-1], self.rotated, device))
        if self.turns is None or self.turns.device != device:
            with torch.inference_mode(False):  # it serves training, too
                angle_TP = _angles(self.seq_len, x_BHTK.shape[-1], self.rotated, device)
                self.turns = torch.polar(torch.ones_like(angle_TP), angle_TP)
        return _rotate_complex(x_BHTK, self.turns[:length])


class _Earlier(torch.autograd.Function):
    """Every position sees what stood `lag` tokens before it in the first `width` channels; zeros before the first."""

    @staticmethod
    def forward(ctx: Any, x_BHTK: Tensor, lag: int, width: int) -> Tensor:
        ctx.lag, ctx.width = lag, width
        y_BHTK = x_BHTK.new_empty(x_BHTK.shape)
        y_BHTK[..., lag:, :width] = x_BHTK[..., : max(0, x_BHTK.shape[-2] - lag), :width]
        y_BHTK[..., :lag, :width] = 0
        y_BHTK[..., width:] = x_BHTK[..., width:]
        return y_BHTK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BHTK: Tensor) -> tuple[Tensor | None, ...]:
        d_x_BHTK, lag, width = d_y_BHTK.new_empty(d_y_BHTK.shape), ctx.lag, ctx.width
        end = max(0, d_y_BHTK.shape[-2] - lag)
        d_x_BHTK[..., :end, :width] = d_y_BHTK[..., lag:, :width]
        d_x_BHTK[..., end:, :width] = 0
        d_x_BHTK[..., width:] = d_y_BHTK[..., width:]
        return d_x_BHTK, None, None


def _rotate(x_BHTK: Tensor, angle_TP: Tensor) -> Tensor:
    """Turn the channels in pairs of neighbours."""
    a, b = x_BHTK.unflatten(-1, (-1, 2)).unbind(-1)
    cos_TP, sin_TP = angle_TP.cos().to(x_BHTK.dtype), angle_TP.sin().to(x_BHTK.dtype)
    return torch.stack((a * cos_TP - b * sin_TP, b * cos_TP + a * sin_TP), -1).flatten(-2)


def _rotate_complex(x_BHTK: Tensor, turn_TP: Tensor) -> Tensor:
    """The same in one pass, the pairs taken as complex numbers, which half precision and the compiler lack."""
    return torch.view_as_real(torch.view_as_complex(x_BHTK.unflatten(-1, (-1, 2))) * turn_TP).flatten(-2)


def _angles(length: int, width: int, rotated: int, device: torch.device) -> Tensor:
    """By position and pair of channels; 0 behind the first `rotated` channels."""
    position_T = torch.arange(length, device=device, dtype=torch.float32)
    speed_P = ROPE_BASE ** (-torch.arange(0, rotated, 2, device=device) / rotated)
    return torch.outer(position_T, F.pad(speed_P, (0, (width - rotated) // 2)))


def start_value(name: str, parameter: Tensor) -> Tensor | None:
    """What an extra's parameter, or a bias, starts as; None: it is neither, or is drawn."""
    match START.get(name.rpartition(".")[2]):
        case "eye":
            return torch.eye(parameter.shape[-1]).expand_as(parameter)
        case "ones":
            return torch.ones_like(parameter)
        case "delta":
            return torch.zeros_like(parameter).index_fill_(1, torch.zeros(1, dtype=torch.long), 1.0)
        case "zeros":
            return torch.zeros_like(parameter)
    return None
