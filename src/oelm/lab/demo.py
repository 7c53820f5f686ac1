"""`oelm demo`: prepare, three arms x three seeds, verdict, on text that every machine has."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from oelm.data.prepare import prepare
from oelm.data.progress import progress_bar
from oelm.data.tokens import read_meta
from oelm.errors import UserError
from oelm.files import write_atomic
from oelm.lab.plan import Plan, load_plan
from oelm.lab.queue import run_queue
from oelm.lab.status import status
from oelm.lab.verdict import ArmResult, as_rows, compare_arms
from oelm.machine import cores

DEMO_PLAN = Path(__file__).with_name("demo.toml")
HELD_OUT = 0.02
"""Share of the files drawn for each of val and test: enough to judge by, quick to evaluate."""


def demo(out: Path, slots: int = 0) -> None:
    """Run the shipped demo plan in `out`, print the table and leave it there as summary.md."""
    if slots < 0 or slots > 64:
        raise UserError(f"--slots {slots}: take 1 to 64")
    console = Console(highlight=False)
    begin = time.monotonic()
    data = out / "data" / "python-stdlib"
    if not (data.is_dir() and read_meta(data)):
        console.print("Preparing the text: the source of this Python's standard library")
        with progress_bar() as progress:
            prepare("python-stdlib", [], None, data, held_out=HELD_OUT, progress=progress)
    plan = load_plan(DEMO_PLAN, out / "runs", data_path=str(data))
    slots = slots or min(4, cores())
    todo = sum(status(run.config).state != "finished" for run in plan.runs)
    if todo < len(plan.runs):
        console.print(f"{len(plan.runs) - todo} of {len(plan.runs)} runs are already finished in {out}")
    if todo:
        console.print(f"Training {todo} runs, {slots} side by side (Ctrl-C saves; the same command goes on)")
        with _watching(console, plan) as watch:
            failures = run_queue(plan, slots, watch)
        for name, reason in failures.items():
            console.print(f"run {name} failed: {reason}", style="red")
    results = compare_arms(plan)
    _show(console, results, plan)
    summary = out / "summary.md"
    write_atomic(summary, _markdown(results, plan))
    console.print(f"\n{time.monotonic() - begin:.0f} s in all. The table: {summary}   The runs: {out / 'runs'}")


@contextmanager
def _watching(console: Console, plan: Plan) -> Iterator[Callable[[], None]]:
    """A live table on a terminal; a line when a run starts or ends elsewhere."""
    if sys.stdout.isatty():
        with Live(_progress_table(plan), console=console, refresh_per_second=2) as live:
            yield lambda: live.update(_progress_table(plan))
            live.update(_progress_table(plan))
        return
    last: dict[str, str] = {}

    def lines() -> None:
        for run in plan.runs:
            now = status(run.config)
            if last.get(run.id, "waiting") != now.state:
                ppl = f", val PPL {now.val_ppl:.2f}" if now.val_ppl and now.state == "finished" else ""
                console.print(f"  {run.id}: {now.state}{ppl}")
            last[run.id] = now.state

    yield lines
    lines()


def _progress_table(plan: Plan) -> Table:
    table = Table("run", "state", box=None, header_style="bold", pad_edge=False)
    for heading in ("step", "", "loss", "val PPL"):
        table.add_column(heading, justify="right" if heading else "left")
    for run in plan.runs:
        now, steps = status(run.config), run.config.max_steps
        done = round(20 * now.step / steps)
        style = {"finished": "green", "running": "bold", "failed": "red", "died": "red"}.get(now.state, "dim")
        table.add_row(
            run.id,
            now.state,
            f"{now.step}/{steps}",
            "━" * done + "·" * (20 - done),
            f"{now.loss:.3f}" if now.loss else "",
            f"{now.val_ppl:.2f}" if now.val_ppl else "",
            style=style,
        )
    return table


def _show(console: Console, results: list[ArmResult], plan: Plan) -> None:
    headings, rows = as_rows(results)
    table = Table(*headings, box=None, header_style="bold", pad_edge=False)
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
        means = {
            "PASS": f"is shown to be within {plan.criterion} x the baseline's perplexity",
            "FAIL": f"is shown to be worse than {plan.criterion} x the baseline's perplexity",
            "INCONCLUSIVE": f"cannot be told apart from {plan.criterion} x the baseline's perplexity",
        }
        lines.append(f"{r.arm}: {r.gap.verdict}, it {means[r.gap.verdict]} (n = {r.gap.n}, test split, final step).")
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
    lines.append("Step times were measured while other runs were going on beside; take them as rough.")
    return "\n".join(lines) + "\n"
