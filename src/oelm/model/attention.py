"""Causal multi-head self-attention with separate Q, K, V and O projections."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.config import RunConfig
from oelm.model.by_hand import as_made, by_hand, is_real, once, scratch
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

    @property
    def plain(self) -> bool:
        """Queries and keys are products with matrices, or the same slices, and nothing else."""
        if not as_made(self, Attention) or self.mixing is not None or self.relative_bias is not None:
            return False
        q, k = self.q, self.k
        sliced = as_made(q, nn.Identity) and as_made(k, SlicedKey) and k.kind == "tied"
        if not (sliced or all(as_made(frame, Projection) and frame.is_matrix for frame in (q, k))):
            return False
        return all(as_made(matrix, nn.Linear) and matrix.bias is None for matrix in (self.v, self.o))

    @property
    def p_now(self) -> float:
        """Of the dropout on its weights, as it is now."""
        return self.dropout if self.training else 0.0

    def in_blocks(self, x_BTD: Tensor) -> bool:
        """Block attention is the faster one for these tokens."""
        return by_hand(x_BTD) and (x_BTD.shape[1] <= BLOCKS_PAY or bool(self.p_now))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (self._heads(project(x_BTD)) for project in (self.q, self.k, self.v))
        if self.mixing is not None:
            q_BHTK, k_BHTK = self.mixing(q_BHTK, k_BHTK)
        if self.relative_bias is not None:
            bias_HTT = _by_distance(self.relative_bias, x_BTD.shape[1])
            y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=bias_HTT, dropout_p=self.p_now)
        elif self.in_blocks(x_BTD):
            y_BHTK = BlockAttention.apply(q_BHTK, k_BHTK, v_BHTK, self.p_now)
        else:
            y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=self.p_now, is_causal=True)
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


class BlockAttention(torch.autograd.Function):
    """Causal attention with or without dropout on its weights, for the CPU."""

    @staticmethod
    def forward(ctx: Any, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, p: float) -> Tensor:
        q_NTK, k_NTK, v_NTK = (tensor.flatten(0, 1) for tensor in (q_BHTK, k_BHTK, v_BHTK))
        y_BHTK = _side_by_side(q_BHTK)
        ctx.scale, ctx.p = q_BHTK.shape[-1] ** -0.5, p
        weights, ctx.factor = attend((q_NTK, k_NTK, v_NTK), y_BHTK, p, ctx.scale)
        ctx.save_for_backward(q_NTK, k_NTK, v_NTK, *weights)
        return y_BHTK

    @staticmethod
    @once
    def backward(ctx: Any, d_y_BHTK: Tensor) -> tuple[Tensor | None, ...]:
        q_NTK, k_NTK, v_NTK, *weights = ctx.saved_tensors
        d_q_BHTK = _side_by_side(d_y_BHTK)
        d_kv_2BHTK = _side_by_side(d_y_BHTK, 2)
        attend_backward(d_y_BHTK, (q_NTK, k_NTK, v_NTK), weights, d_q_BHTK, d_kv_2BHTK, ctx.p, ctx.factor)
        d_k_BHTK, d_v_BHTK = d_kv_2BHTK
        return d_q_BHTK.mul_(ctx.scale), d_k_BHTK.mul_(ctx.scale), d_v_BHTK, None


def _side_by_side(like_BHTK: Tensor, *several: int) -> Tensor:
    """Room for a tensor like this one, or for `several`, in which the heads of a token are neighbours, as the next
    product wants them."""
    B, H, T, K = like_BHTK.shape
    return like_BHTK.new_empty(*several, B, T, H, K).transpose(-2, -3)


def attend(heads: Sequence[Tensor], y_BHTK: Tensor, p: float, scale: float = 1.0) -> tuple[list[Tensor], float]:
    """Write softmax(scale q k') v into y. For the backward pass: the weights of every block, then what dropout keeps of
    them, if there is any; and the factor that makes up for the rest.

    Each block of queries meets the keys up to its end, and no others. (Products go into tensors of their own: torch
    writes into a part of one matrix by matrix.)
    """
    q_NTK, k_NTK, v_NTK = heads
    weights, keeps, factor = [], [], 1.0
    hide = _hidden if is_real(q_NTK) else _hidden.__wrapped__
    for start, count, seen in _blocks(q_NTK.shape[1], p):
        q_NQK, k_NSK, v_NSK = _rows(q_NTK, start, count), _rows(k_NTK, 0, seen), _rows(v_NTK, 0, seen)
        hidden_QS = hide(count, seen, q_NTK.dtype)
        score_NQS = torch.baddbmm(hidden_QS, q_NQK, k_NSK.mT, alpha=scale)
        weight_NQS = dropped_NQS = torch.softmax(score_NQS, -1, out=score_NQS)
        weights.append(weight_NQS)
        if p:
            keep_NQS, factor = keep_mask(weight_NQS, p)
            keeps.append(keep_NQS)
            dropped_NQS = torch.mul(weight_NQS, keep_NQS, out=scratch("dropped", weight_NQS, *weight_NQS.shape))
        _write(torch.bmm(dropped_NQS, v_NSK, out=scratch("block", v_NTK, *q_NQK.shape)), y_BHTK, start)
    if p:
        y_BHTK.mul_(factor)
    return weights + keeps, factor


def attend_backward(
    d_y_BHTK: Tensor, heads: Sequence[Tensor], weights: Sequence[Tensor], d_q_BHTK: Tensor | None, d_kv_2BHTK: Tensor,
    p: float, factor: float,
) -> None:  # fmt: skip
    """Write the gradients of q, and of k and v; those of q and k still lack the scale of the logits.

    Where queries and keys are the same slices there is no room for that of q: it is added to that of k. Small products
    go into memory that is the same in every layer and still in the cache: a step of pocket takes 0.975 of its time.
    """
    q_NTK, k_NTK, v_NTK = heads
    d_y_NTK = scratch("heads", q_NTK, *q_NTK.shape)
    d_y_NTK.view_as(d_y_BHTK).copy_(d_y_BHTK)
    d_kv_2NTK = scratch("keys", q_NTK, 2, *q_NTK.shape)
    blocks = _blocks(q_NTK.shape[1], p)
    if keeps := weights[len(blocks) :]:
        d_y_NTK.mul_(factor)
    for index in reversed(range(len(blocks))):
        start, count, seen = blocks[index]
        weight_NQS = dropped_NQS = weights[index]
        d_y_NQK, k_NSK, v_NSK = _rows(d_y_NTK, start, count), _rows(k_NTK, 0, seen), _rows(v_NTK, 0, seen)
        d_weight_NQS = torch.bmm(d_y_NQK, v_NSK.mT, out=scratch("weights", weight_NQS, *weight_NQS.shape))
        if keeps:
            keep_NQS = scratch("kept", weight_NQS, *weight_NQS.shape).copy_(keeps[index])
            dropped_NQS = torch.mul(weight_NQS, keep_NQS, out=scratch("dropped", weight_NQS, *weight_NQS.shape))
            d_weight_NQS.mul_(keep_NQS)
        last = seen == q_NTK.shape[1]
        d_kv_2NSK = d_kv_2NTK if last else scratch("earlier keys", q_NTK, 2, *k_NSK.shape)
        d_k_NSK, d_v_NSK = d_kv_2NSK.unbind()
        torch.bmm(dropped_NQS.mT, d_y_NQK, out=d_v_NSK)
        d_score_NQS = torch._softmax_backward_data(
            d_weight_NQS, weight_NQS, -1, weight_NQS.dtype, grad_input=d_weight_NQS
        )
        d_q_NQK = torch.bmm(d_score_NQS, k_NSK, out=scratch("block", q_NTK, *d_y_NQK.shape))
        torch.bmm(d_score_NQS.mT, _rows(q_NTK, start, count), out=d_k_NSK)
        if not last:
            d_kv_2NTK.narrow(2, 0, seen).add_(d_kv_2NSK)
        if d_q_BHTK is None:
            _rows(d_kv_2NTK[0], start, count).add_(d_q_NQK)
        else:
            _write(d_q_NQK, d_q_BHTK, start)
    d_kv_2BHTK.copy_(d_kv_2NTK.view_as(d_kv_2BHTK))


def _write(x_NQK: Tensor, into_BHTK: Tensor, start: int) -> None:
    into_BHQK = into_BHTK.narrow(2, start, x_NQK.shape[1])
    into_BHQK.copy_(x_NQK.view_as(into_BHQK))


def _rows(x_NTK: Tensor, start: int, count: int) -> Tensor:
    return x_NTK if count == x_NTK.shape[1] else x_NTK.narrow(1, start, count)


def _blocks(length: int, dropout: float) -> list[tuple[int, int, int]]:
    """(first query, how many of them, the keys that any of them may see), block by block."""
    block = -(-QUERY_BLOCK // 2) if dropout else min(QUERY_BLOCK, max(LEAST_BLOCK, length // 2))
    ends = [min(start + block, length) for start in range(0, length, block)]
    return [(block * i, end - block * i, end) for i, end in enumerate(ends)]


@lru_cache(maxsize=64)
def _hidden(queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    """To be added to the logits of the last `queries` positions: nothing, or what hides a later key."""
    with torch.inference_mode(False):  # it serves training, too
        return torch.full((queries, keys), -torch.inf, dtype=dtype, device="cpu").triu_(1 + keys - queries)
