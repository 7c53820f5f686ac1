"""Causal multi-head self-attention with separate Q, K, V and O projections."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from oelm.config import RunConfig
from oelm.model.dropout import keep_mask
from oelm.model.extras import Mixing, Projection

QUERY_BLOCK, LEAST_BLOCK = 128, 64
"""Queries that block attention takes at a time; half as many with dropout, whose masks fill the cache too, and where
fewer make a second block: one alone would compute what is then hidden."""
BLOCKS_PAY = 768
"""Tokens up to which blocks are faster on a CPU than torch's own attention (1.1 to 1.3 x, but at 256, where they are
even). With dropout they always are: torch would compute the whole square."""


class Attention(nn.Module):
    """Q, K, V and O are four matrices, never one: freezing Q and K must not touch V.

    With sliced frames Q and K are no matrices at all: a head's query is its own slice of the input.
    """

    def __init__(self, config: RunConfig, layer: int = 0) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        sliced = config.frames == "sliced" and layer >= config.sliced_from
        self.q = nn.Identity() if sliced else Projection(config)
        self.k = SlicedKey(config) if sliced else self.q if config.tie_qk else Projection(config)
        self.v = nn.Linear(config.d_model, config.d_model, bias=False)
        self.o = nn.Linear(config.d_model, config.d_model, bias=False)
        self.mixing = Mixing(config) if config.extras.keys() - {"lora", "qk_bias", "relative_bias"} else None
        shape = (config.num_heads, config.seq_len) if config.relative_bias else (0,)
        self.relative_bias = nn.Parameter(torch.empty(shape)) if config.relative_bias else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (self._heads(project(x_BTD)) for project in (self.q, self.k, self.v))
        if self.mixing is not None:
            q_BHTK, k_BHTK = self.mixing(q_BHTK, k_BHTK)
        dropout = self.dropout if self.training else 0.0
        in_blocks = dropout or x_BTD.shape[1] <= BLOCKS_PAY
        if self.relative_bias is not None:
            bias_HTT = _by_distance(self.relative_bias, x_BTD.shape[1])
            y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=bias_HTT, dropout_p=dropout)
        elif in_blocks and x_BTD.device.type == "cpu" and not torch.compiler.is_compiling():
            y_BHTK = _BlockAttention.apply(q_BHTK, k_BHTK, v_BHTK, dropout)
        else:
            y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=True)
        return self.o(y_BHTK.transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _by_distance(bias_HS: Tensor, length: int) -> Tensor:
    """Additions to the logits by distance; keys behind the query are hidden."""
    position_T = torch.arange(length, device=bias_HS.device)
    distance_TT = position_T[:, None] - position_T
    return bias_HS[:, distance_TT.clamp(min=0)].masked_fill(distance_TT < 0, -torch.inf)


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


class _BlockAttention(torch.autograd.Function):
    """Causal attention with or without dropout on its weights, for the CPU.

    Each block of queries meets the keys up to its end, and no others. The weights are kept for the backward pass.
    (Products go into tensors of their own: torch writes into a part of one matrix by matrix.)
    """

    @staticmethod
    def forward(ctx: Any, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, p: float) -> Tensor:
        q_NTK, k_NTK, v_NTK = (tensor.flatten(0, 1) for tensor in (q_BHTK, k_BHTK, v_BHTK))
        y_NTK = torch.empty_like(v_NTK)
        weights, keeps, ctx.factor = [], [], 1.0
        for here, seen in _blocks(q_NTK.shape[1], p):
            weight_NQS = dropped_NQS = _causal_weights(q_NTK[:, here], k_NTK[:, seen])
            weights.append(weight_NQS)
            if p:
                keep_NQS, ctx.factor = keep_mask(tuple(weight_NQS.shape), p)
                keeps.append(keep_NQS)
                dropped_NQS = weight_NQS * keep_NQS
            y_NTK[:, here] = torch.bmm(dropped_NQS, v_NTK[:, seen])
        ctx.save_for_backward(q_NTK, k_NTK, v_NTK, *weights, *keeps)
        ctx.p, ctx.shape = p, q_BHTK.shape
        return y_NTK.mul_(ctx.factor).view(ctx.shape) if p else y_NTK.view(ctx.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BHTK: Tensor) -> tuple[Tensor | None, ...]:
        q_NTK, k_NTK, v_NTK, *saved = ctx.saved_tensors
        blocks = _blocks(q_NTK.shape[1], ctx.p)
        d_y_NTK = d_y_BHTK.flatten(0, 1)
        if keeps := saved[len(blocks) :]:
            d_y_NTK = d_y_NTK * ctx.factor
        d_q_NTK = torch.empty_like(q_NTK)
        d_k_NTK: Any = None
        d_v_NTK: Any = None
        for index, (here, seen) in reversed(list(enumerate(blocks))):
            weight_NQS = dropped_NQS = saved[index]
            d_weight_NQS = torch.bmm(d_y_NTK[:, here], v_NTK[:, seen].mT)
            if keeps:
                dropped_NQS = weight_NQS * keeps[index]
                d_weight_NQS.mul_(keeps[index])
            d_v_here_NSK = torch.bmm(dropped_NQS.mT, d_y_NTK[:, here])
            d_score_NQS = torch._softmax_backward_data(d_weight_NQS, weight_NQS, -1, weight_NQS.dtype)
            d_q_NTK[:, here] = torch.bmm(d_score_NQS, k_NTK[:, seen])
            d_k_here_NSK = torch.bmm(d_score_NQS.mT, q_NTK[:, here])
            if d_k_NTK is None:  # the last block has seen all keys
                d_k_NTK, d_v_NTK = d_k_here_NSK, d_v_here_NSK
            else:
                d_k_NTK[:, seen] += d_k_here_NSK
                d_v_NTK[:, seen] += d_v_here_NSK
        for gradient in (d_q_NTK, d_k_NTK):
            gradient.mul_(q_NTK.shape[-1] ** -0.5)
        return *(gradient.view(ctx.shape) for gradient in (d_q_NTK, d_k_NTK, d_v_NTK)), None


def _blocks(length: int, dropout: float) -> list[tuple[slice, slice]]:
    """(queries, the keys that any of them may see), block by block."""
    block = -(-QUERY_BLOCK // 2) if dropout else min(QUERY_BLOCK, max(LEAST_BLOCK, length // 2))
    ends = [min(start + block, length) for start in range(0, length, block)]
    return [(slice(block * i, end), slice(0, end)) for i, end in enumerate(ends)]


def _causal_weights(q_NQK: Tensor, k_NSK: Tensor) -> Tensor:
    """Softmax weights of the last Q positions over all S; the diagonal block alone holds keys to be hidden."""
    queries, keys = q_NQK.shape[1], k_NSK.shape[1]
    hidden_QS = q_NQK.new_full((queries, keys), -torch.inf).triu_(1 + keys - queries)
    score_NQS = torch.baddbmm(hidden_QS, q_NQK, k_NSK.mT, alpha=q_NQK.shape[-1] ** -0.5)
    return torch.softmax(score_NQS, -1, out=score_NQS)
