"""Dropout that costs little on a CPU: 16 random bits decide about an element, four elements to a draw."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.model.by_hand import by_hand

LEVELS = 2**16


def keep_mask(shape: tuple[int, ...], p: float) -> tuple[Tensor, float]:
    """Which elements to keep, drawn from torch's CPU generator, and the factor that makes up for the others.

    The probability is `p` rounded to a 65,536th; the factor is exact for the rounded one.
    """
    count, dropped = torch.Size(shape).numel(), min(round(p * LEVELS), LEVELS - 1)
    words = torch.empty(-(-count // 4), dtype=torch.int64, device="cpu").random_(-(2**63), None)
    bits = words.view(torch.int16)[:count].view(shape)
    return bits >= dropped - LEVELS // 2, LEVELS / (LEVELS - dropped)


def kept(x: Tensor, p: float) -> Tensor:
    """What to multiply `x` with: 0, or the factor that makes up for it."""
    keep, factor = keep_mask(tuple(x.shape), p)
    return keep.to(x.dtype).mul_(factor)


class Dropout(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    @property
    def p_now(self) -> float:
        """The probability as it is now."""
        return self.p if self.training else 0.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.p_now:
            return x
        if not by_hand(x):
            return F.dropout(x, self.p)
        return x * kept(x, self.p)
