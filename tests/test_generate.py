import math

import torch

from oelm.data.tokenizer import ByteTokenizer
from oelm.generate import stream_text
from oelm.model.sample import truncate


def test_top_k_keeps_the_k_likeliest():
    kept = truncate(torch.tensor([0.1, 3.0, 2.0, -1.0]), top_k=2, top_p=1.0)
    assert torch.isfinite(kept).tolist() == [False, True, True, False]


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert torch.isfinite(truncate(logits, 0, 0.6)).tolist() == [True, True, False, False]
    assert torch.isfinite(truncate(logits, 0, 0.4)).tolist() == [True, False, False, False]
    assert torch.isfinite(truncate(logits, 0, 1.0)).all()


def test_a_top_p_below_every_probability_still_keeps_one_token():
    kept = truncate(torch.zeros(10), 0, 1e-9)
    assert int(torch.isfinite(kept).sum()) == 1
    assert math.isclose(float(kept.softmax(-1).max()), 1.0)


def test_characters_of_several_bytes_are_streamed_whole():
    text = "héllo 正交 🙂"
    pieces = list(stream_text(ByteTokenizer(), iter(text.encode())))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_stream_ends_at_end_of_text():
    ids = [*b"ab", ByteTokenizer.end_of_text, *b"cd"]
    assert "".join(stream_text(ByteTokenizer(), iter(ids))) == "ab"
