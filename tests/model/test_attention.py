import math

import pytest
import torch
import torch.nn.functional as F

from oelm.config import resolve
from oelm.model import attention
from oelm.model.attention import Attention, BlockAttention

SHAPE = dict(preset="tiny", d_model=48, num_heads=3, num_layers=2, seq_len=40, vocab_size=101)


def heads(seed=0, length=40):
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, length, 16, generator=chance, dtype=torch.float64).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("block", [1, 7, 16, 128])
def test_dropped_attention_is_the_textbook_formula_with_the_same_mask(monkeypatch, block):
    """softmax(q k' / sqrt(K), causal), holes, v: written out in float64, gradients by autograd."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    masks = []

    def recorded(like, p):
        masks.append(torch.rand(like.shape, generator=torch.Generator().manual_seed(len(masks))) >= p)
        return masks[-1], 1 / (1 - p)

    monkeypatch.setattr(attention, "keep_mask", recorded)
    ours, theirs = heads(), heads()
    found = BlockAttention.apply(*ours, 0.3)
    found.cos().sum().backward()
    keep = torch.zeros(6, 40, 40, dtype=torch.bool)
    for (start, count, seen), mask in zip(attention._blocks(40, 0.3), masks, strict=True):
        keep[:, start : start + count, :seen] = mask
    q, k, v = theirs
    scores = (q @ k.mT / math.sqrt(16)).masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -math.inf)
    expected = (scores.softmax(-1) * keep.view(2, 3, 40, 40) / 0.7) @ v
    expected.cos().sum().backward()
    torch.testing.assert_close(found, expected)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("block", [1, 7, 16, 40, 128])
def test_without_dropout_block_attention_is_plain_causal_attention(monkeypatch, block):
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    ours, theirs = heads(), heads()
    found, expected = BlockAttention.apply(*ours, 0.0), F.scaled_dot_product_attention(*theirs, is_causal=True)
    torch.testing.assert_close(found, expected)
    for output in (found, expected):
        output.cos().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    ("keys", "matrix"),
    [
        ("tied", torch.eye(48)),
        ("next", torch.eye(48).roll(-16, 0)),  # head h reads the channels of head h + 1
        ("shuffled", torch.eye(48)[torch.arange(48).view(16, 3).T.flatten()]),  # head h: channels h, h + 3, ...
    ],
)
def test_sliced_frames_are_projections_by_rows_of_the_identity(keys, matrix):
    sliced = Attention(resolve({**SHAPE, "model_type": "oelm_sliced", "sliced_keys": keys}))
    full = Attention(resolve(SHAPE))
    full.v, full.o = sliced.v, sliced.o
    with torch.no_grad():
        full.q.weight.copy_(torch.eye(48))
        full.k.weight.copy_(matrix)
    x = torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(sliced(x), full(x))
    assert {name for name, _ in sliced.named_parameters()} == {"v.weight", "o.weight"}
