"""Interleaved measurement: what disturbs one contender disturbs all.

Every contender takes a step, then all again. Those in processes of their own may take turns within the step, too: on
a shared machine what slows a step down stays for seconds, as long as a step takes, and is gone in the next one's.
"""

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from oelm import __version__
from oelm.errors import UserError, of_compiler
from oelm.machine import cpu_name, leave_with_parent, now
from oelm.model.products import multiply
from oelm.train.clock import peak_memory

WARMUP = 2
"""Rounds before the first that counts."""
SLICE = 0.25
"""Seconds that a contender works until it is the next one's turn. Each finds its caches cold: of shorter slices that is
more than a hundredth."""
RESAMPLES = 2_000
CONFIDENCE = 0.95
LEAST_REPEATS = 6
"""Below it there are no bounds: all of five repeats lie on one side of the median in one case of sixteen."""
LEAVING_SECONDS = 1.0
"""What a contender has to leave by itself when something went wrong."""
GEMM_SIZES = ((2048, 2048, 2048), (4096, 1024, 4096))
GEMM_WAYS: dict[str, Callable[..., Tensor]] = {
    "torch": lambda left, right, out: torch.mm(left, right, out=out),
    "oelm": multiply,
}


@dataclass(frozen=True)
class Interval:
    value: float
    low: float | None
    high: float | None
    """`low` and `high` are one-sided bounds, each at CONFIDENCE; None where there are too few repeats for any."""

    def __str__(self) -> str:
        bounds = f" [{self.low:.3f}, {self.high:.3f}]" if self.low is not None else ""
        return f"{self.value:.3f}{bounds}"


def where(**versions: str) -> dict[str, str]:
    """What figures are true of: the processor, the versions and the day."""
    return {"cpu": cpu_name(), "torch": torch.__version__, "oelm": __version__, **versions, "on": now()[:10]}


