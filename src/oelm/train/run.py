"""A whole run: check everything, claim the folder, train, and write down what came of it."""

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oelm import __version__, encoders
from oelm.config import PRESETS, RunConfig, build
from oelm.data.fit import open_fitting, with_prepared
from oelm.data.labelled import LabelledData
from oelm.data.tokenizer import TOKENIZER_FILE
from oelm.data.tokens import TokenData
from oelm.errors import RunFailed, Stopped, UserError, of_compiler
from oelm.files import disk_errors, write_json
from oelm.machine import describe, git_commit, leave_with_parent, now, place_in_world
from oelm.train.folder import RunFolder, claim

if TYPE_CHECKING:
    from oelm.train.distributed import World
    from oelm.train.task import Task

TEST_FIGURES = {"loss": "loss", "perplexity": "ppl", "bpb": "bpb", "accuracy": "accuracy", "f1": "f1"}
"""What the summary says of the test split, by the names in the metrics."""


def train(config: RunConfig, resume: bool = False, vocab_is_set: bool = False) -> RunFolder:
    """Train `config` to its end in its run folder.

    Whatever can be refused is refused before the folder is touched and before torch is imported.
    """
    rank, size = place_in_world()
    if size > 1:
        leave_with_parent(signal.SIGKILL)  # no process goes on, or keeps its GPU, behind a torchrun that was killed
    config = config.replace(processes=size)
    if re.match(r"(csv|tsv|jsonl|parquet):", config.dataset):
        config = with_prepared(config, rank)
    config, data = open_fitting(config, vocab_is_set)
    advice = f"free some space, then continue with oelm train --resume {config.folder}"
    if rank != 0:
        _train_in(RunFolder(config.folder), config, data, resume)
        return RunFolder(config.folder)
    with claim(config, resume) as folder, disk_errors(f"training in {folder.path}", advice):
        _train_in(folder, config, data, resume)
    return folder


def _train_in(folder: RunFolder, config: RunConfig, data: TokenData, resume: bool) -> None:
    from oelm.train.console import Reporter
    from oelm.train.distributed import join
    from oelm.train.loop import Trainer

    with join(config.device, config.threads) as world:
        reporter = Reporter(folder.log if world.leads else None)
        machine = describe()
        try:
            if world.leads:
                _copy_tokenizer(data, folder)
                _write_environment(folder, config, data, machine, str(world.device))
                _write_encoder(folder, config)
            task = _task(config, data, world)
            epochs = task.order.epochs(config.max_steps)
            with _named_failures(world.size):
                trainer = Trainer(config, task, world, folder, reporter, machine["started"])
                if world.leads:
                    for line in [*_opening(config, epochs, world.device.type), *task.opening()]:
                        reporter.say(line)
                state = trainer.run(resume)
        except (Stopped, RunFailed, UserError) as error:
            if world.leads:
                _write_end(folder, error)
                reporter.say(
                    f"stopped by {error}: step {folder.last_step():,} is saved; continue with "
                    f"oelm train --resume {folder.path}"
                    if isinstance(error, Stopped)
                    else f"FAILED: {error}"
                )
            raise
        else:
            if world.leads:
                trainer.model.eval()
                write_json(folder.sample, task.sample(trainer.model))
                summary = finish(folder, config, state.__dict__, epochs)
                reporter.say(_closing(summary))
        finally:
            reporter.close()


def _task(config: RunConfig, data: TokenData, world: "World") -> "Task":
    from oelm.train.classify import Classification
    from oelm.train.language import LanguageModelling

    return (
        Classification(config, data, world)
        if isinstance(data, LabelledData)
        else LanguageModelling(config, data, world)
    )


def finish(folder: RunFolder, config: RunConfig, state: dict[str, Any], epochs: float) -> dict[str, Any]:
    """Write timing_stats.json and summary.json; the summary is last, and its presence means finished."""
    from oelm.model import cost
    from oelm.train import metrics
    from oelm.train.clock import timing_stats

    last = {record["kind"]: record for record in metrics.read(folder.metrics)}
    table = cost.parts(config)
    summary: dict[str, Any] = {
        "state": "finished",
        "model_type": config.model_type,
        "dataset": config.dataset,
        "seed": config.seed,
        "steps": state["step"],
        "tokens_seen": state["step"] * config.tokens_per_step,
        "epochs": epochs,
        "total_parameters": sum(part.total for part in table),
        "trainable_parameters": sum(part.trainable for part in table),
        "frozen_parameters": sum(part.frozen for part in table),
        "final_train_loss": last["train"]["loss"],
        "final_val_loss": last["val"]["loss"],
        "final_perplexity": last["val"].get("ppl"),
        "final_val_bpb": last["val"].get("bpb"),
        "final_val_accuracy": last["val"].get("accuracy"),
        "final_val_f1": last["val"].get("f1"),
        "best_val_loss": state["best_loss"],
        "best_step": state["best_step"],
        **{f"test_{name}": last.get("test", {}).get(key) for name, key in TEST_FIGURES.items()},
        "started": state["started"],
        "finished": now(),
        "wall_seconds": state["elapsed"],
        "peak_memory_bytes": state["peak_memory"],
        "checkpoint_bytes": sum(p.stat().st_size for p in folder.last.iterdir()),
        "frozen_hash": state["frozen_hash"],
        "data": state["data"],
    }
    timing = timing_stats(config, folder.metrics, state["elapsed"], summary)
    summary["median_step_seconds"] = timing["median_step_time"]
    write_json(folder.timing, timing)
    write_json(folder.summary, summary)
    return summary


