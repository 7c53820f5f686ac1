import signal
import subprocess
import sys
import time

import numpy as np
import psutil
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


def test_contenders_apart_take_turns_within_a_step_and_only_their_own_work_counts():
    with measure.Apart(burning, WORK) as one, measure.Apart(burning, LONGER) as two:
        measure.interleave({"one": one, "two": two}, repeats=0, warmup=1)
        begin = time.monotonic()
        seconds = measure.interleave({"one": one, "two": two}, repeats=1, warmup=0)
        whole = time.monotonic() - begin
    assert seconds["one"][0] > 0.9 * WORK
    assert seconds["two"][0] > 0.9 * LONGER
    assert seconds["one"][0] + seconds["two"][0] <= whole  # never both at a time, no waiting counted


WORK, LONGER = 2.5 * measure.SLICE, 4.5 * measure.SLICE


def burning(cpu_seconds):
    def step():
        end = time.process_time() + cpu_seconds
        while time.process_time() < end:
            pass

    return step


def test_contenders_at_rest_do_not_outlive_a_killed_parent():
    program = """
import time
from oelm.bench import measure
from tests.bench.test_measure import burning

if __name__ == "__main__":
    contender = measure.Apart(burning, 0.01)
    contender.turn()
    print(contender._process.pid, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        contender = psutil.Process(int(parent.stdout.readline()))
        try:
            wait_until(lambda: contender.status() == psutil.STATUS_STOPPED)
            parent.kill()
            parent.wait()
            wait_until(lambda: gone(contender))
        finally:
            parent.kill()
            if not gone(contender):
                contender.kill()


def gone(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(done, seconds=20):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("rests", "seconds"),
    [([], 5), ([(11, 12), (13, 14)], 3), ([(14, 17)], 4), ([(15, 18)], 5), ([(8, 11)], 4), ([(7, 9)], 5)],
)
def test_a_rest_counts_only_where_it_lies_within_the_step(rests, seconds):
    """The last of them: the step had ended when the contender was sent to rest, or had not begun."""
    assert measure.working_time((10, 15), rests) == seconds


def test_the_ratio_is_the_median_of_the_rounds_and_its_bounds_hold_the_spread():
    """A machine that is three times as slow in the later rounds, for both, is in no ratio."""
    slow, fast = np.array([2.0, 2.2, 2.1, 6.6, 9.0, 6.0]), np.array([1.0, 1.1, 1.0, 3.0, 3.0, 15.0])
    found = measure.ratio(slow, fast)  # 2, 2, 2.1, 2.2, 3, 0.4
    assert found.value == pytest.approx(2.05)
    assert found.low <= 2 < 2.1 <= found.high
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
    contender = measure.Apart(lasting)
    contender.begin()
    assert contender.work() is None  # it rests now, and must be woken to hear of its end
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
