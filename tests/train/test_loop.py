import os
import signal

import pytest
import torch

from oelm.config import resolve
from oelm.train import loop
from oelm.train.distributed import pick_device
from oelm.train.loop import StopRequest, _precision


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


def test_asking_twice_to_stop_is_asking_once_and_handlers_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    stop = StopRequest()
    with stop.listening():
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
    assert stop.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_dropout_seeds_differ_by_step_and_process():
    seeds = {loop._dropout_seed(42, step, rank) for step in range(500) for rank in range(8)}
    assert len(seeds) == 4000


def test_a_device_that_is_not_there_is_refused(oelm, tiny):
    if not torch.cuda.is_available():
        result = tiny("--device", "cuda")
        assert (result.code, "no CUDA GPU" in result.err) == (2, True)
    assert pick_device("cpu").type == "cpu"
