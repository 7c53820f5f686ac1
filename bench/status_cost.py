"""CPU seconds per refresh of `oelm status --watch` over many run folders that are being written to.

python bench/status_cost.py --folders 200
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from oelm.config import resolve
from oelm.lab.status import LabWatcher
from oelm.lab.watch import status_table


def make_runs(root: Path, folders: int, steps: int) -> list[Path]:
    paths = []
    for index in range(folders):
        folder = root / f"run{index}"
        folder.mkdir()
        arm = "oelm_v2" if index % 2 else "baseline"
        config = resolve({"preset": "tiny", "model_type": arm, "seed": index // 2, "max_steps": 2 * steps})
        (folder / "config.toml").write_text(config.to_toml())
        part = {"started": "2026-02-09T16:08:00+00:00", "pid": 1, "device": "cpu"}
        (folder / "environment.json").write_text(json.dumps({"parts": [part]}))
        append(folder, 1, steps)
        paths.append(folder)
    return paths


def append(folder: Path, first: int, last: int) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        for step in range(first, last + 1):
            record = {"kind": "train", "step": step, "loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "seconds": 0.1}
            file.write(json.dumps(record) + "\n")
            if step % 100 == 0:
                file.write(json.dumps({"kind": "val", "step": step, "loss": 2.0, "ppl": 7.4}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", type=int, default=200)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = make_runs(Path(folder), options.folders, options.steps)
        watcher = LabWatcher(Path(folder))
        begin = time.process_time()
        watcher.look()
        first = time.process_time() - begin
        costs = []
        for refresh in range(10):
            for path in paths:
                append(path, options.steps + 10 * refresh + 1, options.steps + 10 * refresh + 10)
            begin = time.process_time()
            status_table(watcher.look())
            costs.append(time.process_time() - begin)
    median = sorted(costs)[len(costs) // 2]
    print(
        f"{options.folders} folders: first look {first:.2f} s CPU, then {median:.3f} s a refresh (max {max(costs):.3f})"
    )


if __name__ == "__main__":
    main()
