"""`oelm bench`: arms and peers of one shape, interleaved; as a table, JSON, Markdown and a bar chart."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from oelm import encoders
from oelm.arms import ARMS
from oelm.bench import measure
from oelm.bench.measure import Interval
from oelm.bench.peers import check_peer, peer, version
from oelm.config import RunConfig, resolve
from oelm.errors import UserError, nearest, of_compiler
from oelm.files import write_atomic
from oelm.machine import tune
from oelm.model import cost
from oelm.model.build import build_model
from oelm.model.gpt import GPT
from oelm.train.classify import class_loss
from oelm.train.distributed import World
from oelm.train.step import Update
from oelm.train.task import Batch

PEERS = ("transformers", "published", "nanogpt")
SHAPES: dict[str, dict[str, Any]] = {
    "medium-512": dict(preset="medium-512", batch_size=4),
    "pocket": dict(preset="pocket"),
    "bert-base": dict(d_model=768, num_layers=12, num_heads=12, d_ff=3072, seq_len=128, vocab_size=1024, batch_size=8),
    "encoder": dict(labels=3, seq_len=128, batch_size=16),
}  # fmt: skip
"""bert-base: its blocks and width on 8 x 128 tokens, without an output head (the loss is taken of the last layer).
encoder: the one that --arch names, with a classifier."""
HEADLESS = frozenset({"bert-base"})
BUSY, BUSY_LOOK = 20, 1.0
"""Percent of the machine that other work may take before figures are said to mean little; seconds of looking."""
COMPILED = "+compile"
"""Behind a name: the same, compiled."""


@dataclass(frozen=True)
class Entry:
    name: str
    seconds: float
    """Median of a whole training step."""
    tokens_per_second: float
    of_peak: float
    """Arithmetic done per second, as a share of the GEMM peak of the same run; causal half of the attention only."""
    speedup: Interval
    """Over the first entry: the median of what it is in each round."""
    bound: float | None
    """Largest speed-up over the first entry that arithmetic allows; None for peers."""
    memory: int
    """Peak resident bytes over those before the first step."""
    repeats: list[float]
    """Seconds of every timed step."""


@dataclass(frozen=True)
class Contest:
    shape: str
    name: str
    """Of the shape, or of the encoder."""
    batch: str
    dropout: float
    threads: int
    launches: int
    repeats: int
    """Of every launch."""
    busy: float
    """Share of the machine, in percent, that other work took just before."""
    gemm_peak: float
    entries: list[Entry]
    machine: dict[str, str]
    command: str
    """What measures it again."""


def contender(name: str, config: RunConfig, headless: bool = False, nanogpt: Path | None = None) -> Callable[[], None]:
    """A whole training step of an arm or a peer, on the same random tokens for all."""
    batch, loss = example(config)
    if name.removesuffix(COMPILED) in PEERS:
        return _peer_step(name.removesuffix(COMPILED), config, nanogpt, batch)
    tune()
    loss = _headless_loss if headless else loss
    update = Update(build_model(config), config, World(0, 1, torch.device("cpu")), loss)
    turn = iter(range(10**9))

    def train() -> None:
        update.gradient(next(turn), [batch])
        update.apply(config.max_lr)

    return train


def _peer_step(name: str, config: RunConfig, nanogpt: Path | None, batch: Batch) -> Callable[[], None]:
    """What goes wrong in a peer is named as its own."""

    @contextmanager
    def named() -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            if of_compiler(error):
                raise
            raise UserError(f"the peer {name} failed: {type(error).__name__}: {error}") from error

    with named():
        step = peer(name, config, nanogpt)

    def train() -> None:
        with named():
            step(*batch)

    return train


def example(config: RunConfig) -> tuple[Batch, Callable[[nn.Module, Batch], Tensor]]:
    """A batch of random tokens, the same for all, and the loss of its kind of model."""
    chance = torch.Generator().manual_seed(0)
    windows = torch.randint(0, config.vocab_size, (config.batch_size, config.seq_len + 1), generator=chance)
    tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    if config.labels:
        return (tokens, torch.ones_like(tokens), torch.zeros_like(tokens), targets[:, 0] % config.labels), class_loss
    return (tokens, targets), lambda model, batch: model(*batch)


def _headless_loss(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, GPT)
    return model.hidden(batch[0]).square().mean()


def configure(shape: str, settings: dict[str, Any], arm: str = "baseline") -> RunConfig:
    if shape not in SHAPES:
        raise UserError(f"unknown shape {shape}: {nearest(shape, SHAPES)}")
    if shape == "encoder" and settings.get("arch", encoders.GPT) == encoders.GPT:
        raise UserError("shape encoder: say which one with --arch")
    return resolve({"dropout": 0.0, **SHAPES[shape], **settings, "model_type": arm})


def shape_for(settings: dict[str, Any]) -> str:
    """What to time if nothing is said of it."""
    return "encoder" if settings.get("arch", encoders.GPT) != encoders.GPT else "medium-512"


def arithmetic(config: RunConfig, shape: str, causal: bool) -> int:
    """FLOPs of a step: with the causal half of the attention or the whole square, and the head where there is one."""
    step = cost.flops(config, causal).step
    head = 6 * config.d_model * config.vocab_size if shape in HEADLESS else 0
    return (step - head) * config.tokens_per_step


def _configs(names: Sequence[str], shape: str, settings: dict[str, Any], nanogpt: Path | None) -> dict[str, RunConfig]:
    """What each of `names` is a step of; a name that cannot take part is refused."""
    configs, known = {}, [*ARMS, *PEERS]
    for name in names:
        plain, compiled = name.removesuffix(COMPILED), name.endswith(COMPILED)
        if plain not in known:
            hint = nearest(plain, [other + COMPILED for other in known] if "+" in plain else known)
            raise UserError(f"unknown arm or peer {plain}: {hint}")
        if plain in PEERS:
            if shape in HEADLESS or shape == "encoder":
                raise UserError(f"peers are language models: on {shape} only arms can be timed")
            check_peer(plain, nanogpt)
        if compiled and shape in HEADLESS:
            raise UserError(f"{shape} is timed without its head, and whole models are compiled: leave {COMPILED} out")
        arm = plain if plain in ARMS else "baseline"
        configs[name] = configure(shape, {**settings, "compile": compiled}, arm)
    return configs


def contest(
    names: Sequence[str], shape: str, settings: dict[str, Any], repeats: int, nanogpt: Path | None,
    tick: Callable[[str], None], command: str, launches: int = 1,
) -> Contest:  # fmt: skip
    """Time a training step of each of `names` (arms or peers), the first being what the others are compared with.

    Every one of the `launches` has processes of its own, and takes `repeats` steps of each.
    """
    configs = _configs(names, shape, settings, nanogpt)
    arms = [name for name in names if name.removesuffix(COMPILED) in ARMS]
    busy = psutil.cpu_percent(interval=BUSY_LOOK)
    products = measure.gemm()
    settle = len(arms) < len(names)  # peers give memory back, arms keep it
    found: list[dict[str, np.ndarray]] = []
    peaks = dict.fromkeys(names, 0)
    for _ in range(launches):
        with ExitStack() as stack:
            steps = {}
            for name, config in configs.items():
                process = measure.Apart(contender, name, config, shape in HEADLESS, nanogpt)
                steps[name] = stack.enter_context(process)
            found.append(measure.interleave(dict[str, Any](steps) | products, repeats, tick=tick, settle=settle))
            peaks = {name: max(peaks[name], step.memory()) for name, step in steps.items()}
    seconds = {name: np.concatenate([launch[name] for launch in found]) for name in found[0]}
    peak = measure.peak(products, seconds)
    config = configure(shape, settings)
    full = arithmetic(configs[names[0]], shape, causal=False)
    entries = []
    for name, own in configs.items():
        median = float(np.median(seconds[name]))
        entry = Entry(
            name,
            median,
            tokens_per_second=config.tokens_per_step / median,
            of_peak=arithmetic(own, shape, causal=True) / median / peak,
            speedup=measure.ratio(seconds[names[0]], seconds[name], launches),
            bound=full / arithmetic(own, shape, causal=False) if name in arms else None,
            memory=peaks[name],
            repeats=list(seconds[name]),
        )
        entries.append(entry)
    others = {name: told for name in configs if (told := version(name.removesuffix(COMPILED), nanogpt))}
    batch = f"{config.batch_size} x {config.seq_len}"
    name = config.arch if config.arch != encoders.GPT else shape
    return Contest(
        shape, name, batch, config.dropout, torch.get_num_threads(), launches, repeats, busy, peak, entries,
        measure.where(**others), command,
    )  # fmt: skip


HEADINGS = ["model", "ms", "tokens/s", "of peak", "speed-up", "theory", "MiB"]


def columns(found: Contest) -> tuple[list[str], list[list[str]]]:
    """Headings and rows, without columns that nothing stands in."""
    rows = [
        [
            entry.name,
            _significant(1000 * entry.seconds),
            _significant(entry.tokens_per_second),
            f"{entry.of_peak:.1%}",
            str(entry.speedup) if index else "1.000",
            f"{entry.bound:.3f}" if entry.bound is not None else "",
            f"{entry.memory / 2**20:,.0f}",
        ]
        for index, entry in enumerate(found.entries)
    ]
    used = [i for i in range(len(HEADINGS)) if any(row[i] for row in rows)]
    return [HEADINGS[i] for i in used], [[row[i] for i in used] for row in rows]


def _significant(value: float, digits: int = 4) -> str:
    """A number with so many digits and thousands separated."""
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(value)))}f}"


def caption(found: Contest) -> str:
    return (
        f"{found.name}{' without its head' if found.shape in HEADLESS else ''}, {found.batch} tokens a step, dropout "
        f"{found.dropout:g}, {_count(found.threads, 'thread')}; "
        f"{f'{found.launches} launches of ' * (found.launches > 1)}{_count(found.repeats, 'interleaved repeat')}; GEMM "
        f"peak {found.gemm_peak / 1e9:.1f} GFLOP/s in the same run; speed-up over {found.entries[0].name} in the "
        f"median round{', mean over the launches' * (found.launches > 1)}"
        + (
            f", in brackets one-sided {measure.CONFIDENCE:.0%} bounds"
            if found.repeats >= measure.LEAST_REPEATS
            else f" (bounds take {measure.LEAST_REPEATS} repeats)"
        )
        + (f". Other work took {found.busy:.0f} % of the machine: the figures mean little" * (found.busy > BUSY))
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def write(found: Contest, prefix: Path) -> list[Path]:
    """PREFIX.json, PREFIX.md and PREFIX.svg."""
    from oelm.report import figures, markdown
    from oelm.report.blocks import Code, Document, Figure, Table, Text

    shown = [(e.name, e.speedup.value, e.speedup.low, e.speedup.high, e.bound) for e in found.entries]
    svg = figures.speedups(shown, f"speed-up over {found.entries[0].name}", "theory")
    picture = prefix.with_name(prefix.name + ".svg")
    facts = ", ".join(f"{key} {value}" for key, value in found.machine.items())
    document = Document(
        prefix.name,
        caption(found),
        "en",
        "",
        "",
        [Table(*columns(found)), Figure(svg, "speed-up"), Code(found.command), Text(facts)],
    )
    texts = {
        prefix.with_name(prefix.name + ".json"): json.dumps(asdict(found), indent=2) + "\n",
        prefix.with_name(prefix.name + ".md"): markdown.render(document, [picture.name]),
        picture: svg,
    }
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_atomic(path, text.encode())
    return list(texts)
