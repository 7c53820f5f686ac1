import pytest
import torch

from oelm.model.dropout import Dropout, keep_mask


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_dropped_is_the_probability_and_the_mean_is_kept(p):
    torch.manual_seed(0)
    n = 1_000_003
    keep, factor = keep_mask(torch.empty(n), p)
    sigma = (p * (1 - p) / n) ** 0.5
    assert abs((1 - keep.float()).mean().item() - p) < 5 * sigma + 2**-17
    assert factor == pytest.approx(1 / (1 - p), rel=1e-4)
    assert factor * (1 - round(p * 2**16) / 2**16) == 1.0


def test_each_of_the_four_elements_of_a_draw_is_as_likely_as_any_other():
    torch.manual_seed(0)
    keep, _ = keep_mask(torch.empty(250_000, 4), 0.25)
    assert ((1 - keep.float()).mean(0) - 0.25).abs().max() < 5 * (0.25 * 0.75 / 250_000) ** 0.5


def test_the_seed_decides_what_is_dropped():
    def masks():
        torch.manual_seed(7)
        return [keep_mask(torch.empty(100), 0.3)[0] for _ in range(2)]

    first, second = masks()
    assert not torch.equal(first, second)
    assert torch.equal(first, masks()[0])
    assert torch.equal(second, masks()[1])


def test_evaluation_drops_nothing_and_the_gradient_has_the_same_holes():
    drop, x = Dropout(0.5), torch.ones(1000, requires_grad=True)
    assert drop.eval()(x) is x
    y = drop.train()(x)
    y.sum().backward()
    assert 0 < (y == 0).sum() < 1000
    assert torch.equal(x.grad, y.detach())


def test_a_probability_that_rounds_to_one_still_keeps_something_to_scale():
    keep, factor = keep_mask(torch.empty(1_000), 0.9999999)
    assert factor == 2**16
    assert keep.sum() <= 3
