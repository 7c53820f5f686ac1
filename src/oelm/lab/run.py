"""`oelm run`: check a whole plan before anything starts, then queue it here, in the background, or on Slurm."""

import math
import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from oelm import encoders
from oelm.config import RunConfig
from oelm.data.fit import open_fitting, usual_tokenizer
from oelm.data.sources import CORPORA, prepare_command
from oelm.data.tokens import data_root
from oelm.errors import UserError, nearest
from oelm.lab.gpus import GpuPool
from oelm.lab.plan import Plan, PlannedRun
from oelm.lab.queue import Queue
from oelm.lab.status import LabWatcher
from oelm.lab.watch import make_console, watching
from oelm.machine import cores
from oelm.tables import fitting, table

EFFICIENCY = 0.5
"""Share of the matrix-multiply peak that a training step is expected to reach."""
DRY_RUN = ("run", "arm", "dataset", "lr", "steps", "batch", "seed", "parameters", "trainable", "FLOPs", "time", "disk")
LESSER = ("trainable", "FLOPs", "batch", "parameters", "seed", "steps", "arm")
"""Left out, in this order, where the terminal is too narrow."""


@dataclass(frozen=True)
class Estimate:
    """What a run will cost, before it runs."""

    steps: int
    """0: not known before the data are there."""
    parameters: int
    trainable: int
    flops: float
    disk: int


