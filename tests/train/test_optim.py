import math

import pytest
import torch

from oelm.config import resolve
from oelm.model import freeze
from oelm.model.build import build_model
from oelm.train.optim import allocate_moments, build_optimizer, learning_rate, optimizer_tensors


def rates(**settings):
    config = resolve({"max_steps": 100, "warmup_steps": 10, "max_lr": 1.0, "min_lr": 0.1, **settings})
    return [learning_rate(config, step) for step in range(100)]


def test_warm_up_is_linear_and_ends_at_the_peak():
    for schedule in ("cosine", "constant", "wsd"):
        assert rates(schedule=schedule)[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
        assert rates(schedule=schedule)[10] == pytest.approx(1.0)


def test_cosine_passes_its_middle_and_ends_near_the_minimum():
    values = rates()
    assert values[55] == pytest.approx(0.55)  # half way from 10 to 100: the mean of peak and minimum
    assert values[99] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 89 / 90)))
    assert values[10:] == sorted(values[10:], reverse=True)


def test_constant_stays_and_wsd_decays_in_the_last_fifth():
    assert set(rates(schedule="constant")[10:]) == {1.0}
    values = rates(schedule="wsd")
    assert set(values[10:81]) == {1.0}
    assert values[90] == pytest.approx(0.55)


def test_no_warm_up_and_a_warm_up_longer_than_the_run():
    assert rates(warmup_steps=0)[0] == 1.0
    assert max(rates(warmup_steps=1000)) == pytest.approx(0.1)


def test_frozen_parameters_are_in_no_group_and_get_no_state():
    config = resolve({"preset": "tiny", "model_type": "oelm_v2"})
    model = build_model(config)
    frozen = set(freeze.apply(model, config))
    optimizer = build_optimizer(model, config, torch.device("cpu"))
    x = torch.zeros(2, 8, dtype=torch.long)
    model(x, x).backward()
    optimizer.step()
    names = {key.rpartition("/")[0] for key in optimizer_tensors(model, optimizer)}
    assert names == {name for name, _ in model.named_parameters()} - frozen
    assert all(model.get_parameter(name).grad is None for name in frozen)


@pytest.mark.parametrize("device", ["cpu", "mps"])  # fused, and not: the optimizer alone asks
def test_moments_that_are_there_before_the_first_step_are_those_that_adamw_makes(device):
    config = resolve({"preset": "tiny"})
    x = torch.zeros(2, 8, dtype=torch.long)
    models, found = [build_model(config) for _ in range(2)], []
    for model, early in zip(models, (True, False), strict=True):
        optimizer = build_optimizer(model, config, torch.device(device))
        if early:
            allocate_moments(optimizer)
        else:
            optimizer = torch.optim.AdamW(optimizer.param_groups, fused=optimizer.defaults["fused"])
        model(x, x).backward()
        optimizer.step()
        found.append(optimizer_tensors(model, optimizer))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


def test_a_step_leaves_the_bits_that_torchs_adamw_leaves():
    """In three steps. Queries' matrices rest in the first and get their state later than others of their group; what
    has a rate of its own rests in the second."""
    config = resolve({"preset": "tiny", "weight_decay": 0.3, "lr_scale": "tokens*=0.5"})
    found = []
    for ours in (True, False):
        model = build_model(config)
        optimizer = build_optimizer(model, config, torch.device("cpu"))
        if not ours:
            optimizer = torch.optim.AdamW(optimizer.param_groups, fused=True)
        for turn in range(3):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (turn + 1) * group["factor"]
            chance = torch.Generator().manual_seed(turn)
            for name, parameter in model.named_parameters():
                resting = name == "tokens.weight" if turn == 1 else turn == 0 and name.endswith("attention.q.weight")
                parameter.grad = None if resting else torch.randn(parameter.shape, generator=chance)
            optimizer.step()
        found.append({**model.state_dict(), **optimizer_tensors(model, optimizer)})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert found[0]["tokens.weight/step"] == 2


def test_matrices_decay_and_vectors_and_biases_do_not():
    config = resolve({"preset": "tiny", "weight_decay": 0.3, "relative_bias": True})
    model = build_model(config)
    optimizer = build_optimizer(model, config, torch.device("cpu"))
    biases = {id(p) for name, p in model.named_parameters() if name.endswith("bias")}
    assert max(p.ndim for p in model.parameters() if id(p) in biases) == 2
    for group in optimizer.param_groups:
        assert {p.ndim > 1 and id(p) not in biases for p in group["params"]} == {group["weight_decay"] == 0.3}
