"""The output head and its loss in one: cross-entropy from hidden states, without ever holding all logits.

With 50,257 words the logits of one batch are larger than the model. Here they exist for a few hundred
tokens at a time, in one buffer that becomes exp(logits) and then the softmax gradient in place.
While they are there, everything is taken from them: the losses and both gradients. Rows stay
unnormalised; the factor 1 / sum is applied to the narrow side of each product instead. On a GPU, and under
torch.compile, torch's own operations take a few thousand tokens at a time, in mixed precision where it is on,
and make the logits again for the backward pass when there are more. (F.linear_cross_entropy, as of torch 2.13, has its
loss in the precision of its inputs, three digits of it in bfloat16, and float16 gradients before they are scaled up.)
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from oelm.model.by_hand import by_hand, once
from oelm.model.products import multiply

CHUNK_FLOATS = 512 * 50_304
"""Size of the logit buffer. More tokens at a time mean fewer passes over the weight gradient."""
ROW_MULTIPLE = 64
"""Rows of the buffer start at multiples of this, whatever the vocabulary: 50,257 is odd, 50,304 is not."""
TORCH_TOKENS = 4_096
"""Tokens that torch's own operations take at a time: with 50,257 words 0.8 GB of logits."""
SAFE_SUM = 1e-20, 1e30
"""A row sum of exponentials in here is as good without subtracting the maximum: what was too small for float32
beside it is less than 1e-17 of it, and nothing was too large."""


def linear_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, reduction: str = "mean") -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight), targets)` in float32; reduction "mean", or "none" without gradient."""
    differentiable = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    if not by_hand(hidden_ND) or (differentiable and reduction != "mean"):
        return _by_torch(hidden_ND, weight_VD, targets_N, reduction)
    if differentiable:
        return _LinearCrossEntropy.apply(hidden_ND, weight_VD, targets_N)
    losses_N = _losses(hidden_ND, weight_VD, targets_N)
    return losses_N.mean() if reduction == "mean" else losses_N


def _by_torch(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, reduction: str) -> Tensor:
    def losses(hidden_CD: Tensor, targets_C: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden_CD, weight_VD).float(), targets_C, reduction="none")

    parts = list(zip(hidden_ND.split(TORCH_TOKENS), targets_N.split(TORCH_TOKENS), strict=True))
    if len(parts) == 1 or not torch.is_grad_enabled():
        losses_N = torch.cat([losses(*part) for part in parts])
    else:
        losses_N = torch.cat([checkpoint(losses, *part, use_reentrant=False) for part in parts])
    return losses_N.mean() if reduction == "mean" else losses_N


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean loss; the gradients are made in the forward pass and handed out in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
        d_hidden_ND = torch.empty_like(hidden_ND)
        d_weight_VD = torch.empty_like(weight_VD) if weight_VD.requires_grad else None
        losses_N = _losses(hidden_ND, weight_VD, targets_N, d_hidden_ND, d_weight_VD)
        ctx.gradients = d_hidden_ND, d_weight_VD
        return losses_N.mean()

    @staticmethod
    @once
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        # Nothing holds on to them here, so that autograd may add to them instead of copying them.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("this loss has one backward pass: its gradients are handed out, not kept")
        if scale != 1:
            gradients = [None if gradient is None else gradient.mul_(scale) for gradient in gradients]
        return *gradients, None


def _losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    d_hidden_ND: Tensor | None = None,
    d_weight_VD: Tensor | None = None,
) -> Tensor:
    """The loss of each token; the gradients of their mean are written where there is room for them."""
    (tokens, _), words = hidden_ND.shape, weight_VD.shape[0]
    width = -(-words // ROW_MULTIPLE) * ROW_MULTIPLE
    chunk = max(1, min(tokens, CHUNK_FLOATS // width))
    buffer_CV = hidden_ND.new_empty(chunk, width)[:, :words]
    losses_N = hidden_ND.new_empty(tokens)
    for start in range(0, tokens, chunk):
        here = slice(start, min(start + chunk, tokens))
        hidden_CD, target_C = hidden_ND[here], targets_N[here]
        exp_CV, sum_C1, target_logit_C1 = _exponentials(hidden_CD, weight_VD, target_C, buffer_CV[: len(hidden_CD)])
        losses_N[here] = (sum_C1.log() - target_logit_C1).squeeze(1)
        if d_hidden_ND is None:
            continue
        # softmax - onehot, times the sum of its row, which `scale` takes out again
        unscaled_CV = exp_CV.scatter_add_(1, target_C[:, None], -sum_C1)
        scale_C1 = 1 / (tokens * sum_C1)
        multiply(unscaled_CV, weight_VD, d_hidden_ND[here]).mul_(scale_C1)
        if d_weight_VD is not None:
            multiply(unscaled_CV.t(), hidden_CD * scale_C1, d_weight_VD, add=start > 0)
    return losses_N


def _exponentials(
    hidden_CD: Tensor, weight_VD: Tensor, target_C: Tensor, buffer_CV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """exp(logits), its row sums, and the logits of the targets; all less the row's maximum where one would leave
    float32's range."""
    logits_CV = multiply(hidden_CD, weight_VD.t(), buffer_CV)
    target_logit_C1 = logits_CV.gather(1, target_C[:, None])
    sum_C1 = logits_CV.exp_().sum(1, keepdim=True)
    if ((sum_C1 > SAFE_SUM[0]) & (sum_C1 < SAFE_SUM[1])).all():
        return buffer_CV, sum_C1, target_logit_C1
    logits_CV = multiply(hidden_CD, weight_VD.t(), buffer_CV)
    max_C1 = logits_CV.amax(1, keepdim=True)
    exp_CV = logits_CV.sub_(max_C1).exp_()
    return exp_CV, exp_CV.sum(1, keepdim=True), target_logit_C1.sub_(max_C1)
