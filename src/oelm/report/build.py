"""`oelm report`: a study and its verdict as a document, written as HTML, Markdown, PDF and JSON."""

import json
import tomllib
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from oelm.errors import UserError
from oelm.files import disk_errors, write_atomic
from oelm.lab.announce import as_json
from oelm.lab.status import RunStatus
from oelm.lab.study import load_study
from oelm.lab.verdict import Verdict, reach_verdict
from oelm.machine import when
from oelm.report import html, markdown, typst
from oelm.report.blocks import Document
from oelm.report.content import compose
from oelm.report.words import Words

FORMATS = ("html", "md", "pdf", "json")


def write_report(
    root: Path,
    language: str,
    formats: list[str],
    out: Path | None = None,
    published: bool = False,
    baseline: str = "",
    criterion: float | None = None,
) -> list[Path]:
    """Write the report of the runs below `root` in the given formats; returns the files."""
    for name in formats:
        if name not in FORMATS:
            raise UserError(f"--format {name}: take some of {', '.join(FORMATS)}, joined by commas")
    verdict = reach_verdict(load_study(root, baseline, criterion))
    w = Words(language, verdict.study.score.name)
    document = compose(verdict, w, published_figures() if published else None)
    place = out or root
    reports = {place / f"report-{language}.{name}": name for name in FORMATS if name in formats}
    content: dict[Path, str | bytes] = {}
    lacking = None
    for path, name in reports.items():
        try:
            content |= _render(document, verdict, name, path)
        except UserError as error:  # no font for this one: the others can still be had
            lacking = error
    with disk_errors(f"writing the report to {place}", "free some space, or choose another place with --out"):
        place.mkdir(parents=True, exist_ok=True)
        for path, text in content.items():
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, text)
        for folder in {path.parent for path in content if path.parent != place}:
            for stale in set(folder.glob("*.svg")) - content.keys():
                stale.unlink()
    if lacking:
        written = ", ".join(str(path) for path in reports if path in content)
        raise UserError(f"{lacking}; written: {written}" if written else str(lacking)) from lacking
    return list(reports)


def _render(document: Document, verdict: Verdict, name: str, path: Path) -> dict[Path, str | bytes]:
    """The files of one format; the pictures that Markdown refers to come before it."""
    match name:
        case "html":
            return {path: html.render(document)}
        case "pdf":
            return {path: typst.render_pdf(document)}
        case "json":
            return {path: _numbers(verdict, document)}
    pictures = path.with_name(f"{path.stem}-figures")
    files = {pictures / f"{i:03d}.svg": figure.svg for i, figure in enumerate(document.figures())}
    return {**files, path: markdown.render(document, [f"{pictures.name}/{file.name}" for file in files])}


def _numbers(verdict: Verdict, document: Document) -> str:
    """The verdict and every run's settings, results and validation curve, for other programs."""
    runs = [
        {
            "id": run.id,
            "state": run.status.state,
            "config": run.config.model_dump(exclude={"out_dir", "data_path"}),
            "summary": {key: value for key, value in run.summary.items() if key != "data"},
            "val_loss": list(run.losses.items()),
        }
        for run in verdict.study.runs
    ]
    head = {"title": document.title, "about": document.subtitle}
    return (
        json.dumps({**head, **as_json(verdict, document.language), "runs": runs}, indent=1, ensure_ascii=False) + "\n"
    )


def published_figures() -> dict[str, dict[str, object]]:
    """The published results by run id."""
    return tomllib.loads((files("oelm.report") / "published.toml").read_text(encoding="utf-8"))


def append_status(root: Path, language: str) -> Path:
    """Add a dated entry on where every run is to the folder's log; returns the log."""
    study = load_study(root)
    w = Words(language, study.score.name)
    log = root / "status-log.md"
    lines = [f"- {markdown.plain(_status_line(status, w))}" for status in study.statuses]
    entry = f"## {w('log_entry', date=f'{datetime.now():%Y-%m-%d %H:%M}')}\n\n" + "\n".join(lines) + "\n"
    with disk_errors(f"writing {log}", "free some space"), open(log, "ab") as file:
        file.write((("\n" if file.tell() else "") + entry).encode())  # one write: two that append do not mix
    return log


def _status_line(s: RunStatus, w: Words) -> str:
    times = w("log_started", when=when(s.started)) if s.started else ""
    times += w("log_finished", when=when(s.finished)) if s.finished else ""
    ppl = w("log_ppl", ppl=s.val_ppl) if s.val_ppl is not None else ""
    ppl += w("log_accuracy", accuracy=s.val_accuracy) if s.val_accuracy is not None else ""
    gap = w("log_gap", gap=100 * s.gap) if s.gap is not None else ""
    return w("log_line", run=s.id, arm=s.arm or "–", state=w(f"state_{s.state}"), step=s.step, steps=s.max_steps,
             times=times, ppl=ppl, gap=gap)  # fmt: skip
