import pytest
import torch

from oelm.config import resolve
from oelm.train.step import _dropout_seed, _precision


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
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda kind, enabled: made.setdefault("scaling", enabled))
    monkeypatch.setattr(torch, "autocast", lambda kind, dtype: made.setdefault("dtype", dtype))
    autocast, _ = _precision(resolve({"use_amp": use_amp}), torch.device(device))
    autocast()
    assert (made.get("dtype"), made["scaling"]) == expected


def test_dropout_seeds_differ_by_step_and_process():
    seeds = {_dropout_seed(42, step, rank) for step in range(500) for rank in range(8)}
    assert len(seeds) == 4000
