"""Time and memory of a run, really measured."""

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oelm.config import RunConfig
from oelm.train import metrics


def peak_memory(device: torch.device) -> int:
    """Largest number of bytes held so far: GPU memory on CUDA, else the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError, TypeError):  # Linux; getrusage would count the process that started this one
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024  # type: ignore[index]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def spoken(seconds: float) -> str:
    """4h 31m 27s"""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}h {minutes}m {whole % 60}s" if hours else f"{minutes}m {whole % 60}s"


def roughly(seconds: float) -> str:
    """A duration as it is known beforehand."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"


def timing_stats(config: RunConfig, metrics_file: Path, wall: float, summary: dict[str, Any]) -> dict[str, Any]:
    """The published `timing_stats.json`, from the metrics of the whole run."""
    steps = np.array([record["seconds"] for record in metrics.read(metrics_file, "train")])
    validations = [record["seconds"] for record in metrics.read(metrics_file, "val")]
    return {
        "model_type": config.model_type,
        "init_method": config.frames,
        "dataset": config.dataset,
        "total_wall_time": wall,
        "total_formatted": spoken(wall),
        "num_steps_measured": len(steps),
        "mean_step_time": float(steps.mean()),
        "std_step_time": float(steps.std()),
        "median_step_time": float(np.median(steps)),
        "min_step_time": float(steps.min()),
        "max_step_time": float(steps.max()),
        "p95_step_time": float(np.percentile(steps, 95)),
        "p99_step_time": float(np.percentile(steps, 99)),
        "total_validation_time": sum(validations),
        "mean_validation_time": sum(validations) / max(1, len(validations)),
        "num_validations": len(validations),
        "final_perplexity": summary["final_perplexity"],
        "best_val_loss": summary["best_val_loss"],
        "started": summary["started"],
        "finished": summary["finished"],
        "epochs": summary["epochs"],
        "peak_memory_bytes": summary["peak_memory_bytes"],
    }
