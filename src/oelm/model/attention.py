"""Causal multi-head self-attention with separate Q, K, V and O projections."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from oelm.config import RunConfig
from oelm.model.dropout import keep_mask

QUERY_BLOCK = 64
"""Queries that attention with dropout takes at a time: each block sees the keys up to its end, and no others."""


class Attention(nn.Module):
    """Q, K, V and O are four matrices, never one: freezing Q and K must not touch V.

    With sliced frames Q and K are no matrices at all: a head's query is its own slice of the input.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        sliced = config.frames == "sliced"
        self.q = nn.Identity() if sliced else nn.Linear(config.d_model, config.d_model, bias=False)
        self.k = SlicedKey(config) if sliced else nn.Linear(config.d_model, config.d_model, bias=False)
        self.v = nn.Linear(config.d_model, config.d_model, bias=False)
        self.o = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (self._heads(project(x_BTD)) for project in (self.q, self.k, self.v))
        dropout = self.dropout if self.training else 0.0
        if dropout and x_BTD.device.type == "cpu" and not torch.compiler.is_compiling():
            y_BHTK = _DroppedAttention.apply(q_BHTK, k_BHTK, v_BHTK, dropout)
        else:
            y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=True)
        return self.o(y_BHTK.transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class SlicedKey(nn.Module):
    """Keys without parameters: the query's slice, the next head's, or every num_heads-th channel."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.kind, self.num_heads, self.d_head = config.sliced_keys, config.num_heads, config.d_head

    def forward(self, x_BTD: Tensor) -> Tensor:
        match self.kind:
            case "tied":
                return x_BTD
            case "next":
                return x_BTD.roll(-self.d_head, -1)
            case _:
                return x_BTD.unflatten(-1, (self.d_head, self.num_heads)).mT.flatten(-2)


class _DroppedAttention(torch.autograd.Function):
    """Causal attention with dropout on its weights, for the CPU, where torch would compute the whole square."""

    @staticmethod
    def forward(ctx: Any, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, p: float) -> Tensor:
        q_NTK, k_NTK, v_NTK = (tensor.flatten(0, 1) for tensor in (q_BHTK, k_BHTK, v_BHTK))
        y_NTK = torch.empty_like(v_NTK)
        saved = []
        for here, seen in _blocks(q_NTK.shape[1]):
            weight_NQS = _causal_weights(q_NTK[:, here], k_NTK[:, seen])
            keep_NQS, factor = keep_mask(tuple(weight_NQS.shape), p)
            torch.bmm(weight_NQS * keep_NQS, v_NTK[:, seen], out=y_NTK[:, here])
            saved += [weight_NQS, keep_NQS]
        ctx.save_for_backward(q_NTK, k_NTK, v_NTK, *saved)
        ctx.factor, ctx.shape = factor, q_BHTK.shape
        return y_NTK.mul_(factor).view(q_BHTK.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BHTK: Tensor) -> tuple[Tensor | None, ...]:
        q_NTK, k_NTK, v_NTK, *saved = ctx.saved_tensors
        d_y_NTK = d_y_BHTK.flatten(0, 1) * ctx.factor
        d_q_NTK, d_k_NTK, d_v_NTK = torch.empty_like(q_NTK), torch.zeros_like(k_NTK), torch.zeros_like(v_NTK)
        scale = q_NTK.shape[-1] ** -0.5
        for (here, seen), weight_NQS, keep_NQS in zip(_blocks(q_NTK.shape[1]), saved[::2], saved[1::2], strict=True):
            d_v_NTK[:, seen].baddbmm_((weight_NQS * keep_NQS).mT, d_y_NTK[:, here])
            d_weight_NQS = torch.bmm(d_y_NTK[:, here], v_NTK[:, seen].mT).mul_(keep_NQS)
            d_score_NQS = torch._softmax_backward_data(d_weight_NQS, weight_NQS, -1, weight_NQS.dtype)
            torch.bmm(d_score_NQS, k_NTK[:, seen], out=d_q_NTK[:, here])
            d_k_NTK[:, seen].baddbmm_(d_score_NQS.mT, q_NTK[:, here], alpha=scale)
        d_q_NTK.mul_(scale)
        return *(gradient.view(ctx.shape) for gradient in (d_q_NTK, d_k_NTK, d_v_NTK)), None


def _blocks(length: int) -> list[tuple[slice, slice]]:
    """(queries, the keys that any of them may see), block by block."""
    starts = range(0, length, QUERY_BLOCK)
    return [(slice(s, min(s + QUERY_BLOCK, length)), slice(0, min(s + QUERY_BLOCK, length))) for s in starts]


def _causal_weights(q_NQK: Tensor, k_NSK: Tensor) -> Tensor:
    """Softmax weights of the last Q positions over all S; the diagonal block alone holds keys to be hidden."""
    score_NQS = torch.bmm(q_NQK, k_NSK.mT).mul_(q_NQK.shape[-1] ** -0.5)
    queries = q_NQK.shape[1]
    hidden_QQ = torch.ones(queries, queries, dtype=torch.bool, device=q_NQK.device).triu_(1)
    score_NQS[:, :, -queries:].masked_fill_(hidden_QQ, -torch.inf)
    return score_NQS.softmax(-1)
