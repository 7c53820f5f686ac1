"""Run folders made by hand, with known numbers in them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from oelm.config import resolve

DATA = {
    "tokenizer": "bytes",
    "tokenizer_hash": "t" * 64,
    "source_hash": "s" * 64,
    "tokens": {"train": 100_000, "val": 5_000, "test": 5_000},
    "edges": {"train": "a", "val": "b", "test": "c"},
}


def make_run(
    root: Path, name: str, arm: str = "baseline", seed: int = 1, lr: float = 1e-3, test: float | None = 2.0,
    val: float | None = None, state: str = "finished", reason: str = "", step_seconds: float = 0.1,
    epochs: float = 0.5, best: float | None = None, data: dict[str, Any] | None = None,
    documents: np.ndarray | None = None, machine: dict[str, Any] | None = None, steps: int = 20,
    answers: np.ndarray | None = None, **settings: Any,
) -> Path:  # fmt: skip
    """A run of `steps` steps, validated at every tenth of it; losses fall from 1 above to their final value.

    `answers`, rows of (label, answer), make it a classifier of three classes.
    """
    folder = root / name
    folder.mkdir(parents=True)
    told = {}
    if answers is not None:
        settings["labels"] = 3
        told = {"accuracy": float((answers[:, 0] == answers[:, 1]).mean()), "f1": 0.5}
    config = resolve({"preset": "tiny", "model_type": arm, "seed": seed, "max_lr": lr, "max_steps": steps, **settings})
    (folder / "config.toml").write_text(config.to_toml())
    val = (2.0 if test is None else test) if val is None else val
    done = steps if state == "finished" else steps // 2
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, done + 1):
            loss = val + 1 - step / steps
            file.write(json.dumps({"kind": "train", "step": step, "loss": loss, "seconds": step_seconds}) + "\n")
            if step % max(1, steps // 10) == 0:
                record = {"kind": "val", "step": step, "loss": loss, "ppl": math.exp(min(loss, 700.0)), "seconds": 0.1,
                          **told}  # fmt: skip
                file.write(json.dumps(record) + "\n")
        if state == "finished" and test is not None:
            record = {"kind": "test", "step": steps, "loss": test, "seconds": 0.1, **told}
            file.write(json.dumps(record) + "\n")
    data = DATA if data is None else data
    part = {"started": "2026-01-02T03:04:05+00:00", "host": "h", "device": "cpu", "device_name": "CPU", "threads": 1,
            "oelm": "0", "torch": "0", "python": "3", "git": "c" * 40, **(machine or {})}  # fmt: skip
    (folder / "environment.json").write_text(json.dumps({"data": data, "parts": [part]}))
    retry = "never" if "gradient norm" in reason else ""
    summary: dict[str, Any] = {"state": state, "reason": reason, "retry": retry, "ended": "2026-01-02T04:04:05+00:00"}
    if state == "finished":
        summary = {
            "state": "finished", "model_type": arm, "dataset": config.dataset, "seed": seed, "steps": steps,
            "tokens_seen": steps * config.tokens_per_step, "epochs": epochs, "total_parameters": 1000,
            "trainable_parameters": 1000 if config.freeze == "none" else 800,
            "frozen_parameters": 0 if config.freeze == "none" else 200,
            "final_val_loss": val, "final_perplexity": math.exp(min(val, 700.0)),
            "best_val_loss": val if best is None else best, "best_step": steps, "test_loss": test,
            "test_perplexity": None if test is None else math.exp(min(test, 700.0)), "test_bpb": test,
            "started": part["started"], "finished": "2026-01-02T04:04:05+00:00", "wall_seconds": 3600.0,
            "peak_memory_bytes": 300 << 20, "checkpoint_bytes": 12 << 20, "median_step_seconds": step_seconds,
            "data": data, **{f"{split}_{key}": value for key, value in told.items() for split in ("final_val", "test")},
        }  # fmt: skip
    if state != "died":
        (folder / "summary.json").write_text(json.dumps(summary))
    if documents is not None:
        np.save(folder / "test_documents.npy", documents)
    if answers is not None:
        np.save(folder / "test_answers.npy", answers)
    (folder / "sample.json").write_text(json.dumps({"prompt": [79, 110], "sample": [99, 101]}))
    return folder


def make_arm(root: Path, arm: str, losses: dict[int, float], lr: float = 1e-3, **options: Any) -> None:
    """One run per seed, with the given test losses."""
    for seed, loss in losses.items():
        make_run(root, f"{arm}_lr{lr:g}_seed{seed}", arm, seed, lr, loss, **options)
