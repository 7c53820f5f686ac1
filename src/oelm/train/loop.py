"""The one training loop. It knows when to update, evaluate, save and stop; the task knows the rest."""

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from oelm.config import RunConfig
from oelm.errors import RunFailed, Stopped, UserError
from oelm.files import disk_errors, write_array
from oelm.model import freeze
from oelm.train import checkpoint
from oelm.train.audit import FreezeAudit
from oelm.train.clock import peak_memory, roughly
from oelm.train.console import Reporter
from oelm.train.distributed import World
from oelm.train.folder import RunFolder
from oelm.train.metrics import Metrics, cut_to, perplexity, whole_until
from oelm.train.optim import learning_rate, optimizer_tensors, restore_optimizer
from oelm.train.step import Update
from oelm.train.task import Interrupted, ReadAhead, Task


@dataclass
class State:
    """What a checkpoint holds besides tensors."""

    step: int = 0
    evaluated: bool = False
    """The evaluation due at this step is done and in the metrics."""
    best_loss: float | None = None
    best_step: int = 0
    elapsed: float = 0.0
    """Seconds of all parts of the run so far."""
    peak_memory: int = 0
    started: str = ""
    scaler: dict[str, Any] = field(default_factory=dict)
    frozen_hash: str = ""
    config_hash: str = ""
    """Of the settings that decide what is computed."""
    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: dict[str, Any], path: Path) -> "State":
        """A state read from a checkpoint; refused if a field is missing or of another type."""
        blank = asdict(cls())
        for name, default in blank.items():
            kinds = {"best_loss": float | int | None, "elapsed": float | int}.get(name, type(default))
            if not isinstance(values.get(name), kinds):
                raise UserError(f"{path / 'state.json'} is damaged: {name} is {values.get(name)!r}")
        return cls(**{name: values[name] for name in blank})


