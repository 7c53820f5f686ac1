"""One page per run: what it was, how it went, what it says."""

from collections.abc import Callable, Iterator
from pathlib import Path

from oelm.config import RunConfig
from oelm.data.tokenizer import load_tokenizer
from oelm.errors import UserError
from oelm.lab.outcome import Run
from oelm.machine import when
from oelm.report import figures
from oelm.report.blocks import Block, Code, Figure, Heading, Notice, PageBreak, Text
from oelm.report.words import Words
from oelm.train.clock import spoken

LEFT_OUT = {"out_dir", "data_path"}
"""Settings that say where, not what."""


def run_pages(runs: list[Run], w: Words) -> Iterator[Block]:
    for i, run in enumerate(runs):
        if i:
            yield PageBreak()
        yield Heading(run.id, 3)
        if not run.finished:
            where = run.status.reason or f"{run.status.step:,} / {run.config.max_steps:,}"
            yield Notice(f"{w(f'state_{run.status.state}')}: {where}")
        else:
            yield from _outcome(run, w)
        train = [(r["step"], r["loss"]) for r in run.records["train"]]
        if train:
            picture = figures.run_curve(train, sorted(run.losses.items()), w("axis_steps"))
            yield Figure(picture, w("run_curve"), wide=False)
        speech = _sample(run)
        if speech:
            yield Text(w("sample_text"))
            yield Code(speech)
        yield Text(w("config_text"))
        yield Code(_changed(run.config))


def _outcome(run: Run, w: Words) -> Iterator[Block]:
    summary = run.summary
    shown = run.measure.shown
    test = w("run_test", ppl=shown(run.score("test"))) if run.has_test else ""
    best = shown(min(run.curve.values()))
    yield Text(w("run_result", val=shown(run.score("val")), test=test, best=best,
                 best_step=min(run.curve, key=lambda step: run.curve[step])))  # fmt: skip
    device = (run.environment or [{}])[-1].get("device_name", "?")
    yield Text(w("run_time", started=when(summary.get("started")), seconds=spoken(summary["wall_seconds"]),
                 ms=1000 * summary["median_step_seconds"], memory=summary["peak_memory_bytes"] / 2**20,
                 device=device))  # fmt: skip


def _changed(config: RunConfig) -> str:
    default = RunConfig()
    lines = [
        f"{key} = {value}"
        for key, value in config.model_dump().items()
        if key not in LEFT_OUT and (value != getattr(default, key) or key in ("model_type", "seed", "max_lr"))
    ]
    return "\n".join(lines)


def _sample(run: Run) -> str:
    """The run's own words; as token numbers where its vocabulary is not here."""
    ids = run.folder.read_sample()
    if not ids:
        return ""
    prompt, said = ids
    decode = _decoder(run.data.get("tokenizer", ""), run.data.get("tokenizer_hash", ""), run.folder.path)
    if decode is None or not all(0 <= token < run.config.vocab_size for token in prompt + said):
        return " ".join(map(str, prompt)) + " | " + " ".join(map(str, said))
    return f"{decode(prompt)}|{decode(said)}"


_decoders: dict[str, Callable[[list[int]], str] | None] = {}


def _decoder(name: str, identity: str, place: Path) -> Callable[[list[int]], str] | None:
    """The tokenizer of a run, loaded once for all runs that share it."""
    if identity not in _decoders:
        try:
            _decoders[identity] = load_tokenizer(name, place).decode
        except (UserError, OSError, ValueError):
            _decoders[identity] = None
    return _decoders[identity]
