"""`oelm profile`: where the time and memory of a training step go, by part of the model.

Every module's forward pass is a named range of torch's profiler, and so is every stage of the halves of a block that
are one operation. An operation belongs to the innermost range around it; one of the backward pass that has none
belongs where the forward operation with its sequence number did.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from oelm import policy
from oelm.bench.contest import example
from oelm.config import RunConfig
from oelm.errors import UserError
from oelm.machine import tune
from oelm.model import halves
from oelm.model.build import build_model
from oelm.train.distributed import World, pick_device
from oelm.train.step import Update

RANGE = "part: "
BACKWARD = "autograd::engine::evaluate_function: "
OTHER = "everything else"


@dataclass
class Part:
    name: str
    forward: float = 0.0
    backward: float = 0.0
    """Seconds of one step."""
    kept: int = 0
    """Bytes allocated in the forward pass and not freed in it."""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def profile_step(
    config: RunConfig, steps: int = 3, trace: Path | None = None, tick: Callable[[str], None] = lambda what: None
) -> list[Part]:
    """Profile `steps` whole training steps on random tokens; parts in the order in which they first run."""
    tune()
    device = pick_device(config.device)
    model = build_model(config, device)
    whole, loss = example(config)
    update = Update(model, config, World(0, 1, device), loss)
    batches = list(zip(*(part.split(config.micro_batch or config.batch_size) for part in whole), strict=True))
    tick("warming up")
    update.gradient(0, batches)
    update.apply(config.max_lr)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with ExitStack() as ranges, _hushed(), profile(activities=activities, profile_memory=True) as found:
        _name_parts(model, ranges)
        for step in range(1, steps + 1):
            tick("profiling")
            with record_function(RANGE + "gradient norm and clipping"):
                update.gradient(step, batches)
            with record_function(RANGE + "optimizer"):
                update.apply(config.max_lr)
    if trace is not None:
        _export(found, trace)
    return _by_part(list(found.events() or []), steps)


def _export(found: profile, trace: Path) -> None:
    """The profiler says nothing when it cannot write: what it wrote is looked at before it gets its name."""
    unchecked = trace.with_name(f".{trace.name}.{os.getpid()}.json")
    try:
        with _hushed():
            found.export_chrome_trace(str(unchecked))
        if not (unchecked.exists() and unchecked.read_bytes().rstrip().endswith(b"}")):
            raise UserError(f"{trace} could not be written: is the disk full?")
        unchecked.replace(trace)
    finally:
        for left in (unchecked, unchecked.with_name(unchecked.name + ".tmp")):
            left.unlink(missing_ok=True)


@contextmanager
def _hushed() -> Iterator[None]:
    """Without what the profiler's C++ writes to standard error about itself."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _name_parts(model: nn.Module, ranges: ExitStack) -> None:
    """Put a range around every module's forward pass and every stage of a block's halves, until `ranges` closes.

    The hooks are on all modules there are, and on none of these: with hooks of their own, halves would be taken apart.
    """
    current = ExitStack()

    def stage(name: str | None) -> None:
        current.close()
        if name is not None:
            current.enter_context(record_function(RANGE + name))

    ranges.callback(setattr, halves, "stage", halves.stage)
    halves.stage = stage
    labels = {
        module: RANGE + part_of(name) for name, module in model.named_modules() if not isinstance(module, nn.Identity)
    }
    stack: list[Any] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        if module in labels:
            stack.append(record_function(labels[module]))
            stack[-1].__enter__()

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        if module in labels:
            stack.pop().__exit__(None, None, None)

    ranges.callback(register_module_forward_pre_hook(enter).remove)
    ranges.callback(register_module_forward_hook(leave).remove)


def part_of(module: str) -> str:
    """What a module's own operations, outside its children, are called."""
    if not module:
        return "output head and loss"
    weight, last = f"{module}.weight", module.rpartition(".")[2].lower()
    if last.endswith("norm"):
        return "norms"
    for part in ("q", "k", "v", "o"):
        if policy.matches(part, weight):
            return f"attention {part}"
    for part in ("ffn", "embeddings"):
        if policy.matches(part, weight):
            return part
    return {
        "attention": "attention weights",
        "self": "attention weights",
        "mixing": "attention extras",
        "dropout": "dropout",
        "pooler": "pooler and classifier",
        "classifier": "pooler and classifier",
    }.get(last, "residual stream")


def _by_part(events: list[Any], steps: int) -> list[Part]:
    home: dict[int, str] = {}
    for event in events:
        name = _range(event)
        if name and event.sequence_nr >= 0 and not _backward_node(event):
            home[event.sequence_nr] = name
    parts: dict[str, Part] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        node = _backward_node(event)
        name = _range(event, node) or (home.get(node.sequence_nr, OTHER) if node else OTHER)
        part = parts.setdefault(name, Part(name))
        seconds = _self_seconds(event) / steps
        if node:
            part.backward += seconds
        else:
            part.forward += seconds
            part.kept += event.self_cpu_memory_usage
    for part in parts.values():
        part.kept = round(part.kept / steps)
    return list(parts.values())


def _range(event: Any, within: Any = None) -> str | None:
    """The innermost range around an event, or the event's own; only such as lie in `within`, if anything."""
    while event is not within and not event.name.startswith(RANGE):
        event = event.cpu_parent
    return event.name.removeprefix(RANGE) if event is not within else None


def _backward_node(event: Any) -> Any:
    """The step of the backward pass that an event belongs to, if any."""
    while event is not None and not event.name.startswith(BACKWARD):
        event = event.cpu_parent
    return event


def _self_seconds(event: Any) -> float:
    """On a GPU the kernels' time, else the operation's own."""
    on_gpu = getattr(event, "self_device_time_total", 0) or 0
    return (on_gpu or event.self_cpu_time_total) / 1e6
