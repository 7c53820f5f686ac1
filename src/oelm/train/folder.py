"""The run folder: the only truth about a run, and the one place that knows what lies in it.

    outputs/<ID>_<arm>/
      config.toml  training.log  metrics.jsonl  events.out.tfevents…  timing_stats.json  summary.json
      environment.json  tokenizer.json (not GPT-2's)  test_documents.npy  test_answers.npy  encoder.json
      sample.json  frozen.safetensors  run.lock
      step-00001000/ …   last -> step-…   best -> step-…

No torch here: a folder is claimed, refused or read before torch is imported.
"""

import os
import re
import shutil
import socket
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from oelm import encoders
from oelm.config import OPERATIONAL, RunConfig, load_toml, resolve
from oelm.errors import UserError
from oelm.files import disk_errors, is_locked, lock_file, read_json, write_atomic, write_json
from oelm.machine import now


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.log = path / "training.log"
        self.metrics = path / "metrics.jsonl"
        self.timing = path / "timing_stats.json"
        self.summary = path / "summary.json"
        self.environment = path / "environment.json"
        self.documents = path / "test_documents.npy"
        self.answers = path / "test_answers.npy"
        self.encoder = path / "encoder.json"
        self.sample = path / "sample.json"
        self.tokenizer = path / "tokenizer.json"
        self.frozen = path / "frozen.safetensors"
        self.audit = path / "freeze_audit.jsonl"
        self.lock = path / "run.lock"
        self.last = path / "last"
        self.best = path / "best"

    def clear(self, made: bool) -> None:
        """Remove what a run has written, and the folder itself if the run `made` it; nothing else."""
        if made:
            shutil.rmtree(self.path)
            return
        own = [path for path in vars(self).values() if path != self.path]
        for path in [*own, *self.path.glob("events.out.tfevents*"), *self.path.glob(".*.tmp")]:
            path.unlink(missing_ok=True)

    def step_folder(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def config(self) -> RunConfig:
        if not self.config_file.is_file():
            raise UserError(f"{self.path} is not a run folder: it has no config.toml")
        values = load_toml(self.config_file)
        missing = [key for key in ("model_type", "dataset", "max_lr", "max_steps", "seed") if key not in values]
        if missing:
            raise UserError(f"{self.config_file} is not whole: it has no {missing[0]}")
        if settings := read_json(self.encoder):
            encoders.remember(str(values.get("arch")), settings)
        return resolve({}, values)

    def differs_from(self, config: RunConfig, apart: Collection[str] = ("vocab_size",)) -> str:
        """The first setting that decides what is computed and is another one here, in words; "" if there is none."""
        before = self.config()
        by_data = {"max_steps": bool(config.num_epochs), "labels": not config.labels}
        apart = {*apart, *(key for key, decided in by_data.items() if decided)}
        for key in type(config).model_fields:
            old, new = getattr(before, key), getattr(config, key)
            if old != new and key not in OPERATIONAL and key not in apart:
                return f"{key} = {old}, not {new}"
        return ""

    def read_summary(self) -> dict[str, Any] | None:
        return read_json(self.summary)

    def read_environment(self) -> list[dict[str, Any]]:
        """The machines of the run's parts so far."""
        parts = (read_json(self.environment) or {}).get("parts")
        return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []

    def read_data(self) -> dict[str, Any]:
        """Hashes of the data and tokenizer of the run."""
        data = (read_json(self.environment) or {}).get("data")
        return data if isinstance(data, dict) else {}

    def read_sample(self) -> tuple[list[int], list[int]] | None:
        """Prompt and continuation, as token ids."""
        found = read_json(self.sample) or {}
        prompt, said = found.get("prompt"), found.get("sample")
        if not isinstance(prompt, list) or not isinstance(said, list):
            return None
        return (prompt, said) if said and all(isinstance(token, int) for token in prompt + said) else None

    def records(self) -> list[Path]:
        """What tells of the run when its weights and logs are gone."""
        kept = [
            self.config_file, self.metrics, self.timing, self.summary, self.environment, self.documents, self.answers,
            self.encoder, self.sample, self.tokenizer, self.audit,
        ]  # fmt: skip
        return [path for path in kept if path.is_file()]

    def finished(self) -> bool:
        return (self.read_summary() or {}).get("state") == "finished"

    def alive(self) -> bool:
        """Whether a process holds the run's lock."""
        return is_locked(self.lock)

    def holder(self) -> tuple[int | None, str]:
        """Process and machine that hold the run's lock: they wrote themselves there while holding it."""
        try:
            note = self.lock.read_text(errors="replace")
        except OSError:
            return None, ""
        found = re.match(r"pid (\d+) on ([^,]+)", note)
        return (int(found[1]), found[2]) if found else (None, "")

    def last_step(self) -> int:
        """Step of the newest checkpoint, by name alone."""
        return max((step for step, _ in self.checkpoints()), default=0)

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Step and folder of every checkpoint, by name alone; what is being replaced (.old) included."""
        return [(int(p.name[5:13]), p) for p in self.path.glob("step-*") if p.name[5:13].isdigit()]


@contextmanager
def claim(config: RunConfig, resume: bool) -> Iterator[RunFolder]:
    """Hold the run folder of `config` for one process; refuse it in one line if it is not free to use."""
    folder = RunFolder(config.folder)
    who = f"pid {os.getpid()} on {socket.gethostname()}, since {now()}"
    refusal = f"{folder.path} is in use by another run: wait for it, stop it, or choose another --out_dir"
    with ExitStack() as stack:
        with disk_errors(f"creating {folder.path}", "choose another place with --out_dir"):
            _refuse_foreign(folder)
            made = not folder.path.exists()
            folder.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_file(folder.lock, refusal, who))
        fresh = not folder.config_file.exists()
        try:
            with disk_errors(f"creating {folder.path}", "choose another place with --out_dir"):
                for litter in folder.path.glob(".*.tmp"):
                    litter.unlink()
                if fresh:
                    write_atomic(folder.config_file, config.to_toml())
                else:
                    _refuse_to_overwrite(folder, config, resume)
                folder.summary.unlink(missing_ok=True)
            yield folder
        except (SystemExit, KeyboardInterrupt):  # asked to leave before the training loop could say so itself
            if folder.config_file.exists() and not folder.summary.exists():
                end = {"state": "stopped", "reason": "asked to leave", "step": folder.last_step(), "ended": now()}
                write_json(folder.summary, end)
            raise
        except UserError:
            if fresh and not folder.last_step():
                folder.clear(made)  # refused before it began: as if it had never been tried
            raise


def _refuse_foreign(folder: RunFolder) -> None:
    if not folder.path.exists() or folder.config_file.exists():
        return
    if not folder.path.is_dir():
        raise UserError(f"{folder.path} is a file: choose another --out_dir")
    foreign = sorted(p.name for p in folder.path.iterdir() if not p.name.startswith(".") and p != folder.lock)
    if foreign and not folder.config_file.exists():  # another start may have written it just now
        raise UserError(f"{folder.path} holds other files ({foreign[0]}): choose a new or empty --out_dir")


def _refuse_to_overwrite(folder: RunFolder, config: RunConfig, resume: bool) -> None:
    if folder.finished():
        advice = "there is nothing left to resume" if resume else "choose another --out_dir"
        raise UserError(f"{folder.path} holds a finished run: {advice}")
    if not resume:
        raise UserError(unfinished(folder))
    before = folder.config()
    if before.processes != config.processes:
        launcher = f"torchrun --nproc_per_node={before.processes} -m oelm" if before.processes > 1 else "oelm"
        raise UserError(
            f"{folder.path} was started with {before.processes} processes, not {config.processes}: "
            f"resume it with {launcher} train --resume {folder.path}"
        )
    changed = folder.differs_from(config, {"processes"})
    if changed:
        raise UserError(
            f"{folder.path} was started with {changed}: "
            f"resume it with its own settings (oelm train --resume {folder.path}), or choose another --out_dir"
        )


def unfinished(folder: RunFolder) -> str:
    return (
        f"{folder.path} holds an unfinished run at step {folder.last_step():,} of {folder.config().max_steps:,}: "
        "add --resume to continue it, or choose another --out_dir"
    )
