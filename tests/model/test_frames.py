import math
import random

import pytest
import torch

from oelm.model.frames import draw_frame, gaussian, orthonormal_rows

KINDS = ("normal", "matched", "orthogonal", "global")


def test_every_heads_rows_are_orthonormal_for_500_shapes_and_seeds():
    chance = random.Random(0)
    worst = 0.0
    for _ in range(500):
        heads, d_head = chance.randint(1, 8), chance.randint(1, 48)
        d_model = heads * d_head
        kind = chance.choice(("orthogonal", "global"))
        frame = draw_frame(kind, heads, d_model, chance.randint(0, 20), chance.choice("qk"), chance.randint(0, 10**6))
        blocks = frame.double().view(heads, d_head, d_model)
        worst = max(worst, float((blocks @ blocks.mT - torch.eye(d_head, dtype=torch.float64)).abs().max()))
    assert worst <= 1e-6  # the bar is 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_is_a_pure_function_of_its_arguments(kind):
    torch.manual_seed(1)
    first = draw_frame(kind, 4, 32, layer=2, role="q", seed=5)
    torch.manual_seed(2)
    torch.rand(10)
    assert torch.equal(first, draw_frame(kind, 4, 32, layer=2, role="q", seed=5))
    for changed in (dict(layer=3), dict(role="k"), dict(seed=6)):
        assert not torch.equal(first, draw_frame(kind, 4, 32, **{"layer": 2, "role": "q", "seed": 5, **changed}))


def test_scales_are_those_of_the_table():
    d = 512
    assert draw_frame("normal", 8, d, 0, "q", 1).std().item() == pytest.approx(0.02, rel=0.01)
    for kind in ("matched", "orthogonal", "global"):
        assert draw_frame(kind, 8, d, 0, "q", 1).std().item() == pytest.approx(1 / math.sqrt(d), rel=0.01)


def test_attention_logits_of_the_published_control_are_five_times_too_small():
    """For LayerNorm-like input: std 0.20 from N(0, 0.02) against 1.00 from frames of the matched scale."""
    d, heads = 512, 8
    x = torch.nn.functional.layer_norm(torch.randn(256, d, generator=torch.Generator().manual_seed(0)), (d,))

    def spread(kind):
        q, k = (x @ draw_frame(kind, heads, d, 0, role, 3).T for role in "qk")
        q, k = (t.view(256, heads, 64).transpose(0, 1) for t in (q, k))
        logits = q @ k.mT / math.sqrt(64)
        off_diagonal = ~torch.eye(256, dtype=torch.bool)
        return logits[:, off_diagonal].std().item()

    assert spread("normal") == pytest.approx(0.20, abs=0.02)
    assert spread("matched") == pytest.approx(1.0, abs=0.05)
    assert spread("orthogonal") == pytest.approx(1.0, abs=0.05)


def test_kinds_share_one_gaussian_draw():
    normal, matched = (draw_frame(kind, 4, 64, 1, "k", 9) for kind in ("normal", "matched"))
    torch.testing.assert_close(normal / 0.02, matched * 8)
    # Gram-Schmidt with positive coefficients keeps the direction of a head's first row.
    orthogonal = draw_frame("orthogonal", 4, 64, 1, "k", 9)
    first = torch.nn.functional.cosine_similarity(orthogonal[0], normal[0], dim=0)
    assert first.item() == pytest.approx(1.0, abs=1e-6)


def test_heads_of_the_orthogonal_frame_are_independent_and_of_the_global_one_orthogonal():
    head_wise, whole = (draw_frame(kind, 4, 64, 0, "q", 2) for kind in ("orthogonal", "global"))
    eye = torch.eye(64)
    assert (whole @ whole.T - eye).abs().max() < 1e-6
    assert (head_wise @ head_wise.T - eye).abs().max() > 0.1


def test_rows_follow_the_sign_of_r():
    block = torch.tensor([[-2.0, 0.0], [1.0, -3.0]], dtype=torch.float64)
    torch.testing.assert_close(orthonormal_rows(block), torch.tensor([[-1.0, 0.0], [0.0, -1.0]], dtype=torch.float64))


def test_draws_differ_by_name_and_seed_alone():
    assert torch.equal(gaussian((3, 4), 1, "a"), gaussian((3, 4), 1, "a"))
    assert not torch.equal(gaussian((3, 4), 1, "a"), gaussian((3, 4), 1, "b"))
    assert not torch.equal(gaussian((3, 4), 1, "a"), gaussian((3, 4), 2, "a"))
