"""Kill a run at random times, resume it, and compare the bits with an uninterrupted run's.

    python -m tests.programmes.kill_resume --kills 40 --terms 20
    python -m tests.programmes.kill_resume --kills 20 --terms 0 --cases nli

Runs are forked from this process, where torch is already imported, so that a kill falls into training,
evaluation or saving rather than into the import.
"""

import argparse
import collections
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import oelm.model.cost
import oelm.train.classify
import oelm.train.console
import oelm.train.language
import oelm.train.loop  # noqa: F401  # imported before the forks
from oelm.config import RunConfig, resolve
from oelm.errors import Stopped
from oelm.files import sha256_file
from oelm.model.build import build_model
from oelm.train import metrics
from oelm.train.folder import RunFolder
from oelm.train.run import train
from tests.conftest import make_data
from tests.small_encoder import make_encoder, make_pairs

ARMS = {"gpt": ("baseline", "oelm_v2", "oelm_shared", "oelm_sliced"), "nli": ("baseline", "oelm_v2", "frozen")}
"""By case: a GPT on text, an encoder on pairs."""
SETTINGS: dict[str, Any] = dict(
    preset="tiny", max_steps=60, val_interval=4, save_interval=12, threads=1, dropout=0.1, micro_batch=2, device="cpu"
)


def start(config: RunConfig, resume: bool) -> int:
    """Fork a run; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        train(config, resume=resume, vocab_is_set=False)
        code = 0
    except Stopped as stop:
        code = 128 + stop.number
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fingerprint(folder: RunFolder) -> dict[str, Any]:
    """What must be equal: weights, moments, frozen bits, and every step once with the same loss."""
    records = [{k: v for k, v in r.items() if k != "seconds"} for r in metrics.read(folder.metrics)]
    steps = [r["step"] for r in records if r["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1)), f"steps are not once each: {steps}"
    return {
        "model": sha256_file(folder.last / "model.safetensors"),
        "optimizer": sha256_file(folder.last / "optimizer.safetensors"),
        "frozen": sha256_file(folder.frozen) if folder.frozen.exists() else "",
        "metrics": json.dumps(records),
    }


def interrupt(config: RunConfig, number: int, delay: float) -> str:
    """Start a run, signal it after `delay` seconds, resume it to the end; returns where it was hit."""
    folder = RunFolder(config.folder)
    pid = start(config, resume=False)
    time.sleep(delay)
    os.kill(pid, number)
    code = exit_code(pid)
    left = folder.path
    where = "save" if any(left.glob(".saving-*")) else f"step {folder.last_step()}"
    if code == 0:
        return "finished before the signal"
    # A SIGTERM before the loop listens ends the process as any other.
    assert code in (-number, 128 + number), f"exit code {code}"
    while not folder.finished():
        assert exit_code(start(config, resume=True)) == 0, "the resumed run failed"
    return where


def settings_of(case: str, root: Path) -> dict[str, Any]:
    if case == "gpt":
        return {**SETTINGS, "data_path": str(make_data(root / "data"))}
    encoder = make_encoder(root / "encoder")
    shape = {key: value for key, value in SETTINGS.items() if key != "preset"}
    found = {**shape, "arch": str(encoder), "data_path": str(make_pairs(root / "pairs", encoder)), "batch_size": 8,
             "seq_len": 32, "max_steps": 30}  # fmt: skip
    build_model(resolve({**found, "labels": 3}))  # imports what the forks would each import again
    return found


def programme(root: Path, kills: int, terms: int, seed: int = 0, cases: Sequence[str] = ("gpt",)) -> dict[str, Any]:
    """Interrupt `kills` runs with SIGKILL and `terms` with SIGTERM; returns what was seen."""
    torch.set_num_threads(1)
    random.seed(seed)
    runs = {}
    for case in cases:
        settings = settings_of(case, root)
        runs |= {f"{case} {arm}": {**settings, "model_type": arm} for arm in ARMS[case]}
    expected, length = {}, {}
    for name, settings in runs.items():
        config = resolve({**settings, "out_dir": str(root / f"whole_{name}")})
        begin = time.monotonic()
        assert exit_code(start(config, resume=False)) == 0
        length[name] = time.monotonic() - begin
        expected[name] = fingerprint(RunFolder(config.folder))
    result: dict[str, Any] = {"equal": 0, "total": 0, "where": collections.Counter()}
    for index in range(kills + terms):
        name = list(runs)[index % len(runs)]
        number = signal.SIGKILL if index < kills else signal.SIGTERM
        config = resolve({**runs[name], "out_dir": str(root / f"cut_{index}")})
        where = interrupt(config, number, random.uniform(0.02, length[name]))
        result["total"] += 1
        result["equal"] += fingerprint(RunFolder(config.folder)) == expected[name]
        result["where"][where] += 1
        print(f"{index + 1}: {signal.Signals(number).name} {name}, hit at {where}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--terms", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", choices=list(ARMS), default=list(ARMS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = programme(Path(folder), options.kills, options.terms, options.seed, options.cases)
    print(f"{result['equal']}/{result['total']} runs ended in the same bits; hit at: {dict(result['where'])}")
    sys.exit(result["equal"] != result["total"])


if __name__ == "__main__":
    main()
