"""`oelm report`: a study and its verdict as a document, written as HTML, Markdown, PDF and JSON."""

import json
import tomllib
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from oelm.errors import UserError
from oelm.files import write_atomic
from oelm.lab.status import RunStatus
from oelm.lab.study import load_study
from oelm.lab.verdict import Verdict, as_json, reach_verdict
from oelm.report import html, markdown, typst
from oelm.report.blocks import Document
from oelm.report.content import compose
from oelm.report.pages import when
from oelm.report.words import Words

FORMATS = ("html", "md", "pdf", "json")


def write_report(
    root: Path, language: str, formats: list[str], out: Path | None = None, published: bool = False
) -> list[Path]:
    """Write the report of the runs below `root` in the given formats; returns the files."""
    for name in formats:
        if name not in FORMATS:
            raise UserError(f"--format {name}: take some of {', '.join(FORMATS)}, joined by commas")
    verdict = reach_verdict(load_study(root))
    document = compose(verdict, Words(language), published_figures() if published else None)
    place = out or root
    place.mkdir(parents=True, exist_ok=True)
    written = []
    for name in [n for n in FORMATS if n in formats]:
        path = place / f"report-{language}.{name}"
        write_atomic(path, _numbers(verdict) if name == "json" else _render(document, name, path))
        written.append(path)
    return written


def _render(document: Document, name: str, path: Path) -> str | bytes:
    if name == "html":
        return html.render(document)
    if name == "pdf":
        return typst.render_pdf(document)
    pictures = path.with_name(f"{path.stem}-figures")
    pictures.mkdir(exist_ok=True)
    names = []
    for i, figure in enumerate(document.figures()):
        write_atomic(pictures / f"{i:03d}.svg", figure.svg)
        names.append(f"{pictures.name}/{i:03d}.svg")
    return markdown.render(document, names)


def _numbers(verdict: Verdict) -> str:
    """The verdict and every run's settings, results and validation curve, for other programs."""
    runs = [
        {
            "id": run.id,
            "state": run.status.state,
            "config": run.config.model_dump(exclude={"out_dir", "data_path"}),
            "summary": {key: value for key, value in run.summary.items() if key != "data"},
            "val_loss": list(run.curve.items()),
        }
        for run in verdict.study.runs
    ]
    return json.dumps({**as_json(verdict), "runs": runs}, indent=1, ensure_ascii=False) + "\n"


def published_figures() -> dict[str, dict[str, object]]:
    """The published results by run id."""
    return tomllib.loads((files("oelm.report") / "published.toml").read_text(encoding="utf-8"))


def append_status(root: Path, language: str) -> Path:
    """Add a dated entry on where every run is to the folder's log; returns the log."""
    study, w = load_study(root), Words(language)
    log = root / "status-log.md"
    before = log.read_text(encoding="utf-8") if log.exists() else ""
    lines = [f"- {markdown.plain(_status_line(status, w))}" for status in study.statuses]
    entry = f"## {w('log_entry', date=f'{datetime.now():%Y-%m-%d %H:%M}')}\n\n" + "\n".join(lines) + "\n"
    write_atomic(log, before + ("\n" if before else "") + entry)
    return log


def _status_line(s: RunStatus, w: Words) -> str:
    times = w("log_started", when=when(s.started)) if s.started else ""
    times += w("log_finished", when=when(s.finished)) if s.finished else ""
    ppl = w("log_ppl", ppl=s.val_ppl) if s.val_ppl is not None else ""
    gap = w("log_gap", gap=100 * s.gap) if s.gap is not None else ""
    return w("log_line", run=s.id, arm=s.arm or "–", state=s.state, step=s.step, steps=s.max_steps,
             times=times, ppl=ppl, gap=gap)  # fmt: skip
