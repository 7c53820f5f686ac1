import numpy as np
import pytest
import torch
from bench.agreement import curves

from oelm.config import resolve
from oelm.data.tokens import open_data
from oelm.model.build import build_model
from oelm.train.distributed import World
from oelm.train.step import Update, _dropout_seed, _precision


@pytest.mark.parametrize(
    ("device", "use_amp", "has_bf16", "expected"),
    [
        ("cpu", True, False, (None, False)),
        ("cuda", False, True, (None, False)),
        ("cuda", True, True, (torch.bfloat16, False)),
        ("cuda", True, False, (torch.float16, True)),
    ],
)
def test_mixed_precision_is_bfloat16_where_the_gpu_has_it_else_scaled_float16(
    monkeypatch, device, use_amp, has_bf16, expected
):
    made = {}
    # by emulation every GPU has it, slowly
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or has_bf16
    )
    monkeypatch.setattr(torch.amp, "GradScaler", lambda kind, enabled: made.setdefault("scaling", enabled))
    monkeypatch.setattr(torch, "autocast", lambda kind, dtype: made.setdefault("dtype", dtype))
    autocast, _ = _precision(resolve({"use_amp": use_amp}), torch.device(device))
    autocast()
    assert (made.get("dtype"), made["scaling"]) == expected


def test_scaling_the_loss_excuses_a_gradient_only_while_there_is_scale_to_take_away():
    config = resolve({"preset": "tiny"})
    update = Update(build_model(config), config, World(0, 1, torch.device("cpu")), lambda model, batch: model(*batch))
    for scale, excused in ((65_536.0, True), (1.0, True), (0.5, False)):
        update.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        assert update.scales is excused


def test_dropout_seeds_differ_by_step_and_process():
    seeds = {_dropout_seed(42, step, rank) for step in range(500) for rank in range(8)}
    assert len(seeds) == 4000


@pytest.mark.parametrize("length", [0.3, 0.9999995, 1.0, 7.0])
def test_clipping_leaves_the_bits_that_torch_would(length):
    config = resolve({"preset": "tiny", "grad_clip": 1.0})
    update = Update(build_model(config), config, World(0, 1, torch.device("cpu")), lambda model, batch: model(*batch))
    drawn = [torch.randn_like(parameter) for parameter in update.trainable]
    size = torch.cat([gradient.flatten() for gradient in drawn]).norm()
    for parameter, gradient in zip(update.trainable, drawn, strict=True):
        parameter.grad = gradient * (length / size)
    copies = [torch.empty_like(p).requires_grad_() for p in update.trainable]
    for copy, parameter in zip(copies, update.trainable, strict=True):
        copy.grad = parameter.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(copies, 1.0)
    assert update._clip() == pytest.approx(float(expected), rel=1e-6)
    assert all(torch.equal(p.grad, c.grad) for p, c in zip(update.trainable, copies, strict=True))


def test_200_steps_have_the_losses_of_code_without_any_optimisation(data):
    config = resolve(dict(preset="tiny", data_path=str(data), max_steps=200, dropout=0.0, max_lr=1e-3))
    ours, plain = curves(config, open_data("", str(data)))
    assert ours[-1] < ours[0] - 1
    assert np.abs(ours - plain).max() <= 1e-3
