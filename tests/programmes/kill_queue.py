"""Kill a queue and its workers at random, start it again, and compare with the undisturbed plan.

    python -m tests.programmes.kill_queue --runs 24 --kills 60

Every run must end exactly once, in the same bits as without a kill, and 5 seconds after the end no process
of the plan may be left.
"""

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from oelm.lab.plan import load_plan
from tests.conftest import make_data
from tests.programmes.kill_resume import fingerprint

PLAN = """
[defaults]
preset = "tiny"
data_path = "{data}"
max_steps = 40
val_interval = 5
threads = 1
device = "cpu"
[matrix]
model_type = ["baseline", "oelm_v2"]
seed = {seeds}
"""


def start_queue(plan: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "oelm", "run", str(plan), "--out", str(out), "--slots", "2"]
    return subprocess.Popen(command, stdout=open(out.parent / "queue.log", "ab"), stderr=subprocess.STDOUT)


def workers(out: Path) -> list[psutil.Process]:
    """Every process that trains into `out`, whoever its parent is."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "train" in words and any(str(out) in word for word in words):
            found.append(process)
    return found


def programme(root: Path, runs: int, kills: int, seed: int = 0) -> dict[str, object]:
    random.seed(seed)
    data = make_data(root / "data")
    plan = root / "plan.toml"
    plan.write_text(PLAN.format(data=data, seeds=list(range(1, runs // 2 + 1))))
    calm, wild = root / "calm" / "runs", root / "wild" / "runs"
    for folder in (calm, wild):
        folder.mkdir(parents=True)
    assert start_queue(plan, calm).wait() == 0
    queue = start_queue(plan, wild)
    hit: collections.Counter[str] = collections.Counter()
    while sum(hit.values()) < kills:
        time.sleep(random.uniform(0.3, 3.0))
        target = queue if random.random() < 0.4 else random.choice(workers(wild) or [queue])
        if queue.poll() is not None:
            if all(run.folder.finished() for run in load_plan(plan, wild).runs):
                break
            queue = start_queue(plan, wild)
            continue
        try:
            os.kill(target.pid, signal.SIGKILL)
            hit["queue" if target is queue else "worker"] += 1
        except ProcessLookupError:
            continue
        if target is queue:
            queue.wait()
            queue = start_queue(plan, wild)
    for _ in range(10):
        code = queue.wait()
        if all(run.folder.finished() for run in load_plan(plan, wild).runs):
            break
        queue = start_queue(plan, wild)
    time.sleep(5)
    expected = {run.id: fingerprint(run.folder) for run in load_plan(plan, calm).runs}
    found = {run.id: fingerprint(run.folder) for run in load_plan(plan, wild).runs}
    return {
        "hit": dict(hit),
        "code": code,
        "equal": sum(expected[name] == found[name] for name in expected),
        "total": len(expected),
        "left": len(workers(wild)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = programme(Path(folder), options.runs, options.kills, options.seed)
        print((Path(folder) / "wild" / "queue.log").read_text()[-1500:])
    print(f"{result['equal']}/{result['total']} runs ended once and in the same bits; kills: {result['hit']}; "
          f"processes left after 5 s: {result['left']}")  # fmt: skip
    sys.exit(result["equal"] != result["total"] or result["left"] != 0)


if __name__ == "__main__":
    main()
