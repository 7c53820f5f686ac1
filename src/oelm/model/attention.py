"""Causal multi-head self-attention with separate Q, K, V and O projections."""

import torch.nn.functional as F
from torch import Tensor, nn

from oelm.config import RunConfig


class Attention(nn.Module):
    """Q, K, V and O are four matrices, never one: freezing Q and K must not touch V."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.q = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k = nn.Linear(config.d_model, config.d_model, bias=False)
        self.v = nn.Linear(config.d_model, config.d_model, bias=False)
        self.o = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (self._heads(project(x_BTD)) for project in (self.q, self.k, self.v))
        dropout = self.dropout if self.training else 0.0
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=True)
        return self.o(y_BHTK.transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
