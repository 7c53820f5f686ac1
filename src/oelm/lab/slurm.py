"""Slurm: the runs of a plan as one array job through submitit, in the same run folders.

A job that is preempted or out of time gets SIGUSR1 or SIGTERM, saves, and puts itself back into the queue; the
run folder carries everything that the next part needs.
"""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oelm.errors import UserError
from oelm.files import read_json
from oelm.lab.plan import Plan, PlannedRun
from oelm.lab.queue import train_command

JOBS_FILE = ".slurm-jobs.json"


@dataclass(frozen=True)
class SlurmJob:
    """What runs on the node. A plain record, so that submitit can send it there."""

    command: list[str]

    def __call__(self) -> int:
        """Train; if Slurm's signal ended it, go back into the queue."""
        child = subprocess.Popen(self.command, start_new_session=True)
        preempted = []

        def pass_on(number: int, frame: object) -> None:
            preempted.append(number)
            child.send_signal(signal.SIGTERM)

        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, pass_on)
        code = child.wait()
        if code and (preempted or code == 128 + signal.SIGTERM):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            subprocess.run(["scontrol", "requeue", _this_job()], check=True)
            time.sleep(300)  # Slurm ends this process; returning would count as done
        return code


def _this_job() -> str:
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else os.environ["SLURM_JOB_ID"]


def submit(plan: Plan, runs: list[PlannedRun], out: Path, options: dict[str, Any]) -> list[str]:
    """Submit the unfinished runs as one array; returns the job ids."""
    try:
        import submitit
    except ImportError:
        raise UserError("--on slurm needs submitit: pip install 'oelm[slurm]'") from None
    if plan.choices:
        raise UserError("--on slurm cannot follow a [select]: run its candidates first with --only, or run it locally")
    for name in ("time", "cpus"):
        if options.get(name) is not None and not 0 < options[name] < 1_000_000:
            raise UserError(f"--{name} {options[name]}: take a number above 0")
    for name in ("partition", "gres", "mem"):
        if options.get(name) and not re.fullmatch(r"[\w.:,=*/-]+", options[name]):
            raise UserError(f"--{name} {options[name]!r}: Slurm has no such names")
    todo = [run for run in runs if not run.folder.finished() and not run.folder.alive()]
    queued = queued_jobs(out)
    todo = [run for run in todo if run.folder.path.absolute() not in queued]
    if not todo:
        return []
    executor = submitit.AutoExecutor(folder=out / ".slurm", cluster="slurm")
    executor.update_parameters(name="oelm", slurm_array_parallelism=len(todo), **_parameters(options))
    threads = int(options.get("cpus") or 1)
    jobs = []
    try:
        with executor.batch():
            for run in todo:
                settings = {"threads": max(1, threads // run.processes), **run.settings}
                settings["out_dir"] = str(run.folder.path.absolute())
                if settings.get("data_path"):
                    settings["data_path"] = str(Path(settings["data_path"]).absolute())
                jobs.append(executor.submit(SlurmJob(train_command(run, settings))))
    except submitit.core.utils.FailedJobError as error:
        raise UserError(f"Slurm refused the jobs: {(str(error).splitlines() or ['no reason given'])[-1]}") from None
    ids = [job.job_id for job in jobs]
    known = _read_jobs(out)
    known.update({job: run.folder.path.name for job, run in zip(ids, todo, strict=True)})
    (out / JOBS_FILE).write_text(json.dumps(known, indent=2))
    return ids


def _parameters(options: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = {"timeout_min": options.get("time") or 24 * 60, "nodes": 1, "tasks_per_node": 1}
    parameters["cpus_per_task"] = int(options.get("cpus") or 1)
    additional = {"requeue": True, "open-mode": "append"}
    if options.get("partition"):
        parameters["slurm_partition"] = options["partition"]
    if options.get("gres"):
        additional["gres"] = options["gres"]
    if options.get("mem"):
        additional["mem"] = options["mem"]
    parameters["slurm_additional_parameters"] = additional
    parameters["slurm_signal_delay_s"] = 120
    return parameters


def queued_jobs(root: Path) -> dict[Path, str]:
    """Run folders at or below `root` that Slurm has pending, requeued or running, with Slurm's word for it."""
    files = (path for depth in ("", "*/", "*/*/") for path in root.glob(f"{depth}{JOBS_FILE}"))
    places = {root.absolute().parent, *(path.absolute().parent for path in files)}  # the first: root may be a run
    known = {job: place / name for place in sorted(places) for job, name in _read_jobs(place).items()}
    if not known:
        return {}
    try:
        listed = subprocess.run(
            ["squeue", "--noheader", "--array", "--format=%i %T %r"], capture_output=True, text=True, timeout=20
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    states = {line.split()[0]: " ".join(line.split()[1:]) for line in listed.splitlines() if line.strip()}
    return {path: states[job] for job, path in known.items() if job in states}


def _read_jobs(out: Path) -> dict[str, str]:
    return {job: str(name) for job, name in (read_json(out / JOBS_FILE) or {}).items()}
