"""The GPT: pre-norm, learned positions, tied embedding, GELU, no bias in Q/K/V/O."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from oelm.config import RunConfig
from oelm.model import extras
from oelm.model.attention import Attention
from oelm.model.dropout import Dropout
from oelm.model.frames import INIT_STD, draw_frame, gaussian
from oelm.model.loss import linear_cross_entropy

KEPT_FLOATS = 2**21
"""Up to here GELU(x) is kept for the backward pass instead of made again."""


class Embedding(nn.Embedding):
    """Without torch's own draw, which on the meta device would import the whole compiler."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns, _weight=torch.empty(rows, columns))

    def forward(self, tokens: Tensor, sparse: bool = False) -> Tensor:
        """`sparse`: the gradient is that of the rows used, good for adding to a dense one only."""
        return F.embedding(tokens, self.weight, sparse=sparse)


class FeedForward(nn.Module):
    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_ff)
        self.down = GeluLinear(config.d_ff, config.d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.up(x_BTD))


class GeluLinear(nn.Linear):
    """A linear layer on GELU(x)."""

    def forward(self, x_BTF: Tensor) -> Tensor:
        if x_BTF.device.type == "cpu" and not torch.compiler.is_compiling():
            return _GeluLinear.apply(x_BTF, self.weight, self.bias)
        return super().forward(F.gelu(x_BTF))


class _GeluLinear(torch.autograd.Function):
    """Of two tensors that are equally large, x and GELU(x), only x is kept: the other is made again for the weight
    gradient, at 0.6 % of a step's time. Where they are small, both are."""

    @staticmethod
    def forward(ctx: Any, x_BTF: Tensor, weight_DF: Tensor, bias_D: Tensor) -> Tensor:
        gelu_BTF = F.gelu(x_BTF)
        ctx.save_for_backward(x_BTF, weight_DF, gelu_BTF if x_BTF.numel() <= KEPT_FLOATS else None)
        return F.linear(gelu_BTF, weight_DF, bias_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTD: Tensor) -> tuple[Tensor | None, ...]:
        x_BTF, weight_DF, gelu_BTF = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        d_y_ND = d_y_BTD.flatten(0, -2)
        d_weight_DF = None
        if for_weight:
            d_weight_DF = d_y_ND.t() @ (F.gelu(x_BTF) if gelu_BTF is None else gelu_BTF).flatten(0, -2)
        d_x_BTF = torch.ops.aten.gelu_backward(d_y_BTD @ weight_DF, x_BTF) if for_x else None
        return d_x_BTF, d_weight_DF, d_y_ND.sum(0) if for_bias else None


class Block(nn.Module):
    def __init__(self, config: RunConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = Attention(config, layer)
        self.ffn_norm = nn.LayerNorm(config.d_model)
        self.ffn = FeedForward(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        return h_BTD + self.dropout(self.ffn(self.ffn_norm(h_BTD)))


class GPT(nn.Module):
    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = Embedding(config.vocab_size, config.d_model)
        self.positions = None if config.rope != "none" else Embedding(config.seq_len, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        if config.frames == "shared":
            first, *others = (cast(Block, block).attention for block in self.blocks)
            for attention in others:
                attention.q, attention.k = first.q, first.k
        self.final_norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)

    def hidden(self, tokens_BT: Tensor, sparse: bool = False) -> Tensor:
        """The normalised residual stream behind the last block; `sparse`: see Embedding."""
        x_BTD = self.tokens(tokens_BT, sparse)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions.weight[: x_BTD.shape[1]]
        x_BTD = self.dropout(x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.final_norm(x_BTD)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """The loss when there are targets, else the logits. The output matrix is the token embedding."""
        if targets_BT is None:
            return F.linear(self.hidden(tokens_BT), self.tokens.weight)
        # The loss has a dense gradient for the embedding; what the few tokens of a batch add to it need not be dense.
        hidden_BTD = self.hidden(tokens_BT, sparse=tokens_BT.device.type == "cpu" and not torch.compiler.is_compiling())
        return linear_cross_entropy(hidden_BTD.flatten(0, 1), self.tokens.weight, targets_BT.flatten(), reduction)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Set every tensor; each from its own generator, keyed by (seed, name).

        tensor                     start
        -------------------------  ----------------------------------------------
        attention.q, attention.k   a frame of the arm's kind (oelm.model.frames)
        extras of the attention    the identity where they can (oelm.model.extras)
        every other matrix         N(0, 0.02²), embeddings included
        norm weights               1
        biases                     0
        """
        config = self.config
        for name, parameter in self.named_parameters():
            start = extras.start_value(name, parameter)
            if start is not None:
                parameter.copy_(start)
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            elif not name.endswith(("attention.q.weight", "attention.k.weight")):
                parameter.copy_(gaussian(tuple(parameter.shape), seed, name) * INIT_STD)
            else:
                _, layer, _, role, _ = name.split(".")
                parameter.copy_(draw_frame(config.frames, config.num_heads, config.d_model, int(layer), role, seed))
