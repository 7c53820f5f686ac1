"""What can be added to queries and keys, frozen or trained. Each starts as the identity where it can.

On the way from the input to the attention logits, in this order:

    projection (+ LoRA, + bias) -> key shift, key convolution -> core, gain, temperature -> QK-norm -> RoPE
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
            k_BHTK = torch.cat((_earlier(k_BHTK[..., : self.shifted], 1), k_BHTK[..., self.shifted :]), -1)
        if "conv" in self.names:
            k_BHTK = sum((_earlier(k_BHTK, lag) * self.conv[:, lag] for lag in range(1, self.conv.shape[1])),
                         start=k_BHTK * self.conv[:, 0])  # fmt: skip
        if "core" in self.names:
            q_BHTK = q_BHTK @ self.core
        if "gain" in self.names:
            q_BHTK = q_BHTK * self.gain
        if "temperature" in self.names:
            q_BHTK = q_BHTK * self.temperature
        if self.normed:
            q_BHTK, k_BHTK = (F.rms_norm(tensor, tensor.shape[-1:]) for tensor in (q_BHTK, k_BHTK))
        if self.rotated:
            turn = _rotation(q_BHTK.shape[-2], self.rotated, q_BHTK)
            q_BHTK, k_BHTK = _rotate(q_BHTK, *turn), _rotate(k_BHTK, *turn)
        return q_BHTK, k_BHTK


def _earlier(x_BHTK: Tensor, lag: int) -> Tensor:
    """Every position sees what stood `lag` tokens before it; zeros before the first."""
    return F.pad(x_BHTK, (0, 0, lag, 0))[..., : x_BHTK.shape[-2], :]


def _rotation(length: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    position_T = torch.arange(length, device=like.device, dtype=torch.float32)
    speed_F = ROPE_BASE ** (-torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angle_TF = torch.outer(position_T, speed_F)
    return angle_TF.cos().to(like.dtype), angle_TF.sin().to(like.dtype)


def _rotate(x_BHTK: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """Turn the first 2F channels, in pairs (f, f + F), by the position's angles."""
    half = cos_TF.shape[-1]
    a, b, rest = x_BHTK.split((half, half, x_BHTK.shape[-1] - 2 * half), -1)
    return torch.cat((a * cos_TF - b * sin_TF, b * cos_TF + a * sin_TF, rest), -1)


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
