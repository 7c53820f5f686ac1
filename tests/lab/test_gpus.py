"""GPU waiting, played on recorded scenes.

A scene is one string per GPU, one character per ten seconds: `.` free, `,` a trace of memory (a desktop), `M`
somebody's memory, `U` busy without memory, `B` both. A GPU may be taken when it has been quiet for 30 seconds:
at the fourth quiet reading in a row.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from oelm.errors import UserError
from oelm.lab import gpus
from oelm.lab.gpus import Gpu, GpuPool, parse_gpus

READINGS = {".": (0.0, 0), ",": (0.03, 4), "M": (0.6, 0), "U": (0.01, 95), "B": (0.9, 100)}


class Machine:
    """Plays a scene; the clock moves by ten seconds a reading."""

    def __init__(self, *scene):
        self.scene, self.tick = scene, 0

    def read(self):
        gpus = []
        for index, timeline in enumerate(self.scene):
            memory, busy = READINGS[timeline[min(self.tick, len(timeline) - 1)]]
            gpus.append(Gpu(index, f"uuid-{index}", memory, busy, ("mallory",) if memory > 0.05 else ()))
        return gpus

    def clock(self):
        return 10.0 * self.tick


def pool(machine, tmp_path, allowed=None):
    return GpuPool(allowed, machine.read, machine.clock, leases=tmp_path / "leases")


def play(machine, queue, count=1, ticks=30):
    """(reading, GPUs) of the first grab, or None."""
    for machine.tick in range(ticks):
        taken = queue.take(count)
        if taken is not None:
            return machine.tick, taken
    return None


@pytest.mark.parametrize(
    ("scene", "count", "allowed", "expected"),
    [
        (["...."], 1, None, (3, [0])),
        ([",,,,"], 1, None, (3, [0])),
        (["MMMM"], 1, None, None),
        (["UUUU"], 1, None, None),
        (["BBBB"], 1, None, None),
        (["BB...."], 1, None, (5, [0])),
        (["B.B.B....."], 1, None, (8, [0])),
        (["...B...B...B...."], 1, None, (15, [0])),
        (["..U....."], 1, None, (6, [0])),
        (["..M,,,,"], 1, None, (6, [0])),
        (["B", "...."], 1, None, (3, [1])),
        (["....", "B"], 1, None, (3, [0])),
        (["....", "...."], 1, None, (3, [0])),
        (["....", "...."], 2, None, (3, [0, 1])),
        (["....", "BB...."], 2, None, (5, [0, 1])),
        (["....", "B"], 2, None, None),
        (["...BBBB", "BBB...."], 1, None, (6, [1])),
        (["...BBBB", "BBB...."], 2, None, None),
        (["...BB....", "......"], 2, None, (8, [0, 1])),
        (["....", "....", "...."], 3, None, (3, [0, 1, 2])),
        (["B", "B", "....", "...."], 2, None, (3, [2, 3])),
        (["B", "B", "....", "...."], 2, [2, 3], (3, [2, 3])),
        (["....", "....", "B", "B"], 1, [2, 3], None),
        (["....", "....", "BBBB....", "B"], 1, [2, 3], (7, [2])),
        (["....", "....", "BBBB....", "BB...."], 1, [2, 3], (5, [3])),
        (["....", "B......"], 1, [1], (4, [1])),
        (["U.U.U.U."], 1, None, (10, [0])),
        (["BBBBBBBBBBBBBBBBBBBBBBBBB...."], 1, None, (28, [0])),
        ([".,.,"], 1, None, (3, [0])),
        (["M...", "...M", ".M.."], 1, None, (4, [0])),
    ],
)
def test_a_scene_ends_in_the_right_grab_or_the_right_wait(tmp_path, scene, count, allowed, expected):
    machine = Machine(*scene)
    assert play(machine, pool(machine, tmp_path, allowed), count) == expected


def test_it_says_what_it_waits_for_and_who_holds_it(tmp_path):
    machine = Machine("B", "....")
    queue = pool(machine, tmp_path)
    assert queue.take(1) is None
    assert queue.waiting_for == ["GPU 0 (used by mallory: 90% memory, 100 % busy)", "GPU 1 (quiet for 0 of 30 s)"]


def test_two_queues_never_hold_the_same_gpu(tmp_path):
    machine = Machine("....", "....")
    one, two = pool(machine, tmp_path), pool(machine, tmp_path)
    for machine.tick in range(4):
        first, second = one.take(1), two.take(1)
    assert (first, second) == ([0], [1])
    assert one.take(1) is None
    assert "leased by" in one.waiting_for[0]
    two.give_back([1])
    for machine.tick in range(4, 12):
        assert one.take(1) in (None, [1])
        if 1 in one._held:
            break
    assert 1 in one._held
    assert two.take(1) is None


def test_not_enough_gpus_takes_none_so_that_two_queues_cannot_block_each_other(tmp_path):
    machine = Machine("....", "....", "....")
    one, two = pool(machine, tmp_path), pool(machine, tmp_path)
    for machine.tick in range(4):
        first, second = one.take(2), two.take(2)
    assert (first, second) == ([0, 1], None)
    assert two._held == {}


def test_a_lease_dies_with_its_queue(tmp_path):
    code = (
        "import sys, os, signal; sys.path.insert(0, '.')\n"
        "from pathlib import Path\nfrom tests.lab.test_gpus import *\n"
        "m = Machine('....'); p = pool(m, Path(sys.argv[1]))\n"
        "assert play(m, p) == (3, [0]); print('held', flush=True); signal.pause()"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    machine = Machine("....")
    queue = pool(machine, tmp_path)
    assert play(machine, queue, ticks=6) is None
    assert f"pid {other.pid}" in queue.waiting_for[0]
    other.kill()
    other.wait()
    assert play(machine, queue) is not None


def test_a_gpu_that_a_run_gave_back_must_be_quiet_anew(tmp_path):
    machine = Machine("....B....")
    queue = pool(machine, tmp_path)
    assert play(machine, queue) == (3, [0])
    machine.tick = 4
    queue.give_back([0])
    for machine.tick in range(5, 8):
        assert queue.take(1) is None
    machine.tick = 8
    assert queue.take(1) == [0]


def test_gpus_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"no such GPU here; this machine has: 0, 1"):
        pool(Machine(".", "."), tmp_path, [0, 7])
    with pytest.raises(UserError, match="no GPU was found"):
        GpuPool(None, read=list)
    with pytest.raises(UserError, match="auto or numbers"):
        parse_gpus("two")
    assert (parse_gpus("auto"), parse_gpus("2,3")) == (None, [2, 3])


def test_a_gpu_that_the_driver_lost_is_not_free_and_hides_no_other(monkeypatch):
    driver = SimpleNamespace(
        NVMLError=RuntimeError, nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 2
    )

    def read(driver, index):
        if index == 0:
            raise RuntimeError("GPU is lost")
        return Gpu(index, "b", 0.0, 0)

    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(gpus, "_read_gpu", read)
    assert [gpu.index for gpu in gpus.read_gpus()] == [1]


@pytest.mark.parametrize("text", ["x", "-1", "", "1,,2"])
def test_gpus_that_are_no_numbers_are_refused(text):
    with pytest.raises(UserError, match="--gpus"):
        parse_gpus(text)
