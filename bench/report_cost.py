"""How long the report of many runs takes: 200 runs of 1,000 steps, all formats.

python -m bench.report_cost
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from tests.lab.made_runs import make_run

from oelm.report.build import write_report

ARMS = ("baseline", "orthogonal", "oelm_v2", "oelm_random", "oelm_matched")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    chance = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for seed in range(10):
            for index, arm in enumerate(ARMS):
                for lr in (1e-3, 2e-3, 4e-3, 8e-3):
                    loss = 2.0 + 0.02 * index + 0.01 * float(chance.normal())
                    documents = np.column_stack((chance.normal(200 * loss, 20, 2_000), np.full(2_000, 200.0)))
                    name = f"{arm}_{lr:g}_{seed}"
                    make_run(root, name, arm, seed, lr, loss, steps=1_000, documents=documents)
        for form in ("html", "md", "pdf"):
            begin, cpu = time.perf_counter(), _cpu()
            (path,) = write_report(root, "en", [form], root / "report")
            size = path.stat().st_size / 2**20
            print(f"{form}: {time.perf_counter() - begin:.1f} s ({_cpu() - cpu:.1f} s of CPU), {size:.1f} MiB")


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
