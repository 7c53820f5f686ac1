"""`oelm demo`: prepare, three arms x three seeds, verdict, on text that every machine has."""

from pathlib import Path

from oelm.data.prepare import prepare
from oelm.data.progress import progress_bar
from oelm.data.tokens import read_meta
from oelm.errors import UserError
from oelm.lab.announce import print_verdict
from oelm.lab.plan import load_plan
from oelm.lab.queue import Queue
from oelm.lab.status import LabWatcher
from oelm.lab.study import load_study
from oelm.lab.verdict import reach_verdict
from oelm.lab.watch import make_console, watching
from oelm.machine import cores

DEMO_PLAN = Path(__file__).with_name("demo.toml")
HELD_OUT = 0.02
"""Share of the files drawn for each of val and test: enough to judge by, quick to evaluate."""


def demo(out: Path, slots: int = 0) -> Path:
    """Run the shipped demo plan in `out` and print the verdict; returns the folder of the runs."""
    if slots < 0 or slots > 64:
        raise UserError(f"--slots {slots}: take 1 to 64")
    console = make_console()
    data = out / "data" / "python-stdlib"
    if not (data.is_dir() and read_meta(data)):
        console.print("Preparing the text: the source of this Python's standard library")
        with progress_bar() as progress:
            prepare("python-stdlib", [], None, data, held_out=HELD_OUT, progress=progress)
    plan = load_plan(DEMO_PLAN, out / "runs", {"data_path": str(data)})
    plan.leave_copy()
    slots = slots or min(4, cores())
    todo = sum(not run.folder.finished() for run in plan.runs)
    if todo < len(plan.runs):
        console.print(f"{len(plan.runs) - todo} of {len(plan.runs)} runs are already finished in {out}")
    if todo:
        console.print(f"Training {todo} runs, {slots} side by side (Ctrl-C saves; the same command goes on)")
        with watching(console, LabWatcher(out, plan.runs)) as watch:
            failures = Queue(plan, slots, say=console.print).run(watch)
        for name, reason in failures.items():
            console.print(f"run {name} failed: {reason}", style="red")
    console.print()
    print_verdict(reach_verdict(load_study(plan.out)), console)
    return plan.out
