"""The two halves of a block on a CPU, each one operation with a backward pass of its own:

    h = x + dropout(attention(norm(x)))        where queries and keys are products with matrices, or the same slices
    y = h + dropout(feed_forward(norm(h)))     of the input, and nothing else, and attention goes block by block

A small model's step is made of many small operations. Here queries, keys and values are one product, the logits' scale
is in its matrix, a residual is where the last product adds its result, and gradients that nobody else reads are
made in place and in memory that the cache still holds. A step of pocket takes about 0.95 of its time. The modules
within are not called: where one is not as it was made, or a hook waits for it, the half is taken apart again.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.model.attention import Attention, attend, attend_backward
from oelm.model.by_hand import KEPT_FLOATS, as_made, once, scratch
from oelm.model.dropout import kept
from oelm.model.products import multiply

norm_backward = torch.ops.aten.native_layer_norm_backward.default
gelu_backward_into = torch.ops.aten.gelu_backward.grad_input

stage: Callable[[str | None], None] = lambda name: None  # noqa: E731
"""Called where another part of a block begins, and with None at the end: for whoever times them (oelm profile)."""


def can_attend(norm: nn.Module, attention: nn.Module, p: float) -> bool:
    """Whether `attention_half` does what these do, with dropout `p` on the weights as on the result."""
    return isinstance(attention, Attention) and attention.plain and attention.p_now == p and _is_affine(norm)


def can_feed_forward(norm: nn.Module, ffn: nn.Module) -> bool:
    return bool(getattr(ffn, "plain", False)) and _is_affine(norm)


def _is_affine(norm: nn.Module) -> bool:
    return as_made(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None


def attention_half(x_BTD: Tensor, norm: nn.LayerNorm, attention: Attention, p: float) -> Tensor:
    matrices = (getattr(getattr(attention, role), "weight", None) for role in "qkvo")
    return _AttentionHalf.apply(x_BTD, norm.weight, norm.bias, *matrices, attention.num_heads, norm.eps, p)


def feed_forward_half(x_BTD: Tensor, norm: nn.LayerNorm, up: nn.Linear, down: nn.Linear, p: float) -> Tensor:
    weights = norm.weight, norm.bias, up.weight, up.bias, down.weight, down.bias
    return _FeedForwardHalf.apply(x_BTD, *weights, norm.eps, p)


class _AttentionHalf(torch.autograd.Function):
    """Without matrices for queries and keys, either are the heads' slices of the input.

    The matrices in one are kept for the backward pass: the 3 D x D floats of a layer are few beside its activations.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, norm_weight_D: Tensor, norm_bias_D: Tensor,
        q_DD: Tensor | None, k_DD: Tensor | None, v_DD: Tensor, o_DD: Tensor, num_heads: int, eps: float, p: float,
    ) -> Tensor:  # fmt: skip
        B, T, D = x_BTD.shape
        x_ND = x_BTD.flatten(0, 1)
        stage("norms")
        h_ND, mean_N1, rstd_N1 = torch.native_layer_norm(x_ND, (D,), norm_weight_D, norm_bias_D, eps)
        stage("attention q, k, v")
        ctx.shape, ctx.scale, ctx.p = (B, T, num_heads, D // num_heads), (D // num_heads) ** -0.5, p
        joint_ED = _joint(q_DD, k_DD, v_DD, ctx.scale)
        made_NE = multiply(h_ND, joint_ED.t(), scratch("qkv", h_ND, B * T, joint_ED.shape[0]))
        *qk, v_NTK = _heads(made_NE, ctx.shape).clone(memory_format=torch.contiguous_format).flatten(1, 2).unbind()
        ctx.sliced = not qk
        q_NTK, k_NTK = qk or 2 * [_heads(h_ND, ctx.shape)[0].flatten(0, 1)]
        stage("attention weights")
        y_BTHK = x_BTD.new_empty(ctx.shape)
        weights, ctx.factor = attend((q_NTK, k_NTK, v_NTK), y_BTHK.transpose(1, 2), p, 1.0 if qk else ctx.scale)
        stage("attention o")
        y_ND = y_BTHK.view(B * T, D)
        out_ND, kept_ND = _add(x_ND, y_ND, o_DD, None, p)
        stage(None)
        *for_h, for_q, for_k, for_v, for_o, _, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(
            x_ND, norm_weight_D, norm_bias_D, mean_N1, rstd_N1, h_ND if for_q or for_k or for_v else None,
            joint_ED if any(for_h) else None, q_DD, k_DD, v_DD, o_DD, q_NTK, k_NTK, v_NTK, y_ND if for_o else None,
            kept_ND, *weights,
        )  # fmt: skip
        return out_ND.view(B, T, D)

    @staticmethod
    @once
    def backward(ctx: Any, d_out_BTD: Tensor) -> tuple[Tensor | None, ...]:
        (  # the matrices that are in the joint one are there to be refused if they have changed since
            x_ND, norm_weight_D, norm_bias_D, mean_N1, rstd_N1, h_ND, joint_ED, _, _, _, o_DD, q_NTK, k_NTK, v_NTK,
            y_ND, kept_ND, *weights,
        ) = ctx.saved_tensors  # fmt: skip
        for_x, for_norm_weight, for_norm_bias, *for_qkv, for_o, _, _, _ = ctx.needs_input_grad
        N, D = x_ND.shape
        for_h = for_x or for_norm_weight or for_norm_bias
        d_out_ND = d_out_BTD.flatten(0, 1)
        d_o_ND = _times(d_out_ND, kept_ND)
        stage("attention o")
        d_o_DD = multiply(d_o_ND.t(), y_ND) if for_o else None
        d_qkv: list[Tensor | None] = [None, None, None]
        d_x_BTD = d_norm_weight_D = d_norm_bias_D = None
        if for_h or any(for_qkv):
            d_y_ND = multiply(d_o_ND, o_DD, scratch("stream", x_ND, N, D))
            stage("attention weights")
            d_made_NE = scratch("qkv", x_ND, N, 2 * D if ctx.sliced else 3 * D)
            d_heads = _heads(d_made_NE, ctx.shape)
            (d_y_BHTK,) = _heads(d_y_ND, ctx.shape)
            d_q_BHTK, d_kv_2BHTK = (None, d_heads) if ctx.sliced else (d_heads[0], d_heads[1:])
            attend_backward(d_y_BHTK, (q_NTK, k_NTK, v_NTK), weights, d_q_BHTK, d_kv_2BHTK, ctx.p, ctx.factor)
            stage("attention q, k, v")
            if all(for_qkv):
                d_qkv = list(multiply(d_made_NE.t(), h_ND).view(3, D, D).unbind())
            else:
                made = (None, *d_made_NE.split(D, 1)) if ctx.sliced else d_made_NE.split(D, 1)
                parts = zip(made, for_qkv, strict=True)
                d_qkv = [multiply(d_ND.t(), h_ND) if wanted else None for d_ND, wanted in parts]
            if d_qkv[0] is not None:
                d_qkv[0].mul_(ctx.scale)
        if for_h:
            d_h_ND = scratch("stream", x_ND, N, D)
            if ctx.sliced:
                d_k_ND, d_v_ND = d_made_NE.split(D, 1)
                torch.addmm(d_k_ND, d_v_ND, joint_ED, beta=ctx.scale, out=d_h_ND)
            else:
                multiply(d_made_NE, joint_ED, d_h_ND)
            stage("norms")
            d_x_ND, d_norm_weight_D, d_norm_bias_D = norm_backward(
                d_h_ND, x_ND, (D,), mean_N1, rstd_N1, norm_weight_D, norm_bias_D, ctx.needs_input_grad[:3]
            )
            d_x_BTD = d_x_ND.add_(d_out_ND).view_as(d_out_BTD) if for_x else None
        stage(None)
        return d_x_BTD, d_norm_weight_D, d_norm_bias_D, *d_qkv, d_o_DD, None, None, None


def _heads(x_NE: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """What lies side by side in `x_NE`, one behind the other, split into heads: (E // D, B, H, T, K), no copy."""
    B, T, H, K = shape
    return x_NE.view(B, T, x_NE.shape[1] // (H * K), H, K).permute(2, 0, 3, 1, 4)


def _joint(q_DD: Tensor | None, k_DD: Tensor | None, v_DD: Tensor, scale: float) -> Tensor:
    """The matrices in one, the queries' with the scale of the logits."""
    if q_DD is None or k_DD is None:
        return v_DD
    return torch.cat((q_DD * scale, k_DD, v_DD))


class _FeedForwardHalf(torch.autograd.Function):
    """Of two tensors that are equally large, the input of GELU and its result, a large result is not kept: it is made
    again for the weight gradient, at 0.6 % of a step's time."""

    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, norm_weight_D: Tensor, norm_bias_D: Tensor,
        up_FD: Tensor, up_bias_F: Tensor, down_DF: Tensor, down_bias_D: Tensor, eps: float, p: float,
    ) -> Tensor:  # fmt: skip
        x_ND = x_BTD.flatten(0, 1)
        stage("norms")
        h_ND, mean_N1, rstd_N1 = torch.native_layer_norm(x_ND, x_ND.shape[1:], norm_weight_D, norm_bias_D, eps)
        stage("ffn")
        up_NF = multiply(h_ND, up_FD.t(), up_bias_F.repeat(len(h_ND), 1), add=True)
        gelu_NF = F.gelu(up_NF)
        out_ND, kept_ND = _add(x_ND, gelu_NF, down_DF, down_bias_D, p)
        stage(None)
        for_up, for_down = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
        ctx.save_for_backward(
            x_ND, norm_weight_D, norm_bias_D, mean_N1, rstd_N1, h_ND if for_up else None, up_FD, down_DF, up_NF,
            gelu_NF if for_down and gelu_NF.numel() <= KEPT_FLOATS else None, kept_ND,
        )  # fmt: skip
        return out_ND.view_as(x_BTD)

    @staticmethod
    @once
    def backward(ctx: Any, d_out_BTD: Tensor) -> tuple[Tensor | None, ...]:
        (
            x_ND, norm_weight_D, norm_bias_D, mean_N1, rstd_N1, h_ND, up_FD, down_DF, up_NF, gelu_NF, kept_ND
        ) = ctx.saved_tensors  # fmt: skip
        for_x, for_norm_weight, for_norm_bias, for_up, for_up_bias, for_down, for_down_bias, _, _ = ctx.needs_input_grad
        for_h = for_x or for_norm_weight or for_norm_bias
        d_out_ND = d_out_BTD.flatten(0, 1)
        d_down_ND = _times(d_out_ND, kept_ND)
        stage("ffn")
        d_down_DF = None
        if for_down:
            d_down_DF = multiply(d_down_ND.t(), F.gelu(up_NF) if gelu_NF is None else gelu_NF)
        d_down_bias_D = d_down_ND.sum(0) if for_down_bias else None
        d_up_FD = d_up_bias_F = d_x_BTD = d_norm_weight_D = d_norm_bias_D = None
        if for_up or for_up_bias or for_h:
            d_up_NF = multiply(d_down_ND, down_DF, scratch("wide", up_NF, *up_NF.shape))
            gelu_backward_into(d_up_NF, up_NF, grad_input=d_up_NF)
            d_up_FD = multiply(d_up_NF.t(), h_ND) if for_up else None
            d_up_bias_F = d_up_NF.sum(0) if for_up_bias else None
        if for_h:
            d_h_ND = multiply(d_up_NF, up_FD, scratch("stream", x_ND, *x_ND.shape))
            stage("norms")
            d_x_ND, d_norm_weight_D, d_norm_bias_D = norm_backward(
                d_h_ND, x_ND, x_ND.shape[1:], mean_N1, rstd_N1, norm_weight_D, norm_bias_D, ctx.needs_input_grad[:3]
            )
            d_x_BTD = d_x_ND.add_(d_out_ND).view_as(d_out_BTD) if for_x else None
        stage(None)
        return d_x_BTD, d_norm_weight_D, d_norm_bias_D, d_up_FD, d_up_bias_F, d_down_DF, d_down_bias_D, None, None


def _add(
    x_ND: Tensor, y_NE: Tensor, weight_DE: Tensor, bias_D: Tensor | None, p: float
) -> tuple[Tensor, Tensor | None]:
    """x + dropout(y W' + b), and what dropout multiplied with; None without dropout."""
    if not p:
        return multiply(y_NE, weight_DE.t(), x_ND.clone() if bias_D is None else x_ND + bias_D, add=True), None
    out_ND = multiply(y_NE, weight_DE.t(), None if bias_D is None else bias_D.repeat(len(x_ND), 1), bias_D is not None)
    stage("dropout")
    kept_ND = kept(out_ND, p)
    return out_ND.mul_(kept_ND).add_(x_ND), kept_ND


def _times(d_out_ND: Tensor, kept_ND: Tensor | None) -> Tensor:
    """The gradient in front of dropout."""
    if kept_ND is None:
        return d_out_ND
    stage("dropout")
    return d_out_ND * kept_ND
