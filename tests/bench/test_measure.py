import signal
import time

import numpy as np
import pytest
import torch

from oelm.bench import measure
from oelm.errors import UserError


def test_contenders_take_turns_and_the_beginner_changes():
    order = []
    steps = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = measure.interleave(steps, repeats=3, warmup=1)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_the_ratio_is_that_of_medians_and_its_bounds_hold_the_spread():
    slow, fast = np.array([2.0, 2.2, 2.1, 2.1, 9.0, 2.0]), np.array([1.0, 1.1, 1.0, 1.0, 1.0, 5.0])
    found = measure.ratio(slow, fast)
    assert found.value == 2.1
    assert found.low <= 2.1 <= found.high
    exact = measure.ratio(np.full(30, 3.0), np.full(30, 1.5))
    assert (exact.value, exact.low, exact.high) == (2.0, 2.0, 2.0)
    assert str(measure.ratio(slow[:5], fast[:5])) == "2.100"  # too few for bounds


def test_launches_count_alike_however_fast_the_machine_is_in_each_and_the_bounds_hold_what_differs_between_them():
    fast = np.repeat([1.0, 3.0, 2.0], 100)
    slow = fast * np.repeat([1.1, 1.2, 1.0], 100)
    apart = measure.ratio(slow, fast, launches=3)
    assert apart.value == pytest.approx((1.1 * 1.2 * 1.0) ** (1 / 3))
    low, high = (1.1 * 1.0 * 1.0) ** (1 / 3), (1.1 * 1.2 * 1.2) ** (1 / 3)  # three draws in 27 each; one lies beyond
    assert (apart.low, apart.high) == pytest.approx((low, high))
    assert measure.ratio(slow[:15], fast[:15], launches=3).low is None  # too few of each for bounds


def test_an_interrupted_measurement_ends_its_contenders_in_the_middle_of_a_step():
    begin = time.monotonic()
    contender = measure.Apart(lasting, settle=False)
    contender._pipe.send("turn")
    contender.__exit__(KeyboardInterrupt)
    assert contender._process.exitcode == -signal.SIGTERM
    assert time.monotonic() - begin < 60


def lasting():
    return lambda: time.sleep(600)


def allocate(megabytes):
    return lambda: torch.ones(megabytes * 2**18).sum()


def test_memory_is_what_a_step_adds_at_its_peak_however_large_the_parent_is():
    ballast = np.ones(50_000_000)
    assert ballast.nbytes == 400_000_000
    with measure.Apart(allocate, 200) as contender:
        assert contender.turn() > 0
        assert contender.memory() == pytest.approx(200 * 2**20, rel=0.1)


def fail(error):
    raise error


@pytest.mark.parametrize("error", [UserError("no such thing"), FileNotFoundError("no such file")])
def test_what_goes_wrong_in_a_measured_process_is_told_here(error):
    with measure.Apart(fail, error) as contender, pytest.raises(type(error), match="no such"):
        contender.turn()
