import math

import pytest
import torch

from oelm.config import resolve
from oelm.errors import UserError
from oelm.model import cost, freeze
from oelm.model.build import build_model

SHAPE = dict(preset="tiny", d_model=48, num_heads=3, num_layers=2, d_ff=96, seq_len=24, vocab_size=101)


def gpt(**settings):
    return build_model(resolve({**SHAPE, **settings})).eval()


def tokens(seed=0):
    return torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("frames", ["orthogonal", "sliced", "normal"])
@pytest.mark.parametrize(
    "extra",
    [{"key_conv": 4}, {"core": True}, {"lora": 3}, {"qk_gain": True}, {"temperature": True}, {"qk_bias": True},
     {"relative_bias": True}, {"core": True, "key_conv": 2, "temperature": True, "relative_bias": True}],
    ids=str,
)  # fmt: skip
def test_extras_start_as_the_identity(frames, extra):
    if frames == "sliced" and extra.keys() & {"lora", "qk_bias"}:
        with pytest.raises(UserError, match="sliced frames have no"):
            gpt(frames=frames, **extra)
        return
    with torch.no_grad():
        torch.testing.assert_close(
            gpt(frames=frames, **extra)(tokens()), gpt(frames=frames)(tokens()), atol=1e-6, rtol=0
        )


EVERY = [{"key_conv": 4}, {"core": True}, {"lora": 3}, {"qk_gain": True}, {"temperature": True}, {"qk_bias": True},
         {"relative_bias": True}, {"key_shift": 1.0}, {"key_shift": 0.5}, {"qk_norm": True}, {"rope": "half"},
         {"rope": "full"}, {"tie_qk": True}]  # fmt: skip


@pytest.mark.parametrize("extra", EVERY, ids=str)
def test_with_any_extra_changing_a_token_leaves_earlier_logits_as_they_were(extra):
    model = gpt(frames="orthogonal", **extra)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
        x = tokens()
        y = x.clone()
        y[:, 10] = (y[:, 10] + 1) % 101
        before, after = model(x), model(y)
    torch.testing.assert_close(before[:, :10], after[:, :10], atol=0, rtol=0)
    assert not torch.equal(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("extra", EVERY, ids=str)
def test_every_parameter_of_an_extra_gets_a_gradient_beside_frozen_frames(extra):
    config = resolve({**SHAPE, **extra, "frames": "orthogonal", "freeze": "qk"})
    model = build_model(config)
    frozen = freeze.apply(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_up"):  # at zero, its partner has no gradient yet
                parameter.add_(0.1)
    model(tokens(), tokens(1)).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name in frozen), name
        assert name in frozen or parameter.grad.abs().sum() > 0, name


def test_the_temperature_acts_behind_the_norm():
    model = gpt(frames="orthogonal", temperature=True, qk_norm=True)
    before = model(tokens())
    with torch.no_grad():
        model.blocks[0].attention.mixing.temperature.mul_(3.0)
    assert (model(tokens()) - before).abs().max() > 1e-3


def test_a_full_shift_gives_each_position_the_key_of_the_token_before():
    plain, shifted = gpt(frames="orthogonal"), gpt(frames="orthogonal", key_shift=1.0)
    x = torch.randn(1, 24, 48, generator=torch.Generator().manual_seed(2))
    attention = shifted.blocks[0].attention
    q, k = (attention._heads(project(x)) for project in (attention.q, attention.k))
    _, moved = attention.mixing(q, k)
    assert torch.equal(moved[:, :, 1:], k[:, :, :-1])
    assert moved[:, :, 0].abs().sum() == 0
    assert torch.equal(plain.blocks[0].attention.k.weight, attention.k.weight)


def test_rope_turns_logits_by_the_distance_alone():
    """q_i k_j depends on i - j: the same vectors at all positions give logits that are constant along diagonals."""
    model = gpt(frames="orthogonal", rope="full")
    attention = model.blocks[0].attention
    same = torch.randn(1, 1, 48, generator=torch.Generator().manual_seed(3)).expand(1, 24, 48)
    q, k = attention.mixing(attention._heads(attention.q(same)), attention._heads(attention.k(same)))
    logits = (q @ k.mT)[0, 0]
    torch.testing.assert_close(logits[5:, 5:], logits[:-5, :-5], atol=1e-4, rtol=1e-4)
    assert abs(logits[10, 10] - logits[10, 3]).item() > 1e-3
    assert not hasattr(model.positions, "weight")


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-5), (torch.float64, 1e-5), (torch.bfloat16, 0.05)])
def test_each_pair_of_channels_turns_by_its_positions_angle(dtype, off):
    """Pair p of P at position t: by t / 10000^(p / P), whatever the precision's way to compute it."""
    x = torch.randn(1, 3, 24, 16, generator=torch.Generator().manual_seed(4)).to(dtype)
    mixing = gpt(frames="orthogonal", rope="full").blocks[0].attention.mixing
    turned, _ = mixing(x, x)
    for t, p in ((0, 0), (1, 0), (5, 3), (23, 7)):
        angle = t / 10_000 ** (p / 8)
        a, b = x[0, 1, t, 2 * p : 2 * p + 2].double().tolist()
        wanted = [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
        assert turned[0, 1, t, 2 * p : 2 * p + 2].tolist() == pytest.approx(wanted, abs=off)


def test_positions_serve_training_after_inspection_and_evaluation():
    """Their table is made once: not of the fake tensors of an inspection, nor of an evaluation's."""
    config = resolve({**SHAPE, "frames": "orthogonal", "rope": "full"})
    cost.activation_bytes(config)
    model = build_model(config)
    with torch.inference_mode():
        model.eval()(tokens()[:, :5])
    model.train()(tokens(), tokens(1)).backward()
    assert model.blocks[0].attention.q.weight.grad.abs().sum() > 0


def test_the_half_rotation_leaves_the_other_half_alone():
    attention = gpt(frames="orthogonal", rope="half").blocks[0].attention
    x = torch.randn(1, 24, 48, generator=torch.Generator().manual_seed(3))
    q = attention._heads(attention.q(x))
    turned, _ = attention.mixing(q, q)
    assert torch.equal(turned[..., 8:], q[..., 8:])
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))


def test_tied_frames_are_one_matrix():
    model = gpt(frames="orthogonal", tie_qk=True, freeze="qk")
    assert all(block.attention.q is block.attention.k for block in model.blocks)


def test_heads_that_freeze_become_their_polar_factor():
    """Of a block with singular values 3 and 0.5 both become 1, or the root mean square of both."""
    for kind, scale in (("polar", 1.0), ("polar-scale", math.sqrt((3**2 + 0.5**2) / 2))):
        config = resolve(
            {"preset": "tiny", "d_model": 4, "num_heads": 2, "freeze": f"qk:from0.5+{kind}", "max_steps": 10}
        )
        model = build_model(config)
        angle = torch.tensor(0.3)
        left = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])
        right = torch.eye(4)[[2, 0]]
        block = left @ torch.diag(torch.tensor([3.0, 0.5])) @ right
        weight = model.blocks[0].attention.q.weight
        with torch.no_grad():
            weight.copy_(torch.cat((block, block)))
        assert freeze.orthogonalise(model, config, 4) == []
        assert "blocks.0.attention.q.weight" in freeze.orthogonalise(model, config, 5)
        torch.testing.assert_close(weight[:2], scale * left @ right)