def stopwatch(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def interleave(
    steps: Mapping[str, "Callable[[], object] | Apart"],
    repeats: int,
    warmup: int = WARMUP,
    tick: Callable[[str], None] = lambda what: None,
    settle: bool = False,
) -> dict[str, np.ndarray]:
    """Seconds of each repeat of each contender; who begins a round changes from round to round.

    `tick` is told what is done next, once for each step. `settle`: some give memory back while they work, and where
    they rest the machine takes it away; then steps are whole, and each timed one has an untimed one before it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    here = {name: step for name, step in steps.items() if not isinstance(step, Apart)}
    apart = {name: step for name, step in steps.items() if isinstance(step, Apart)}
    for turn in range(warmup + repeats):
        took = {}
        for name in _beginning_at(turn, here):
            tick("measuring" if turn >= warmup else f"warming up {name}")
            took[name] = stopwatch(here[name])
        for _ in apart:
            tick("measuring" if turn >= warmup else f"warming up {' and '.join(apart)}")
        order = {name: apart[name] for name in _beginning_at(turn, apart)}
        took |= {name: step.settled_turn() for name, step in order.items()} if settle else _in_slices(order)
        if turn >= warmup:
            for name, value in took.items():
                seconds[name].append(value)
    return {name: np.array(values) for name, values in seconds.items()}


def _beginning_at(turn: int, names: Iterable[str]) -> list[str]:
    names = list(names)
    first = turn % max(1, len(names))
    return names[first:] + names[:first]


def _in_slices(contenders: Mapping[str, "Apart"]) -> dict[str, float]:
    """Seconds that a step of each takes, one of them at work at a time."""
    for contender in contenders.values():
        contender.begin()
    seconds: dict[str, float] = {}
    while len(seconds) < len(contenders):
        for name, contender in contenders.items():
            took = contender.work() if name not in seconds else None
            if took is not None:
                seconds[name] = took
    return seconds


def working_time(step: tuple[float, float], rests: Iterable[tuple[float, float]]) -> float:
    """From its begin to its end, less the rests in between: the last may have come when the work was done already."""
    begin, end = step
    return end - begin - sum(max(0.0, min(until, end) - max(since, begin)) for since, until in rests)


def ratio(slower: np.ndarray, faster: np.ndarray, launches: int = 1) -> Interval:
    """How many times faster: the median of the rounds' ratios, with bounds from resampled rounds.

    A process may be lucky with its memory for as long as it lives. Of several `launches`, one behind the other in the
    arrays and equally long, each has its median, and their geometric mean is the value; for the bounds launches are
    drawn first, then rounds within each.
    """
    ratios = (slower / faster).reshape(launches, -1)
    value = float(_typical(ratios))
    rounds = ratios.shape[1]
    if rounds < LEAST_REPEATS:
        return Interval(value, None, None)
    chance = np.random.default_rng(0)
    which = chance.integers(0, launches, (RESAMPLES, launches, 1))
    drawn = chance.integers(0, rounds, (RESAMPLES, launches, rounds))
    low, high = np.quantile(_typical(ratios[which, drawn]), (1 - CONFIDENCE, CONFIDENCE))
    return Interval(value, float(low), float(high))


def _typical(ratios: np.ndarray) -> np.ndarray:
    """Of an array that ends in (launches, rounds)."""
    return np.asarray(np.exp(np.log(np.median(ratios, axis=-1)).mean(axis=-1)))


def gemm() -> dict[str, "Gemm"]:
    return {
        f"gemm {m} x {k} x {n} by {way}": Gemm(m, k, n, product)
        for m, k, n in GEMM_SIZES
        for way, product in GEMM_WAYS.items()
    }


def peak(products: Mapping[str, "Gemm"], seconds: Mapping[str, np.ndarray]) -> float:
    """Of the fastest of them, in operations a second."""
    return max(product.flops / float(np.median(seconds[name])) for name, product in products.items())


class Gemm:
    """A plain float32 matrix product: the best of them is the fastest arithmetic that the machine's libraries offer."""

    def __init__(self, m: int, k: int, n: int, product: Callable[..., Tensor]) -> None:
        self.factors = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
        self.flops = 2 * m * k * n
        self.product = product

    def __call__(self) -> None:
        self.product(*self.factors)


class Apart:
    """A contender in a process of its own, with the settings and the memory that it would have alone.

    Once it has taken a step, it rests until the next, its threads, too.
    """

    def __init__(self, make: Callable[..., Callable[[], object]], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, torch.get_num_threads(), make, arguments))
        resource_tracker.ensure_running()  # whose start would lift the block
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is this process's to answer
        self._process.start()
        theirs.close()
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # one that came meanwhile is answered here
        except KeyboardInterrupt:
            self._process.terminate()
            raise
        self._system = psutil.Process(self._process.pid)
        self._ready = False
        self._rests: list[tuple[float, float]] = []
        """From when to when, since the step before the present one ended."""
        self._rests_since: float | None = None

    def begin(self) -> None:
        """Have it take a step, when it is its turn to work."""
        self._rests = []
        self._ask("turn")

    def work(self, seconds: float | None = SLICE) -> float | None:
        """Let it work for a slice, or to the end; if that ends its step, the seconds it worked on it."""
        if self._rests_since is not None:
            self._rests.append((self._rests_since, time.perf_counter()))
        self._wake()
        ended = self._pipe.poll(seconds)
        took = working_time(self._answer(), self._rests) if ended else None
        with suppress(psutil.NoSuchProcess):
            self._system.suspend()
        self._rests_since = time.perf_counter()
        return took

    def turn(self) -> float:
        """Seconds of a whole step."""
        self.begin()
        took = self.work(None)
        assert took is not None
        return took

    def settled_turn(self) -> float:
        """Seconds of a whole step behind an untimed one."""
        self.turn()
        return self.turn()

    def memory(self) -> int:
        """Peak resident bytes so far, less those before the first step."""
        self._ask("memory")
        self._wake()
        self._rests_since = None
        return int(self._answer())

    def _wake(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self._system.resume()

    def _ask(self, word: str) -> None:
        if not self._ready:  # who is stopped while it starts does not yet leave with its parent
            self._answer()
            self._ready = True
        with suppress(OSError):  # it may have left, and said why
            self._pipe.send(word)

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            why = "not enough memory?" if code == -signal.SIGKILL else f"exit code {code}"
            raise UserError(f"a measured process died: {why}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __enter__(self) -> "Apart":
        return self

    def __exit__(self, kind: object = None, *error: object) -> None:
        self._pipe.close()
        self._wake()
        self._process.join(None if kind is None else LEAVING_SECONDS)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()


def _serve(pipe: Connection, threads: int, make: Callable[..., Callable[[], object]], arguments: Any) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        leave_with_parent(signal.SIGKILL, parent.pid or 0)  # at rest it would not notice
    torch.set_num_threads(threads)
    sys.stdout = sys.stderr  # what a peer prints is no result
    with suppress(EOFError, BrokenPipeError, ConnectionError):  # nobody listens any more
        try:
            step = make(*arguments)
            torch.ones(1).sum()  # what torch loads with its first operations is not the step's
            _forget_peak()
            before = psutil.Process().memory_info().rss
            pipe.send("ready")
            while True:
                word = pipe.recv()
                if word == "turn":
                    begin = time.perf_counter()
                    step()
                    pipe.send((begin, time.perf_counter()))
                else:
                    pipe.send(peak_memory(torch.device("cpu")) - before)
        except Exception as error:
            reason = of_compiler(error)
            pipe.send(UserError(f"{reason}; leave +compile out") if reason else error)


def _forget_peak() -> None:
    """What was resident while modules were imported may be more than a small step needs (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