def _opening(config: RunConfig, epochs: float, device: str) -> list[str]:
    """What people want to know before they wait."""
    import torch

    from oelm.model import cost

    table = cost.parts(config)
    total, frozen = sum(part.total for part in table), sum(part.frozen for part in table)
    size = cost.checkpoint_bytes(config)["checkpoint"]
    kept = config.keep_saves or config.max_steps // config.save_interval
    lines = [
        f"oelm {__version__} | {config.label or config.model_type} ({config.attention}) | "
        f"{config.dataset} | seed {config.seed} | {device}, {torch.get_num_threads()} thread(s)"
        + (f" x {config.processes} processes" if config.processes > 1 else ""),
        f"run folder: {config.folder}",
        f"parameters: {total:,} total, {total - frozen:,} trainable, {frozen:,} frozen",
        f"tokens per step: {config.tokens_per_step:,} ({config.windows_per_step} x {config.seq_len}); "
        f"{config.max_steps * config.tokens_per_step:,} in {config.max_steps:,} steps = {epochs:.2f} epochs"
        if not config.labels
        else f"examples per step: {config.windows_per_step}, of at most {config.seq_len} tokens; "
        f"{config.max_steps:,} steps = {epochs:.2f} epochs",
        f"disk: {size / 2**20:,.1f} MiB a checkpoint, at most {(kept + 4) * size / 2**20:,.1f} MiB in all",
    ]
    usual = build(PRESETS[config.preset]).vocab_size
    if config.arch == encoders.GPT and config.vocab_size != usual:
        lines.insert(3, f"vocabulary: {config.vocab_size:,} tokens, where the preset {config.preset} has {usual:,}")
    if epochs > 1 and not config.labels:
        lines.append(
            f"WARNING: the training text is seen {epochs:.1f} times: a gap between arms may then be regularisation"
        )
    if config.warmup_steps > config.max_steps:
        lines.append(
            f"WARNING: the warm-up ({config.warmup_steps:,} steps) is longer than the run "
            f"({config.max_steps:,}): the learning rate never reaches {config.max_lr:g}"
        )
    if config.compile and device == "cpu":
        lines.append("compiled steps were the slower ones on CPUs that were measured (see oelm bench ARM ARM+compile)")
    if config.use_amp and device != "cuda":
        lines.append(f"mixed precision is for CUDA GPUs: computing in float32 on {device}")
    return lines


def _closing(summary: dict[str, Any]) -> str:
    from oelm.train.clock import spoken

    parts = [f"finished {summary['steps']:,} steps in {spoken(summary['wall_seconds'])}"]
    if summary["final_val_accuracy"] is None:
        parts.append(f"val ppl {summary['final_perplexity']:.4f}")
        if summary["test_perplexity"] is not None:
            parts.append(f"test ppl {summary['test_perplexity']:.4f}")
    else:
        parts.append(f"val accuracy {summary['final_val_accuracy']:.2%}")
        if summary["test_accuracy"] is not None:
            parts.append(f"test accuracy {summary['test_accuracy']:.2%}, macro-F1 {summary['test_f1']:.4f}")
    parts.append(f"{1000 * summary['median_step_seconds']:.1f} ms a step")
    parts.append(f"peak memory {summary['peak_memory_bytes'] / 2**20:,.0f} MiB")
    return " | ".join(parts)


@contextmanager
def _named_failures(processes: int) -> Iterator[None]:
    """Lack of memory, a compiler that cannot and the death of another process have a name and a remedy."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise RunFailed("out of memory: lower --micro_batch (the step stays the same)", retry="smaller") from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):
            raise RunFailed("out of memory: lower --micro_batch (the step stays the same)", retry="smaller") from error
        if reason := of_compiler(error):
            raise RunFailed(f"{reason}; go on with --resume and --no_compile") from error
        if processes > 1 and re.search(r"gloo|nccl|connection|peer|collective", str(error), re.IGNORECASE):
            raise RunFailed("another process of the run died; resume with --resume", retry="same") from error
        raise


def _write_end(folder: RunFolder, error: Stopped | RunFailed | UserError) -> None:
    """Say in the folder why the run is not running; a full disk must not hide the reason itself."""
    state = "stopped" if isinstance(error, Stopped) else "failed"
    end = {"state": state, "reason": str(error), "retry": getattr(error, "retry", "")}
    end |= {"step": folder.last_step(), "ended": now()}
    try:
        write_json(folder.summary, end)
    except OSError:
        folder.summary.unlink(missing_ok=True)


def _copy_tokenizer(data: TokenData, folder: RunFolder) -> None:
    """A trained vocabulary goes with the run, so that it can speak without its data."""
    source, target = data.folder / TOKENIZER_FILE, folder.tokenizer
    if source.exists() and not target.exists():
        shutil.copyfile(source, target)


def _write_encoder(folder: RunFolder, config: RunConfig) -> None:
    """What an encoder was built from goes with the run, so that it can be used without the pretrained one."""
    if config.arch != encoders.GPT and not folder.encoder.exists():
        from oelm.model.encoder import encoder_settings

        write_json(folder.encoder, encoder_settings(config))


def _write_environment(
    folder: RunFolder, config: RunConfig, data: TokenData, machine: dict[str, Any], device: str
) -> None:
    """Versions, device, threads, code and data of every part of the run."""
    import numpy
    import torch

    part = {
        **machine,
        "oelm": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "device": device,
        "device_name": torch.cuda.get_device_name() if device.startswith("cuda") else machine["cpu"],
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES") if device.startswith("cuda") else None,
        "threads": torch.get_num_threads(),
        "processes": config.processes,
        "git": git_commit(Path(__file__).parent),
        "prepared": (data.meta or {}).get("command"),
    }
    before = folder.read_environment()
    write_json(folder.environment, {"data": data.identity(), "parts": [*before, part]})