def run_plan(plan: Plan, only: str, slots: int, gpus: GpuPool | None) -> dict[str, str]:
    """Check, then work through the plan; returns the runs that did not finish, and why."""
    runs = pick(plan, only)
    check(runs)
    most = max(run.processes for run in runs)
    if gpus is not None and most > gpus.count:
        raise UserError(f"a run of the plan needs {most} GPUs (gpus_per_run) and this queue may use {gpus.count}")
    plan.leave_copy()
    console = make_console()
    slots = slots or (max(1, cores() // 2) if gpus is None else 64)
    done = sum(run.folder.finished() for run in runs)
    total = len(runs) if only else plan.total
    console.print(f"{total} runs, {done} finished; {_places(slots, gpus)}")
    watcher = LabWatcher(plan.out, runs, plan.baseline)
    queue = Queue(plan, slots, gpus, runs if only else None, console.print)

    def watch() -> None:
        watcher.planned = runs if only else plan.runs
        look()

    try:
        with watching(console, watcher) as look:
            failures = queue.run(watch)
    except KeyboardInterrupt:
        saved = sum(run.folder.last_step() > 0 and not run.folder.finished() for run in watcher.planned or [])
        console.print(f"stopped; {saved} unfinished runs are saved, and the same command goes on with them")
        raise
    for name, reason in failures.items():
        console.print(f"{name} failed: {reason}", style="red")
    known = runs if only else plan.runs
    left = [run.id for run in known if not run.folder.finished() and run.id not in failures]
    if left:
        console.print(f"{len(left)} of {len(known)} runs were stopped; the same command goes on with them")
    elif not failures and not only:
        console.print(f"all runs are finished; next: oelm verdict {plan.out}, oelm report {plan.out}")
    return failures | dict.fromkeys(left, "stopped")


def _places(slots: int, gpus: GpuPool | None) -> str:
    if gpus is None:
        return f"{slots} side by side on {cores()} cores"
    return "any free GPU" if gpus.allowed is None else f"GPU {', '.join(map(str, gpus.allowed))}"


def pick(plan: Plan, only: str) -> list[PlannedRun]:
    """The runs named by `--only A,B`, or all that are known."""
    if not only:
        return plan.runs
    by_id = {run.id: run for run in plan.runs}
    names = dict.fromkeys(filter(None, (name.strip() for name in only.split(","))))
    if not names:
        raise UserError(f"--only {only}: names no run")
    for name in names:
        if name not in by_id:
            raise UserError(f"--only {name}: no such run in the plan; {nearest(name, by_id)}")
    return [by_id[name] for name in names]


def check(runs: list[PlannedRun]) -> None:
    """Refuse before anything starts: folders of other runs, data that are missing or do not fit."""
    check_settings(runs)
    missing = missing_data(runs)
    if missing:
        raise UserError(f"data are missing; first: {'; '.join(missing)}")


def check_settings(runs: list[PlannedRun]) -> None:
    """A run folder that is there already must be the run that the plan means, finished or not."""
    for run in runs:
        check_place(run.folder.path)
        changed = run.folder.differs_from(run.config) if run.folder.config_file.exists() else ""
        if changed:
            raise UserError(
                f"{run.folder.path} was run with {changed}: put the plan back, or choose another place with --out"
            )


def check_place(folder: Path) -> None:
    """A folder that can be made: its name is possible, and what lies above it is a folder that may be written to."""
    try:
        if "\0" in str(folder):
            raise ValueError("it has a null character in its name")
        above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except (OSError, ValueError) as error:
        raise UserError(f"{str(folder)[:80]!r} cannot be a run folder: {error}") from None
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{folder} cannot be made: {above} is not a folder that you may write to; take another --out")


def missing_data(runs: list[PlannedRun]) -> list[str]:
    """The commands that prepare the data sets that are not there; data that are there must fit."""
    commands = []
    for key in dict.fromkeys((run.config.dataset, run.config.data_path) for run in runs):
        mine = [run.config for run in runs if (run.config.dataset, run.config.data_path) == key]
        place = Path(key[1]) if key[1] else data_root() / key[0]
        if not place.is_dir():
            commands.append(prepare_command(key[0], usual_tokenizer(mine[0]), str(place)))
            continue
        for config in {_unvaried(config) for config in mine}:
            open_fitting(config)
    return commands


def _unvaried(config: RunConfig) -> RunConfig:
    """Without what makes no difference to cost and data: a plan may have thousands of runs."""
    return config.model_copy(update={"seed": 0, "max_lr": 1.0, "min_lr": 0.0, "out_dir": ""})


def show_dry_run(plan: Plan, only: str) -> None:
    """The runs with their settings and what they will cost on this machine; and what is missing."""
    from oelm.train.clock import roughly

    runs = pick(plan, only)
    check_settings(runs)
    speed = _matmul_flops()
    rows: list[list[str]] = []
    total_seconds, total_disk, known, every = 0.0, 0, True, []
    for run in runs:
        config, cost = run.config, estimate(_unvaried(run.config))
        seconds = cost.flops / (speed * EFFICIENCY) / run.processes
        ended = run.folder.finished()
        every.append((seconds, cost.disk))
        if not ended:
            total_seconds, total_disk, known = total_seconds + seconds, total_disk + cost.disk, known and cost.steps > 0
        batch = f"{config.batch_size}" + (f" x {run.processes}" if run.processes > 1 else "")
        rows.append([
            run.id, config.arm, config.dataset, f"{config.max_lr:g}",
            f"{cost.steps:,}" if cost.steps else f"{config.num_epochs:g} epochs", batch,
            str(config.seed), f"{cost.parameters:,}", f"{cost.trainable:,}", f"{cost.flops:.2g}" if cost.steps else "?",
            "finished" if ended else roughly(seconds) if cost.steps else "?", f"{cost.disk / 2**20:,.0f} MiB",
        ])  # fmt: skip
    console = make_console()
    cells = {heading: [row[i] for row in rows] for i, heading in enumerate(DRY_RUN)}
    shown = fitting({heading: max(map(len, (heading, *cells[heading]))) for heading in DRY_RUN}, LESSER, console.width)
    words = len(set(shown) & {"run", "arm", "dataset"})
    console.print(table(shown, zip(*(cells[heading] for heading in shown), strict=True), words))
    later = plan.total - len(plan.runs) if not only else 0
    if later:
        console.print(f"and {later} more once the best {plan.choices[0].setting} of each arm is known")
        total_seconds += later * sum(seconds for seconds, _ in every) / len(runs)
        total_disk += later * sum(disk for _, disk in every) // len(runs)
    if all(run.folder.finished() for run in runs) and not later:
        console.print(f"{len(runs)} runs, all finished")
        return
    took = roughly(total_seconds) if known else "for a time that is known once the data are there,"
    done = sum(run.folder.finished() for run in runs)
    console.print(
        f"{len(runs) + later} runs, {f'{done} of them finished, ' if done else ''}{took} one after the other on this "
        f"machine (at {EFFICIENCY:.0%} of a matrix product's {speed / 1e9:,.0f} GFLOP/s), at most "
        f"{total_disk / 2**20:,.0f} MiB"
    )
    for command in missing_data(runs):
        console.print(f"missing data; first: {command}", style="yellow")


@cache
def estimate(config: RunConfig) -> Estimate:
    """Of a shape; what differs between its runs costs nothing: a plan may have thousands."""
    from oelm.model import cost

    evaluated, full, known = 0, 1.0, not config.num_epochs
    if config.arch != encoders.GPT and not config.labels and config.dataset in CORPORA:
        config = config.replace(labels=len(CORPORA[config.dataset].labels))
    with suppress(UserError):  # the data are not there to be counted
        config, data = open_fitting(config)
        splits, full, known = data.splits, data.fullness(config.seq_len), True
        evaluated = math.ceil(config.max_steps / config.val_interval) * len(splits["val"]) + len(splits.get("test", ()))
    table = cost.parts(config)
    per_token = cost.flops(config)
    flops = float(per_token.step) * config.tokens_per_step * config.max_steps * full
    flops += float(per_token.forward) * evaluated
    kept = config.keep_saves or config.max_steps // config.save_interval
    sizes = cost.checkpoint_bytes(config)
    disk = (kept + 4) * sizes["checkpoint"] + sizes["frozen_once"]
    totals = (sum(part.total for part in table), sum(part.trainable for part in table))
    return Estimate(config.max_steps if known else 0, *totals, flops if known else 0.0, disk)


def _matmul_flops() -> float:
    """Floating-point operations per second of a large matrix product here and now."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 4096 if device == "cuda" else 1024
    matrix = torch.randn(size, size, device=device)
    seconds = []
    for _ in range(5):  # the first is slow, and others may be disturbed
        begin = time.perf_counter()
        float((matrix @ matrix)[0, 0])
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds)


def parse_overrides(words: list[str]) -> dict[str, str]:
    """`--set max_steps=30`, for every run of the plan."""
    for word in words:
        if "=" not in word:
            raise UserError(f"--set {word}: write KEY=VALUE, such as max_steps=30")
    return {key.replace("-", "_"): value for key, _, value in (word.partition("=") for word in words)}


def detach(arguments: list[str], log: Path) -> int:
    """Start `oelm run` again in a session of its own, so that a closed terminal does not end it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "oelm", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    time.sleep(1.5)
    if process.poll():
        reason = _last_line(log)
        log.unlink()
        raise UserError(f"the detached queue ended at once: {reason}")
    print(f"oelm {shlex.join(arguments)}\nruns in the background as pid {process.pid}; its log: {log}")
    return process.pid


def _last_line(path: Path) -> str:
    return (path.read_text(errors="replace").strip().splitlines() or ["see the log"])[-1].removeprefix("oelm: error: ")


def submit_plan(plan: Plan, only: str, options: dict[str, Any]) -> None:
    """Submit to Slurm and say how to watch it."""
    from oelm.lab.slurm import submit

    runs = pick(plan, only)
    check(runs)
    plan.leave_copy()
    place = runs[0].folder.path.parent
    place.mkdir(parents=True, exist_ok=True)
    ids = submit(plan, runs, place, options)
    if not ids:
        print("nothing to submit: every run is finished, running or already queued")
        return
    print(f"submitted {len(ids)} runs as {ids[0].partition('_')[0]} (oelm status {place}; squeue; scancel)")
    if not options.get("gres") and any(run.settings.get("device", "auto") != "cpu" for run in runs):
        print("no --gres was given: unless the partition has GPUs for all its jobs, the runs train on CPU cores")
