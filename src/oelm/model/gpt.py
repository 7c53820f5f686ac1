"""The GPT: pre-norm, learned positions, tied embedding, GELU, no bias in Q/K/V/O."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.config import RunConfig
from oelm.model import extras
from oelm.model.attention import Attention
from oelm.model.by_hand import as_made, by_hand
from oelm.model.dropout import Dropout
from oelm.model.frames import INIT_STD, draw_frame, gaussian
from oelm.model.halves import attention_half, can_attend, can_feed_forward, feed_forward_half
from oelm.model.loss import linear_cross_entropy


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
        self.down = nn.Linear(config.d_ff, config.d_model)

    @property
    def plain(self) -> bool:
        """Two products with a bias, and nothing else."""
        products = all(as_made(layer, nn.Linear) and layer.bias is not None for layer in (self.up, self.down))
        return products and as_made(self, FeedForward)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class Block(nn.Module):
    def __init__(self, config: RunConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = Attention(config, layer)
        self.ffn_norm = nn.LayerNorm(config.d_model)
        self.ffn = FeedForward(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        attention, ffn, dropout = self.attention, self.ffn, self.dropout
        halved = by_hand(x_BTD) and as_made(dropout, Dropout)
        if halved and can_attend(self.attention_norm, attention, dropout.p_now) and attention.in_blocks(x_BTD):
            h_BTD = attention_half(x_BTD, self.attention_norm, attention, dropout.p_now)
        else:
            h_BTD = x_BTD + dropout(attention(self.attention_norm(x_BTD)))
        if halved and can_feed_forward(self.ffn_norm, ffn):
            return feed_forward_half(h_BTD, self.ffn_norm, ffn.up, ffn.down, dropout.p_now)
        return h_BTD + dropout(ffn(self.ffn_norm(h_BTD)))


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
        x_BTD = self.tokens(tokens_BT, sparse=True) if sparse else self.tokens(tokens_BT)
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
        sparse = by_hand(tokens_BT) and as_made(self.tokens, Embedding)
        hidden_BTD = self.hidden(tokens_BT, sparse)
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