class StopRequest:
    """SIGTERM, SIGINT and Slurm's SIGUSR1 ask the loop to save and leave; asking twice changes nothing."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> bool:
        return self.number != 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number = number
            os.write(2, f"\n{signal.Signals(number).name}: finishing this step, then saving\n".encode())


class Trainer:
    def __init__(
        self, config: RunConfig, task: Task, world: World, folder: RunFolder, reporter: Reporter, started: str
    ) -> None:
        self.config, self.task, self.world, self.folder, self.reporter = config, task, world, folder, reporter
        self.stop = StopRequest()
        self.state = State(started=started, data=task.data.identity(), config_hash=config.identity())
        self.model = task.build_model().to(world.device)
        self.update = Update(self.model, config, world, task.loss)
        self._born = time.perf_counter()

    def run(self, resume: bool) -> State:
        """Train to the end; raises Stopped or RunFailed with the last good state on disk."""
        config, state = self.config, self.state
        if not (resume and self._restore()) and self.world.leads and self.update.stored_once:
            self._write_frozen()
        state.frozen_hash = freeze.fingerprint(self.model, self.update.stored_once)
        self._audit = FreezeAudit(self.folder.audit, self.model, writes=self.world.leads)
        if not self._audit.go_on(state.step, self.update.out(max(0, state.step - 1))):
            self.reporter.say(
                f"WARNING: {self.folder.audit} is damaged or missing: noted anew from step {state.step:,}"
            )
        self._before, self._saved = state.elapsed, state.step
        self.metrics = Metrics(self.folder.metrics) if self.world.leads else None
        read = ReadAhead(self.task.micro_batches, config.num_workers, config.max_steps - 1)
        try:
            with self.stop.listening(), self.reporter.bar(config.max_steps, state.step):
                self._announce_time()
                while True:
                    if self._evaluation_due():
                        self._evaluate()
                    elif state.step % config.save_interval == 0 and state.step != self._saved:
                        self._save()
                    if state.step >= config.max_steps:
                        return state
                    self._step(read)
        finally:
            read.close()
            if self.metrics:
                self.metrics.close()

    def _step(self, read: ReadAhead) -> None:
        """One update, or none: a stop or a loss that is not finite leaves before it."""
        config, state, world = self.config, self.state, self.world
        begin = time.perf_counter()
        rate = learning_rate(config, state.step)
        frozen = self.update.enter(state.step)
        if frozen is not None and not self._audit.note(state.step, frozen):
            self._fail(f"frozen parameters changed by step {state.step}")
        loss, norm = self.update.gradient(state.step, read(state.step))
        total, stops = world.sum(loss, float(self.stop()))
        mean = total / world.size
        if not math.isfinite(mean) or not (math.isfinite(norm) or self.update.scales):
            self._diverged(f"loss {mean:g}, gradient norm {norm:g} at step {state.step + 1}")
        self.update.apply(rate)
        state.step, state.evaluated = state.step + 1, False
        self._record(mean, rate, norm, time.perf_counter() - begin)
        if stops:
            self._leave()

    def _record(self, loss: float, rate: float, norm: float, seconds: float) -> None:
        config, state = self.config, self.state
        if self.metrics:
            norm_or_none = norm if math.isfinite(norm) else None
            self.metrics.write("train", state.step, loss=loss, lr=rate, grad_norm=norm_or_none, seconds=seconds)
        count, unit = (config.windows_per_step, "ex/s") if config.labels else (config.tokens_per_step, "tok/s")
        speed = f"{count / seconds:,.0f} {unit}"
        best = ""
        if state.best_loss is not None:
            labelled = config.labels
            best = f"best val {'loss' if labelled else 'ppl'} " + (
                f"{state.best_loss:.4f}" if labelled else f"{perplexity(state.best_loss):.2f}"
            )
        self.reporter.advance(state.step, f"loss {loss:.4f}  {speed}  {best}")
        interval = min(config.log_interval, max(1, config.max_steps // 20))
        if state.step % interval == 0 or state.step == 1:
            self.reporter.say(
                f"step {state.step:,}/{config.max_steps:,} | loss {loss:.4f} | lr {rate:.3g} | "
                f"grad norm {norm:.3f} | {speed}"
            )

    def _evaluation_due(self) -> bool:
        state, config = self.state, self.config
        at_interval = state.step > 0 and state.step % config.val_interval == 0
        return not state.evaluated and (at_interval or state.step == config.max_steps)

    def _evaluate(self) -> None:
        """Validate (and at the end test), then save: the metrics of a checkpoint's step always stand before it."""
        state = self.state
        ends = state.step == self.config.max_steps and self.config.use_test
        splits = ["val", *(["test"] if ends and "test" in self.task.data.splits else [])]
        self.model.eval()
        for split in splits:
            begin = time.perf_counter()
            self.reporter.waits_for(f"evaluating the {split} split …")
            try:
                with self.update.autocast():
                    found = self.task.evaluate(self.model, split, self.stop)
            except Interrupted:
                self._leave()
            values = found.values
            if not math.isfinite(values["loss"]):
                self._diverged(f"{split} loss {values['loss']:g} at step {state.step}")
            if self.metrics:
                self.metrics.write(split, state.step, **values, seconds=time.perf_counter() - begin)
                for path, rows in ((self.folder.documents, found.documents), (self.folder.answers, found.answers)):
                    if split == "test" and rows is not None:
                        write_array(path, rows)
            if split == "val" and (state.best_loss is None or values["loss"] < state.best_loss):
                state.best_loss, state.best_step = values["loss"], state.step
            figures = {key: value for key, value in values.items() if key not in ("tokens", "examples")}
            shown = " | ".join(f"{key} {value:.4f}" for key, value in figures.items())
            self.reporter.say(f"{split} at step {state.step:,} | {shown}")
        state.evaluated = True
        self._save()
        if state.step < self.config.max_steps and self.world.any(self.stop()):
            raise Stopped(self.stop.number or signal.SIGTERM)

    def _save(self) -> None:
        """Checkpoint the run, frozen tensors excepted: they must still be what they were at the start."""
        state, config = self.state, self.config
        state.elapsed = self._before + time.perf_counter() - self._born
        state.peak_memory = max(state.peak_memory, peak_memory(self.world.device))
        state.scaler = self.update.scaler.state_dict()
        whole = freeze.fingerprint(self.model, self.update.stored_once) == state.frozen_hash
        if not (whole and self._audit.holds()):
            self._fail(f"frozen parameters changed by step {state.step}")
        self._saved = state.step
        if not (self.world.leads and self.metrics):
            return
        self.metrics.flush(sync=True)
        last = self.folder.last_step()
        go_on = f"continue with oelm train --resume {self.folder.path}; the last good checkpoint is step {last:,}"
        advice = f"free some space, then {go_on if last else 'start again'}"
        with disk_errors(f"saving step {state.step:,}", advice):
            weights = {name: p for name, p in self.model.named_parameters() if name not in self.update.stored_once}
            moments = optimizer_tensors(self.model, self.update.optimizer)
            path = checkpoint.save(self.folder, state.step, weights, moments, asdict(state))
            if state.best_step == state.step:
                checkpoint.link(self.folder.best, path)
            checkpoint.prune(self.folder, config.save_interval, config.keep_saves)

    def _restore(self) -> bool:
        """Continue from the newest whole checkpoint; False: there is none yet, and the run begins."""
        whole = whole_until(self.folder.metrics)
        if whole < self.folder.last_step():
            self.reporter.say(f"WARNING: {self.folder.metrics} is whole only up to step {whole:,}: going back to there")
        found = checkpoint.newest(self.folder, self.reporter.say, at_most=whole)
        step = found.state["step"] if found else 0
        if self.world.from_leader(step) != step:
            raise UserError(f"the processes see different checkpoints in {self.folder.path}: is it on a shared disk?")
        if self.world.leads:
            checkpoint.sweep(self.folder)
            checkpoint.set_aside(self.folder, step)
            cut_to(self.folder.metrics, step, evaluated=bool(found and found.state["evaluated"]))
        if found is None:
            self.reporter.say("no checkpoint to go on from: starting from step 0")
            return False
        before = State.from_json(found.state, found.path)
        if before.data != json.loads(json.dumps(self.state.data)):  # first: they may decide the number of steps
            _refuse_other_data(before.data, self.state.data)
        if before.config_hash != self.state.config_hash:
            raise UserError(f"{self.folder.config_file} was edited since {found.path.name}: put the old settings back")
        checkpoint.give_weights(self.model, found, self.folder, self.config)
        self.update.stand_before(step)
        restore_optimizer(self.model, self.update.optimizer, found.optimizer)
        self.state.__dict__.update(before.__dict__)
        if self.state.scaler:
            self.update.scaler.load_state_dict(self.state.scaler)
        if self.world.leads:
            checkpoint.point_at(self.folder, found, self.state.best_step)
        self.reporter.say(f"resumed from {found.path} at step {step:,}")
        return True

    def _write_frozen(self) -> None:
        with disk_errors(f"writing {self.folder.frozen}", "free some space and start again"):
            tensors = {name: p for name, p in self.model.named_parameters() if name in self.update.stored_once}
            temporary = self.folder.frozen.with_name(".frozen.tmp")
            checkpoint.write_tensors(temporary, tensors)
            temporary.replace(self.folder.frozen)

    def _announce_time(self) -> None:
        """Time one micro-batch, without an update, and say how long the run will take."""
        config, state = self.config, self.state
        left = config.max_steps - state.step
        if not left:
            return
        batches = self.task.micro_batches(state.step)
        self.update.parallel.train()
        for _ in range(2):  # the first pass warms up, or compiles
            begin = time.perf_counter()
            self.update.backward(batches[0], 1, sync=True).item()
            seconds = time.perf_counter() - begin
            if self.world.any(seconds > 5) and not config.compile:  # all or none: a pass is a collective one
                break
        self.update.forget()
        self.reporter.say(
            f"expected time: about {roughly(seconds * len(batches) * left)} for {left:,} steps, and the validations"
        )

    def _leave(self) -> NoReturn:
        """Save and stop, as asked by a signal to this process or another."""
        number = self.stop.number or signal.SIGTERM
        self._save()
        raise Stopped(number)

    def _diverged(self, reason: str) -> NoReturn:
        self._fail(f"{reason}: stopped before the update", " (a lower --max_lr or a longer --warmup_steps often helps)")

    def _fail(self, reason: str, advice: str = "") -> NoReturn:
        last = self.folder.last_step()
        raise RunFailed(f"{reason}; the last good checkpoint is step {last:,}{advice}", retry="never")


def _refuse_other_data(before: dict[str, Any], now: dict[str, Any]) -> NoReturn:
    if before.get("tokenizer_hash") != now.get("tokenizer_hash"):
        raise UserError(
            f"the data's tokenizer ({now['tokenizer']}, {now['tokenizer_hash'][:8]}) is not the checkpoint's "
            f"({before.get('tokenizer')}, {str(before.get('tokenizer_hash'))[:8]}): prepare the data as before"
        )
    raise UserError("the data are not those that the run was started on: give the old --data_path")
