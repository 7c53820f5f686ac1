"""What the arms are timed against: other people's models of the same shape, each trained the way its authors do.

transformers   GPT2LMHeadModel with SDPA; fused AdamW
published      eager, in the style of the published experiments: the whole attention square, masked
               softmax, dropout on its weights and inside the feed-forward layer too, all logits at once,
               AdamW without fusion
nanogpt        GPT of a nanoGPT checkout, with its own configure_optimizers
"""

import importlib.metadata
import importlib.util
import io
import math
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.config import RunConfig
from oelm.errors import UserError
from oelm.machine import git_commit, keep_compiled

Step = Callable[[Tensor, Tensor], None]
"""One whole training step on tokens and their targets."""


def check_peer(name: str, nanogpt: Path | None) -> None:
    if name == "transformers" and not importlib.util.find_spec("transformers"):
        raise UserError("the peer transformers needs the package of that name: make hf (or pip install 'oelm[hf]')")
    if name == "nanogpt" and nanogpt is None:
        raise UserError("nanogpt: say where its checkout is with --nanogpt DIR")
    if name == "nanogpt" and nanogpt and not (nanogpt / "model.py").is_file():
        raise UserError(f"{nanogpt / 'model.py'} is not there: --nanogpt names a checkout of nanoGPT")


def version(name: str, nanogpt: Path | None) -> str | None:
    """Which of its versions a peer is, where that can be told."""
    match name:
        case "transformers":
            return importlib.metadata.version(name)
        case "nanogpt":
            assert nanogpt
            return git_commit(nanogpt) if (nanogpt / ".git").exists() else None
        case _:
            return None


def peer(name: str, config: RunConfig, nanogpt: Path | None) -> Step:
    torch.manual_seed(config.seed)
    match name:
        case "transformers":
            return _transformers(config)
        case "nanogpt":
            assert nanogpt
            return _nanogpt(config, nanogpt)
        case _:
            model = PublishedGPT(config)
            return _step(model, model, torch.optim.AdamW(model.parameters(), lr=config.max_lr), config)


def _step(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer, config: RunConfig
) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> None:
        loss(tokens, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    model.train()
    if config.compile:
        keep_compiled()
        model.compile()
    return step


def _transformers(config: RunConfig) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    drop = config.dropout
    shape = GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.seq_len, n_embd=config.d_model, n_layer=config.num_layers,
        n_head=config.num_heads, n_inner=config.d_ff, activation_function="gelu", resid_pdrop=drop, embd_pdrop=drop,
        attn_pdrop=drop, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel._from_config(shape, attn_implementation="sdpa")

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(tokens).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return _step(model, loss, torch.optim.AdamW(model.parameters(), lr=config.max_lr, fused=True), config)


def _nanogpt(config: RunConfig, checkout: Path) -> Step:
    spec = importlib.util.spec_from_file_location("nanogpt_model", checkout / "model.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    shape = module.GPTConfig(
        block_size=config.seq_len, vocab_size=config.vocab_size, n_layer=config.num_layers, n_head=config.num_heads,
        n_embd=config.d_model, dropout=config.dropout, bias=False,
    )  # fmt: skip
    with redirect_stdout(io.StringIO()):  # it prints what it counts
        model: Any = module.GPT(shape)
        optimizer = model.configure_optimizers(config.weight_decay, config.max_lr, (config.beta1, config.beta2), "cpu")
    return _step(model, lambda tokens, targets: model(tokens, targets)[1], optimizer, config)


class PublishedGPT(nn.Module):
    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.seq_len, config.d_model)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*[_PublishedBlock(config) for _ in range(config.num_layers)])
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class _PublishedBlock(nn.Module):
    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        d = config.d_model
        self.heads = config.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.drop = nn.Dropout(config.dropout)
        self.ffn = nn.Sequential(nn.Linear(d, config.d_ff), nn.GELU(), self.drop, nn.Linear(config.d_ff, d))

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        h = self.norm1(x)
        q, k, v = (project(h).view(B, T, self.heads, -1).transpose(1, 2) for project in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(D // self.heads)
        scores = scores.masked_fill(torch.triu(torch.ones(T, T, dtype=torch.bool), 1), float("-inf"))
        y = torch.matmul(self.drop(F.softmax(scores, dim=-1)), v)
        x = x + self.drop(self.o(y.transpose(1, 2).contiguous().view(B, T, D)))
        return x + self.drop(self.ffn(self.norm2(x)))
