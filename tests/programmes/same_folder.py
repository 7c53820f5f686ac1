"""Start several runs into one folder at the same moment: exactly one may win, before torch is imported.

python -m tests.programmes.same_folder --rounds 200 --starts 8
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from oelm.config import resolve
from oelm.errors import UserError
from oelm.train import run as run_module
from tests.conftest import make_data

WON, REFUSED, WRONG = 10, 11, 12


def contender(config, gate: float, over: Path) -> int:
    """One start: wait for the gate, go through the real checks and the real lock, hold it until the round is over."""

    def train_in(*arguments):
        if "torch" in sys.modules:
            os._exit(WRONG)
        while not over.exists():
            time.sleep(0.001)

    while time.monotonic() < gate:
        pass
    with mock.patch.object(run_module, "_train_in", train_in):
        try:
            run_module.train(config, resume=True)
            return WON
        except UserError as error:
            return REFUSED if "in use" in str(error) else WRONG


def play_round(root: Path, data: Path, number: int, starts: int) -> list[int]:
    config = resolve({"preset": "tiny", "data_path": str(data), "out_dir": str(root / f"round{number}")})
    over, gate = root / f"over{number}", time.monotonic() + 0.05
    pids = []
    for _ in range(starts):
        pid = os.fork()
        if not pid:
            code = WRONG
            try:
                code = contender(config, gate, over)
            finally:
                os._exit(code)
        pids.append(pid)
    codes = []
    while len(codes) < starts - 1:
        pid, status = os.wait()
        codes.append(os.waitstatus_to_exitcode(status))
    over.touch()
    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
    return codes


def programme(root: Path, rounds: int, starts: int) -> int:
    """Number of rounds with exactly one winner."""
    data = make_data(root / "data")
    good = 0
    for number in range(rounds):
        codes = play_round(root, data, number, starts)
        good += sorted(codes) == [WON] + [REFUSED] * (starts - 1)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--starts", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        good = programme(Path(folder), options.rounds, options.starts)
    print(f"{good}/{options.rounds} rounds of {options.starts} starts had exactly one winner")
    sys.exit(good != options.rounds)


if __name__ == "__main__":
    main()
