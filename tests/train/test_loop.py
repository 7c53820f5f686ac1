import os
import signal

import torch

from oelm.train.distributed import pick_device
from oelm.train.loop import StopRequest


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


def test_a_device_that_is_not_there_is_refused(oelm, tiny):
    if not torch.cuda.is_available():
        result = tiny("--device", "cuda")
        assert (result.code, "no CUDA GPU" in result.err) == (2, True)
    assert pick_device("cpu").type == "cpu"
