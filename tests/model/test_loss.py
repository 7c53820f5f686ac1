import pytest
import torch
import torch.nn.functional as F

from oelm.model import loss
from oelm.model.loss import linear_cross_entropy


def problem(tokens=45, width=24, words=103, scale=1.0):
    chance = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, width, generator=chance) * scale
    weight = torch.randn(words, width, generator=chance)
    return hidden, weight, torch.randint(0, words, (tokens,), generator=chance)


def plainly(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight), targets)


def solve(function, hidden, weight, targets, factor=1.0, dtype=torch.float32):
    hidden, weight = hidden.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()
    value = function(hidden, weight, targets)
    (value * factor).backward()
    return value.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("rows", [1, 7, 45, 1000])
def test_loss_and_gradients_are_those_of_linear_and_cross_entropy_at_any_chunk_size(monkeypatch, rows):
    monkeypatch.setattr(loss, "CHUNK_FLOATS", rows * 128)
    found = solve(linear_cross_entropy, *problem(), factor=0.25, dtype=torch.float64)
    expected = solve(plainly, *problem(), factor=0.25, dtype=torch.float64)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("words", [103, 1024, 4099])
def test_rounding_is_at_most_one_and_a_half_times_that_of_plain_pytorch(scale, words):
    given = problem(tokens=512, width=64, words=words, scale=scale)
    exact = solve(plainly, *given, dtype=torch.float64)
    ours, theirs = solve(linear_cross_entropy, *given), solve(plainly, *given)
    floor = 2.0**-24
    for truth, a, b in zip(exact, ours, theirs, strict=True):
        size = truth.norm().item()
        assert (a - truth).norm().item() <= 1.5 * max((b - truth).norm().item(), floor * size)


def test_logits_of_any_size_stay_finite():
    hidden, weight, targets = problem(scale=1e4)
    value, d_hidden, d_weight = solve(linear_cross_entropy, hidden, weight, targets)
    assert all(torch.isfinite(tensor).all() for tensor in (value, d_hidden, d_weight))
    torch.testing.assert_close(value, plainly(hidden, weight, targets))


def test_logits_that_all_vanish_without_their_maximum_are_exact():
    """All logits of the first rows lie below -100, where exp() is 0 in float32."""
    hidden, weight, targets = problem()
    weight = -weight.abs() - 1
    hidden[:7] = 5.0
    assert F.linear(hidden, weight)[:7].max() < -100
    exact = solve(plainly, hidden, weight, targets, dtype=torch.float64)
    for ours, truth in zip(solve(linear_cross_entropy, hidden, weight, targets), exact, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-6)


def test_a_loss_that_is_not_a_number_stays_not_a_number():
    hidden, weight, targets = problem()
    hidden[3, 2] = torch.nan
    assert torch.isnan(solve(linear_cross_entropy, hidden, weight, targets)[0])


@pytest.mark.parametrize("tokens_at_a_time", [10, 45, 4096])
def test_torchs_own_operations_in_parts_give_the_same_and_never_hold_all_logits(monkeypatch, tokens_at_a_time):
    """What a GPU and torch.compile take."""
    monkeypatch.setattr(loss, "TORCH_TOKENS", tokens_at_a_time)
    held = 0

    def keep(tensor):
        nonlocal held
        held = max(held, len(tensor) if tensor.shape[1:] == (103,) else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = solve(lambda *given: loss._by_torch(*given, "mean"), *problem())
    for ours, theirs in zip(found, solve(plainly, *problem()), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert held <= 10 if tokens_at_a_time == 10 else held == 45


def test_losses_of_single_tokens_average_to_the_mean(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_FLOATS", 10 * 128)
    with torch.no_grad():
        each = linear_cross_entropy(*problem(), reduction="none")
        torch.testing.assert_close(each.mean(), linear_cross_entropy(*problem()))
    expected = F.cross_entropy(F.linear(*problem()[:2]), problem()[2], reduction="none")
    torch.testing.assert_close(each, expected)


def test_a_frozen_embedding_gets_no_gradient_and_the_hidden_states_still_do():
    hidden, weight, targets = problem()
    linear_cross_entropy(hidden.requires_grad_(), weight, targets).backward()
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_never_more_than_the_buffer_of_logits_is_allocated(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_FLOATS", 10 * 128)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(t.untyped_storage().nbytes() // 4 for t in (out,) if isinstance(t, torch.Tensor))
            return out

    with Watch():
        solve(linear_cross_entropy, *problem())
    assert max(sizes) == 103 * 24  # the weight and its gradient; all logits would be 45 * 103


def test_a_second_backward_pass_is_refused_with_a_reason():
    hidden, weight, targets = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4), torch.tensor([0, 1, 2])
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_gradients_and_a_loss_in_float32(dtype):
    """The sum of a row's exponentials times the tokens is more than float16 holds."""
    given = problem(tokens=512, words=1024, scale=0.1)
    value, _, d_weight = solve(linear_cross_entropy, *given, dtype=dtype)
    exact, _, d_exact = solve(plainly, *given, dtype=torch.float64)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(exact.item(), abs=2e-3)
    assert (d_weight.double() - d_exact).norm() < 0.05 * d_exact.norm()
