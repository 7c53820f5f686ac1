"""Where a report comes from: the published figures beside ours, and the commands that make it again."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from oelm import encoders
from oelm.data.sources import prepare_command
from oelm.data.tokens import data_root, read_meta
from oelm.errors import UserError
from oelm.lab.outcome import Run
from oelm.lab.score import ACCURACY, PERPLEXITY, Score
from oelm.lab.stats import INCONCLUSIVE
from oelm.lab.verdict import Verdict
from oelm.report.blocks import Block, Code, Heading, Table, Text
from oelm.report.words import Words


def published(verdict: Verdict, w: Words, published: Mapping[str, Mapping[str, Any]]) -> Iterator[Block]:
    """The published figures of the study's kind beside the runs whose id, or folder, begins with theirs."""
    yield Heading(w("published"))
    rows, score = [], verdict.study.score
    scores = {key: _published_score(figure, score) for key, figure in published.items() if _FIGURE[score] in figure}
    for key, found in scores.items():
        figure = published[key]
        run = next((run for run in verdict.study.runs if run.folder.path.name.startswith(key)), None)
        other = scores.get(str(figure.get("against")))
        gap = f"{score.said(found - other)} {w('unit')}" if other else "–"
        mine = w("not_run")
        if run is not None:
            final = run.score("val")
            shown = run.measure.text(final) if final < math.inf else w(f"state_{run.status.state}")
            mine = shown + "".join(w("in_brackets", text=text) for text in [_other_settings(run, figure)] if text)
        rows.append(
            [key, figure["dataset"], figure["arm"], f"{figure['max_lr']:g}", f"{figure['steps']:,}",
             f"{figure['ppl']:.4f}" if score is PERPLEXITY else score.text(found), gap,
             INCONCLUSIVE if other else "–", mine]
        )  # fmt: skip
    keys = ("run", "setting", "arm", "rate", "axis_steps", "published_ppl", "published_gap", "judged", "ours")
    yield Table([w(key) for key in keys], rows)
    yield Text(w("published_note"))


_FIGURE = {PERPLEXITY: "ppl", ACCURACY: "accuracy"}


def _published_score(figure: Mapping[str, Any], score: Score) -> float:
    return math.log(figure["ppl"]) if score is PERPLEXITY else score.from_record(figure["accuracy"])


def _other_settings(run: Run, figure: Mapping[str, Any]) -> str:
    """What a run does otherwise than the published one of its name."""
    mine = {"dataset": run.config.dataset, "arm": run.config.model_type, "max_lr": run.config.max_lr,
            "steps": run.config.max_steps}  # fmt: skip
    alike = {"dataset": str(figure["dataset"]).lower().replace("-", "")}
    return ", ".join(f"{key} {value}" for key, value in mine.items() if value != alike.get(key, figure[key]))


def reproduce(verdict: Verdict, w: Words, options: str = "") -> Iterator[Block]:
    study = verdict.study
    yield Heading(w("reproduce"))
    parts = [run.environment[-1] for run in study.runs if run.environment]
    if parts:
        facts = {key: ", ".join(sorted({str(part.get(key))[:12] for part in parts if part.get(key)})) or "?"
                 for key in ("oelm", "git", "torch", "python")}  # fmt: skip
        yield Text(w("reproduce_text", version=facts["oelm"], commit=facts["git"], device=_devices(parts, w),
                     torch=facts["torch"], python=facts["python"]))  # fmt: skip
    for command, known in dict.fromkeys(_preparation(run) for run in study.runs):
        if not known:
            yield Text(w("prepared_how"))
        yield Code(command)
    root = study.root.resolve()
    home = root.relative_to(Path.cwd()) if root.is_relative_to(Path.cwd()) else Path("outputs") / root.name
    for plan in study.plans:
        place = home / plan.out.relative_to(study.root)
        yield Code(f"oelm run {quote(plan.name)}.toml --out {quote(str(place))}")
        yield Text(f"{plan.name}.toml:")
        yield Code(plan.text().rstrip())
    if not study.plans:
        runs = [(quote(run.id), quote(str(home / run.id))) for run in study.runs]
        yield Code("\n".join(f"oelm train {name}/config.toml --out_dir {place}" for name, place in runs))
    yield Code(f"oelm report {quote(str(home))} --lang {w.language}{_asked(verdict)}{options}")
    for setting in study.settings:
        data: Mapping[str, Any] = setting.values["data"]
        source, tokenizer = str(data.get("source_hash", ""))[:16], str(data.get("tokenizer_hash", ""))[:16]
        yield Text(w("hashes", setting=setting.name, source=source or "?", tokenizer=tokenizer or "?"))


def _asked(verdict: Verdict) -> str:
    """The flags without which the verdict would be another: what is usual, or stands in the plans, needs none."""
    study = verdict.study
    planned = study.plans[0] if study.plans else None
    usual = planned.criterion if planned and planned.criterion is not None else study.score.criterion
    criterion = f" --criterion {study.criterion:g}" if study.criterion != usual else ""
    known = planned.baseline if planned else "baseline"
    return (f" --baseline {quote(study.baseline)}" if study.baseline != known else "") + criterion


def _preparation(run: Run) -> tuple[str, bool]:
    """What its data were made with, as the run says, or the data themselves where they lie here; else what is usual,
    and False."""
    said = (run.environment or [{}])[-1].get("prepared")
    if said:
        return str(said), True
    path = Path(run.config.data_path) if run.config.data_path else data_root() / run.config.dataset
    with suppress(UserError):
        meta = read_meta(path) or {}
        if meta.get("command") and meta["source_hash"] == run.data.get("source_hash"):
            return str(meta["command"]), True
    place = str(path) if run.config.data_path and not path.is_absolute() else f"data/{run.config.dataset}"
    labels = tuple(map(str, run.data.get("labels", [])))
    return prepare_command(run.config.dataset, _tokenizer(run), place, labels), False


def _tokenizer(run: Run) -> str:
    name = str(run.data.get("tokenizer", ""))
    return name if name != "encoder" else run.config.arch if encoders.is_pretrained(run.config.arch) else "ENCODER"


def _devices(parts: list[dict[str, Any]], w: Words) -> str:
    return "; ".join(sorted({f"{p.get('device_name')}{w('threads', n=p.get('threads'))}" for p in parts}))
