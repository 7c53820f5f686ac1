"""`oelm demo`: prepare, three arms x three seeds, verdict, on text that every machine has."""

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from oelm.data.prepare import prepare
from oelm.data.progress import progress_bar
from oelm.data.tokens import read_meta
from oelm.errors import UserError
from oelm.files import write_atomic
from oelm.lab.plan import Plan, load_plan
from oelm.lab.queue import Queue
from oelm.lab.status import LabWatcher
from oelm.lab.verdict import ArmResult, as_rows, compare_arms
from oelm.lab.watch import make_console, watching
from oelm.machine import cores

DEMO_PLAN = Path(__file__).with_name("demo.toml")
HELD_OUT = 0.02
"""Share of the files drawn for each of val and test: enough to judge by, quick to evaluate."""


def demo(out: Path, slots: int = 0) -> None:
    """Run the shipped demo plan in `out`, print the table and leave it there as summary.md."""
    if slots < 0 or slots > 64:
        raise UserError(f"--slots {slots}: take 1 to 64")
    console = make_console()
    begin = time.monotonic()
    data = out / "data" / "python-stdlib"
    if not (data.is_dir() and read_meta(data)):
        console.print("Preparing the text: the source of this Python's standard library")
        with progress_bar() as progress:
            prepare("python-stdlib", [], None, data, held_out=HELD_OUT, progress=progress)
    plan = load_plan(DEMO_PLAN, out / "runs", data_path=str(data))
    slots = slots or min(4, cores())
    todo = sum(not run.folder.finished() for run in plan.runs)
    if todo < len(plan.runs):
        console.print(f"{len(plan.runs) - todo} of {len(plan.runs)} runs are already finished in {out}")
    if todo:
        console.print(f"Training {todo} runs, {slots} side by side (Ctrl-C saves; the same command goes on)")
        say = (lambda line: None) if sys.stdout.isatty() else console.print
        with watching(console, LabWatcher(out, [run.folder.path for run in plan.runs])) as watch:
            failures = Queue(plan, slots, say=say).run(watch)
        for name, reason in failures.items():
            console.print(f"run {name} failed: {reason}", style="red")
    results = compare_arms(plan)
    _show(console, results, plan)
    summary = out / "summary.md"
    write_atomic(summary, _markdown(results, plan))
    console.print(f"\n{time.monotonic() - begin:.0f} s in all. The table: {summary}   The runs: {out / 'runs'}")


def _show(console: Console, results: list[ArmResult], plan: Plan) -> None:
    headings, rows = as_rows(results)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=heading in ("arm", "verdict", "gap to baseline [95 %]"))
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)
    console.print()
    for line in _sentences(results, plan):
        console.print(line)


def _sentences(results: list[ArmResult], plan: Plan) -> list[str]:
    """What the table allows to say, and what it does not."""
    seeds = len(results[0].perplexities)
    config = plan.runs[0].config
    lines = []
    for r in results[1:]:
        assert r.gap
        bar = f"{plan.criterion - 1:.0%}"
        side = "worse than the baseline, but" if r.gap.low > 0 else "better, but" if r.gap.high < 0 else "uncertain:"
        means = {
            "PASS": f"its perplexity is less than {bar} above the baseline's",
            "FAIL": f"its perplexity is more than {bar} above the baseline's",
            "INCONCLUSIVE": f"{side} whether by more than {bar} these data do not tell",
        }
        lines.append(f"{r.arm}: {r.gap.verdict}: {means[r.gap.verdict]} (n = {r.gap.n}, test split, final step).")
    lines.append(
        "The interval is two-sided; the verdict is a one-sided t test at 95 %, with Holm's correction for several arms."
    )
    lines.append("Step times were measured beside other runs: take them as rough.")
    lines.append(
        f"A demonstration of the method: {seeds} seeds, {config.max_steps * config.tokens_per_step:,} tokens, one "
        f"learning rate ({config.max_lr:g}) for all arms. Runs this short say little about longer ones."
    )
    lines.append(
        "baseline and oelm_random start Q/K at std 0.02, oelm_v2 at 1/sqrt(d_model): their differences mix scale, "
        "freezing and orthogonality. The controls of equal scale are orthogonal (trained) and oelm_matched (frozen)."
    )
    return lines


def _markdown(results: list[ArmResult], plan: Plan) -> str:
    headings, rows = as_rows(results)
    lines = ["# oelm demo", "", "| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", *(f"- {line}" for line in _sentences(results, plan)), ""]
    return "\n".join(lines) + "\n"
