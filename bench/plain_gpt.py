"""The pocket baseline against the same model written as plain nanoGPT-style code, on the same batches.

    python -m bench.plain_gpt --data data/tinystories-bpe1024 --tokens 10e6

Trains a GPT of one file, independent of `oelm.model` and `oelm.train` (own modules, own initial weights,
own optimizer groups and schedule), reading only the batch order from oelm, and beside it, in another
process with the same number of threads, the same run by `oelm train`. Prints both validation losses
and their relative difference.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from bench import PREPARED, run
from oelm.config import RunConfig, resolve
from oelm.data.tokens import WindowOrder, open_data, read_windows


class PlainBlock(nn.Module):
    """Masked softmax attention written out, fused QKV, ReLU-free MLP: nothing shared with oelm's model."""

    def __init__(self, c: RunConfig) -> None:
        super().__init__()
        self.heads = c.num_heads
        self.ln1, self.ln2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv = nn.Linear(c.d_model, 3 * c.d_model, bias=False)
        self.out = nn.Linear(c.d_model, c.d_model, bias=False)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))
        self.register_buffer("mask", torch.triu(torch.ones(c.seq_len, c.seq_len, dtype=torch.bool), 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        weights = scores.masked_fill(self.mask[:T, :T], float("-inf")).softmax(-1)  # type: ignore[index]
        x = x + self.out((weights @ v).transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))


class PlainGPT(nn.Module):
    def __init__(self, c: RunConfig) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.seq_len, c.d_model)
        self.blocks = nn.Sequential(*[PlainBlock(c) for _ in range(c.num_layers)])
        self.norm = nn.LayerNorm(c.d_model)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.blocks(self.wte(x) + self.wpe(torch.arange(x.size(1)))))
        return F.cross_entropy((h @ self.wte.weight.T).view(-1, self.wte.num_embeddings), y.reshape(-1))


def plain_steps(c: RunConfig, model: PlainGPT, tokens: np.ndarray) -> Iterator[float]:
    """The loss of each training step."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [dict(params=matrices, weight_decay=c.weight_decay), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=c.max_lr, betas=(c.beta1, c.beta2))
    order = WindowOrder(len(tokens), c.seq_len, c.batch_size, c.seed)
    for step in range(c.max_steps):
        if step < c.warmup_steps:
            scale = (step + 1) / c.warmup_steps
        else:
            scale = 0.5 + 0.5 * math.cos(math.pi * (step - c.warmup_steps) / (c.max_steps - c.warmup_steps))
        for group in optimizer.param_groups:
            group["lr"] = c.max_lr * scale
        window = torch.from_numpy(read_windows(tokens, order.starts(step), c.seq_len))
        loss = model(window[:, :-1], window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip)
        optimizer.step()
        yield loss.item()


def train_plain(c: RunConfig) -> float:
    torch.set_num_threads(c.threads)
    torch.manual_seed(c.seed)
    data = open_data(c.dataset, c.data_path)
    model = PlainGPT(c)
    for step, loss in enumerate(plain_steps(c, model, data.splits["train"])):
        if step % 500 == 0:
            print(f"plain step {step} loss {loss:.4f}", flush=True)
    return _validate(model, data.splits["val"], c.seq_len)


@torch.no_grad()
def _validate(model: PlainGPT, tokens: np.ndarray, seq_len: int) -> float:
    total = 0.0
    for start in range(0, len(tokens) - 1, seq_len):
        window = torch.from_numpy(tokens[start : start + seq_len + 1].astype(np.int64))[None]
        total += model(window[:, :-1], window[:, 1:]).item() * (window.size(1) - 1)
    return total / (len(tokens) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/tinystories-bpe1024", help=PREPARED)
    parser.add_argument("--tokens", type=float, default=10e6)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", default="outputs/bench_plain_gpt")
    options = parser.parse_args()
    steps = math.ceil(options.tokens / (16 * 128))
    settings = dict(preset="pocket", data_path=options.data, max_steps=steps, seed=options.seed, threads=1,
                    val_interval=1000, out_dir=options.out)  # fmt: skip
    flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    ours = subprocess.Popen([sys.executable, "-m", "oelm", "train", *flags], stdout=subprocess.DEVNULL)
    plain = train_plain(resolve(settings))
    if ours.wait():
        sys.exit("oelm train failed")
    loss = json.loads(Path(options.out, "summary.json").read_text())["final_val_loss"]
    print(f"tokens seen {steps * 2048:,} | plain {plain:.4f} | oelm {loss:.4f} | difference {loss / plain - 1:+.2%}")


if __name__ == "__main__":
    run(main)
