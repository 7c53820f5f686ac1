"""Kill one of two processes that share a run, time until the run has ended, and compare with an undisturbed run.

python -m tests.programmes.kill_rank --kills 5
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import psutil

from oelm.lab.plan import Plan, PlannedRun
from oelm.lab.queue import Queue
from tests.conftest import make_data
from tests.programmes.kill_resume import fingerprint


def kill_rank(folder: Path, rank: int) -> bool:
    for process in psutil.process_iter(["cmdline", "environ"]):
        words, environment = process.info["cmdline"] or [], process.info["environ"] or {}
        if str(folder) in " ".join(words) and environment.get("RANK") == str(rank):
            process.kill()
            return True
    return False


def programme(root: Path, data: Path, kills: int) -> dict[str, object]:
    """Kill rank 1 at `kills` points of one run under a queue that resumes it."""
    steps = 50 + 100 * kills
    settings = dict(preset="tiny", data_path=str(data), max_steps=steps, val_interval=25, device="cpu", threads=1)
    whole, cut = (PlannedRun(n, {**settings, "out_dir": str(root / n)}, processes=2) for n in ("whole", "cut"))
    assert Queue(Plan([whole]), 1).run() == {}
    lines: list[str] = []
    killed: list[float] = []
    ended: list[float] = []

    def watch() -> None:
        deaths = sum("died" in line for line in lines)
        if len(killed) == len(ended) < kills and cut.folder.last_step() >= 20 + 80 * len(killed):
            if kill_rank(root / "cut", 1):
                killed.append(time.monotonic())
        elif deaths > len(ended):
            ended.append(time.monotonic())

    failures = Queue(Plan([cut]), 1, say=lines.append).run(watch)
    return {
        "failures": failures,
        "seconds": [end - kill for kill, end in zip(killed, ended, strict=False)],
        "named": sum("the process of rank 1 ended with exit code -9" in line for line in lines),
        "equal": not failures and fingerprint(cut.folder) == fingerprint(whole.folder),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    kills = parser.parse_args().kills
    with tempfile.TemporaryDirectory() as folder:
        found = programme(Path(folder), make_data(Path(folder) / "data"), kills)
    seconds = found["seconds"]
    print(f"{len(seconds)} kills of rank 1, named {found['named']} times; the run had ended after "
          f"{', '.join(f'{s:.1f}' for s in seconds)} s; equal bits in the end: {found['equal']}")  # fmt: skip
    sys.exit(not (found["equal"] and found["named"] == len(seconds) == kills and max(seconds) < 15))


if __name__ == "__main__":
    main()
