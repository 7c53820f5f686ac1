"""The one exception that users are meant to see."""

import difflib
import signal
from collections.abc import Iterable


class UserError(Exception):
    """Bad input or a full disk: shown as one line (what, where, what to do) with exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class RunFailed(Exception):
    """A run cannot go on; its last good checkpoint stands.

    `retry` says what a queue can do about it: nothing (""), nothing now or later ("never": a loss that is not
    finite comes again), start it again ("same"), or start it again with smaller micro-batches ("smaller").
    """

    def __init__(self, message: str, retry: str = "") -> None:
        super().__init__(message)
        self.retry = retry


class Stopped(Exception):
    """A signal asked a run to leave; its state is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint to put behind an unknown name: the nearest known one, else all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"


def of_compiler(error: BaseException) -> str:
    """What torch.compile could not do, in a line; nothing if that is not what went wrong."""
    from_it = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
    return f"torch.compile: {str(error).splitlines()[0]}" if from_it else ""
