import os
import signal

import pytest
import torch

from oelm.train.console import Reporter
from oelm.train.distributed import World, pick_device
from oelm.train.loop import StopRequest
from oelm.train.step import Update


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


@pytest.mark.parametrize(("someone_is_slow", "passes"), [(False, 2), (True, 1)])
def test_how_often_to_warm_up_is_decided_by_all_processes(tiny, monkeypatch, someone_is_slow, passes):
    """A pass is a collective operation: one process alone must not make another."""
    counted, real = [], Update.backward

    def backward(self, batch, parts, sync):
        counted.append(sync)
        return real(self, batch, parts, sync)

    monkeypatch.setattr(Update, "backward", backward)
    monkeypatch.setattr(World, "any", lambda self, flag: flag or someone_is_slow)
    tiny("--max_steps", 1, "--val_interval", 1)
    assert len(counted) == passes + 1


def test_a_stop_that_another_process_was_asked_for_is_one(tiny, monkeypatch):
    monkeypatch.setattr(World, "any", lambda self, flag: True)
    result = tiny("--max_steps", 4, "--val_interval", 2)
    assert (result.code, "step 2 is saved" in result.err + result.out) == (128 + signal.SIGTERM, True)


def test_a_terminal_is_told_which_split_is_evaluated(tiny, monkeypatch):
    told = []
    monkeypatch.setattr(Reporter, "waits_for", lambda self, what: told.append(what))
    tiny("--max_steps", 4, "--val_interval", 2)
    assert told == [f"evaluating the {split} split …" for split in ("val", "val", "test")]


def test_a_device_that_is_not_there_is_refused(oelm, tiny):
    if not torch.cuda.is_available():
        result = tiny("--device", "cuda")
        assert (result.code, "no CUDA GPU" in result.err) == (2, True)
    assert pick_device("cpu").type == "cpu"
