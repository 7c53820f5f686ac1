"""Verbs about speed: bench and profile."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from oelm.cli.parser import Parser, add_config_flags, config_of
from oelm.errors import UserError

ALLOCATOR = ("GLIBC_TUNABLES", "LD_PRELOAD")
"""Variables that give every contender, peers too, another allocator: what was measured is said with them."""


def bench_verb(parser: Parser) -> None:
    """Time training steps of arms and peers, interleaved, against each other and against the machine's limit.

    oelm bench                                             the arms on medium-512
    oelm bench baseline oelm_sliced --shape bert-base
    oelm bench baseline frozen oelm_v2 --arch ENCODER/
    oelm bench baseline transformers published --dropout 0.1
    oelm bench baseline nanogpt --nanogpt ../nanoGPT --out results/bench-medium
    oelm bench baseline baseline+compile nanogpt+compile --shape pocket --nanogpt ../nanoGPT

    Each contender is a process of its own. All take one step, then all take the next; the first is what the others
    are compared with. Where there are only arms, each works a quarter of a second in turn; beside a peer steps are
    whole, each behind an untimed one. Memory is the peak over what was resident before the first step. With +compile
    behind its name a contender goes through torch.compile.

    medium-512 is the published model, pocket the laptop's, each with its output head. bert-base has the blocks and
    width of BERT-base on 128 tokens and no head: its loss is the mean square of the last layer. --arch times an
    encoder with its classifier.
    """
    names = "arms (see oelm inspect --arms) and peers (transformers, published, nanogpt)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    shapes = "default medium-512; encoder with --arch"
    parser.add_argument("--shape", metavar="medium-512|pocket|bert-base|encoder", help=shapes)
    parser.add_argument("--arch", metavar="ENCODER", help="time an encoder with a classifier: folder, name, bert-base")
    parser.add_argument("--batch_size", type=int, metavar="N", help="windows a step; default: the shape's")
    parser.add_argument("--seq_len", type=int, metavar="N", help="tokens in a window; default: the shape's")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P", help="default 0")
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="steps of each (default 30)")
    launches = "start all anew so many times, each with all repeats: a process may be lucky with its memory (default 1)"
    parser.add_argument("--launches", type=int, default=1, metavar="N", help=launches)
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads; 0: all cores")
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT to compare with")
    parser.add_argument("--out", type=Path, metavar="PREFIX", help="write PREFIX.json, PREFIX.md and PREFIX.svg")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> None:
    if options.repeats < 1 or options.launches < 1 or options.threads < 0:
        raise UserError("repeats and launches must be 1 or more and threads 0 or more")
    names = list(dict.fromkeys(options.names)) or ["baseline", "oelm_v2", "oelm_sliced"]
    from dataclasses import asdict

    import torch
    from rich.console import Console

    from oelm.bench.contest import BUSY, caption, columns, configure, contest, shape_for, write
    from oelm.bench.measure import GEMM_SIZES, GEMM_WAYS, WARMUP
    from oelm.machine import threads_for
    from oelm.tables import table

    torch.set_num_threads(threads_for(options.threads))
    given = {key: getattr(options, key) for key in ("dropout", "batch_size", "seq_len", "arch")}
    settings = {key: value for key, value in given.items() if value is not None}
    shape = options.shape or shape_for(settings)
    configure(shape, settings)
    if options.out:
        _writable(options.out)
    command = "".join(f"{key}={os.environ[key]} " for key in ALLOCATOR if os.environ.get(key))
    command += f"oelm bench {' '.join(names)} --shape {shape} --repeats {options.repeats}"
    command += "".join(f" --{key} {value}" for key, value in (settings | {"threads": options.threads}).items() if value)
    command += f" --launches {options.launches}" if options.launches > 1 else ""
    command += " --nanogpt DIR" if options.nanogpt else ""
    command += " --out PREFIX" if options.out else ""
    contenders = len(names) + len(GEMM_SIZES) * len(GEMM_WAYS)
    turns = options.launches * contenders * (options.repeats + WARMUP)
    with _ticking("starting", turns, quiet=options.json) as tick:
        found = contest(names, shape, settings, options.repeats, options.nanogpt, tick, command, options.launches)
    if options.json and found.busy > BUSY:
        print(f"other work took {found.busy:.0f} % of the machine: the figures mean little", file=sys.stderr)
    if options.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        headings, rows = columns(found)
        Console(highlight=False).print(table(headings, rows, wrap=False), f"\n{caption(found)}")
    if options.out:
        for path in write(found, options.out):
            if not options.json:
                print(path)


def profile_verb(parser: Parser) -> None:
    """Where the time and memory of a training step go, by part of the model.

    oelm profile --preset medium-512 --batch_size 4
    oelm profile outputs/GPT-01_baseline --trace trace.json     (open it in chrome://tracing or Perfetto)
    """
    parser.add_argument("config", nargs="?", type=Path, metavar="FILE.toml|RUN", help="settings, or a run folder")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps to average over (default 3)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="also write a Chrome trace")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_config_flags(parser)
    parser.usage = "oelm profile [FILE.toml|RUN] [--steps N] [--trace FILE] [--json] [--SETTING VALUE ...]"
    parser.set_defaults(run=_profile)


def _profile(options: argparse.Namespace) -> None:
    if options.steps < 1:
        raise UserError("steps must be 1 or more")
    config = config_of(options)
    if config.compile:
        raise UserError("a compiled model has no parts to tell apart: take --no_compile (oelm bench times ARM+compile)")
    from dataclasses import asdict

    import torch
    from rich.console import Console

    from oelm.bench.profile import profile_step
    from oelm.machine import threads_for
    from oelm.tables import table

    torch.set_num_threads(threads_for(config.threads))
    if options.trace:
        _writable(options.trace)
    with _ticking("profiling", options.steps + 1, quiet=options.json) as tick:
        parts = profile_step(config, options.steps, options.trace, tick)
    whole = sum(part.seconds for part in parts)
    if options.json:
        facts = dict(config=config.model_dump(), threads=torch.get_num_threads(), steps=options.steps, seconds=whole)
        print(json.dumps(facts | {"parts": [asdict(part) for part in parts]}, indent=2))
        return
    rows = [
        [part.name, f"{1000 * part.forward:,.1f}", f"{1000 * part.backward:,.1f}", f"{part.seconds / whole:.1%}",
         f"{part.kept / 2**20:,.1f}" if part.kept > 0 else ""]
        for part in sorted(parts, key=lambda part: -part.seconds)
    ]  # fmt: skip
    batch = f"{config.batch_size} x {config.seq_len}"
    title = (
        f"{config.model_type} at {config.preset}, {batch} tokens a step: {1000 * whole:,.1f} ms, the profiler's own "
        f"time included.{'' if config.labels else ' Head and loss make their gradients in the forward pass.'}"
    )
    headings = ("part", "forward ms", "backward ms", "share", "kept MiB")
    Console(highlight=False).print(table(headings, rows, wrap=False), f"\n{title}")
    if options.trace:
        print(options.trace)


def _writable(path: Path) -> None:
    """Refuse a place that cannot be written to before anything is measured for it."""
    if not path.name or path.is_dir() or (path.exists() and not path.is_file()):
        raise UserError(f"{path} is no name for a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write to {path.parent}: {error.strerror}") from None


@contextmanager
def _ticking(what: str, steps: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar over `steps`; before each it is told what is done now."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    shown = "step {task.completed} of {task.total}"
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(shown), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=quiet) as bar:
        task = bar.add_task(what, total=steps)
        yield lambda now: bar.update(task, advance=1, description=now)
