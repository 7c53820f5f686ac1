"""Dropout that costs little on a CPU: 16 random bits decide about an element, four elements to a draw."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.model.by_hand import by_hand, is_real

LEVELS = 2**16


def keep_mask(like: Tensor, p: float) -> tuple[Tensor, float]:
    """1 for each element to keep, 0 for each other, and the factor that makes up for these.

    The probability is `p` rounded to a 65,536th; the factor is exact for the rounded one. (Bytes: a product with
    booleans takes four times as long.)
    """
    dropped = min(round(p * LEVELS), LEVELS - 1)
    keep = torch.empty(like.shape, dtype=torch.uint8, device="cpu")
    if is_real(like):
        torch.ge(_bits(like.numel()).view(like.shape), dropped - LEVELS // 2, out=keep)
    return keep, LEVELS / (LEVELS - dropped)


def _bits(count: int) -> Tensor:
    """16 random bits each. A draw from torch's CPU generator, whose state a checkpoint has, is the seed of a faster
    one."""
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    return torch.from_numpy(np.random.SFC64(seed).random_raw(-(-count // 4))).view(torch.int16)[:count]


def kept(x: Tensor, p: float) -> Tensor:
    """What to multiply `x` with: 0, or the factor that makes up for it."""
    keep, factor = keep_mask(x, p)
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
