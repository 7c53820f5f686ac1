"""Verbs about many runs: run, status, logs, stop, compare, verdict, report, pack, demo."""

import argparse
import time
from pathlib import Path

from oelm.cli.parser import Parser
from oelm.errors import UserError


def run_verb(parser: Parser) -> None:
    """Work through a plan of runs: queued, resumed, retried; here or on Slurm.

    oelm run plans/phase3.toml --dry-run                     what it would do, and what is missing
    oelm run plans/phase3.toml --gpus auto --detach          whenever a shared GPU is free
    oelm run plans/phase3.toml --only GPT-01,GPT-02 --gpus 2,3
    oelm run plans/phase3.toml --only GPT-01 --set max_steps=30 --out outputs/try
    oelm run plans/pocket.toml --slots 2                     two side by side on the CPU
    oelm run plans/phase3.toml --on slurm --partition gpu --time 720 --gres gpu:1

    Finished runs are skipped, unfinished ones resumed: the same command goes on where it was.
    """
    parser.add_argument("plan", type=Path, metavar="PLAN.toml", help="see plans/ for examples")
    parser.add_argument("--dry_run", action="store_true", help="check and print everything, start nothing")
    parser.add_argument("--only", default="", metavar="ID,ID", help="only these runs")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="settings for every run of the plan"
    )
    parser.add_argument(
        "--gpus", metavar="auto|2,3", help="GPUs to use, each when nobody else does; default: CPU slots"
    )
    parser.add_argument("--slots", type=int, metavar="N", help="runs side by side; default: half the cores")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the run folders go; default: what the plan says")
    parser.add_argument("--detach", action="store_true", help="go on in the background, without this terminal")
    parser.add_argument("--on", choices=["here", "slurm"], default="here", help="default here")
    group = parser.add_argument_group("slurm")
    group.add_argument("--partition", metavar="NAME")
    group.add_argument("--time", type=int, metavar="MINUTES", help="time limit of a job; it is requeued")
    group.add_argument("--gres", metavar="gpu:1")
    group.add_argument("--cpus", type=int, metavar="N", help="cores per job (default 1)")
    group.add_argument("--mem", metavar="8G")
    parser.set_defaults(run=_run_plan)


SLURM_ONLY, HERE_ONLY = ("partition", "time", "gres", "cpus", "mem"), ("gpus", "slots", "detach")
"""Options of one place."""


def _run_plan(options: argparse.Namespace) -> int:
    foreign, advice = (HERE_ONLY, "for runs here") if options.on == "slurm" else (SLURM_ONLY, "for --on slurm")
    for key in foreign:
        if getattr(options, key) not in (None, False):
            raise UserError(f"--{key} is {advice}")
    if options.slots is not None and not 1 <= options.slots <= 1024:
        raise UserError(f"--slots {options.slots}: take 1 to 1024")
    from oelm.lab import run
    from oelm.lab.plan import load_plan

    plan = load_plan(options.plan, options.out, run.parse_overrides(options.set))
    from oelm.lab.gpus import GpuPool, parse_gpus

    wanted = parse_gpus(options.gpus) if options.gpus is not None else None
    if options.dry_run:
        run.show_dry_run(plan, options.only)
        return 0
    if options.on == "slurm":
        run.submit_plan(plan, options.only, {key: getattr(options, key) for key in SLURM_ONLY})
        return 0
    if options.detach:
        log = Path(options.out or "outputs") / f"{options.plan.stem}.queue.log"
        run.detach([word for word in options.argv if word != "--detach"], log)
        return 0
    gpus = GpuPool(wanted) if options.gpus is not None else None
    return 1 if run.run_plan(plan, options.only, options.slots or 0, gpus) else 0


def status_verb(parser: Parser) -> None:
    """Where the runs are: step, time left, loss, gap to the baseline at the same step.

    oelm status                  runs below outputs/
    oelm status DIR --watch      again every second
    oelm status DIR --json
    """
    parser.add_argument("folder", nargs="?", type=Path, default=Path("outputs"), metavar="DIR", help="default outputs/")
    parser.add_argument("--watch", action="store_true", help="refresh every second until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_status)


def _status(options: argparse.Namespace) -> None:
    from oelm.lab.watch import show_status

    show_status(options.folder, options.watch, options.json)


def logs_verb(parser: Parser) -> None:
    """Print a run's log.

    oelm logs outputs/GPT-01_baseline -f
    """
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as the run does")
    parser.set_defaults(run=_logs)


def _logs(options: argparse.Namespace) -> None:
    from oelm.lab.watch import show_log

    show_log(_existing(options.run_dir), options.follow)


def stop_verb(parser: Parser) -> None:
    """Ask runs to save and leave.

    oelm stop outputs/GPT-01_baseline
    oelm stop --all              every run and queue below outputs/
    """
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders; with --all, where to look")
    parser.add_argument("--all", action="store_true", help="every run below the given folders, or outputs/")
    parser.set_defaults(run=_stop)


def _stop(options: argparse.Namespace) -> None:
    from oelm.lab.watch import stop_everything, stop_runs

    if not options.runs and not options.all:
        raise UserError("which run? give its folder, or --all")
    if options.all:
        stop_everything(options.runs or [Path("outputs")])
    else:
        stop_runs([_existing(run) for run in options.runs])


def _existing(run: Path) -> Path:
    """A run folder, or the name that `oelm status` shows for one below outputs/."""
    below = Path("outputs") / run
    return below if not run.exists() and below.exists() else run


def compare_verb(parser: Parser) -> None:
    """Compare the validation curves of runs, in a table and a chart.

    oelm compare outputs/GPT-01_baseline outputs/GPT-02_oelm_freeze
    """
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders; gaps are to the first")
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> None:
    from oelm.lab.compare import compare_runs

    compare_runs([_existing(run) for run in options.runs])


def verdict_verb(parser: Parser) -> None:
    """Judge a folder of runs: is an arm with frozen Q/K within 5 % of its baseline?

    oelm verdict outputs/pocket
    oelm verdict outputs/pocket --json

    Exit code: 0 PASS (some frozen arm passes), 1 FAIL (every one fails), 3 INCONCLUSIVE; of an unfinished
    plan, what the finished runs say so far.
    """
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of run folders")
    _rule_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_verdict)


def _rule_flags(parser: Parser) -> None:
    """What to judge by, where it is not what the plan says."""
    ratio = "largest ratio of perplexities that passes, or points of accuracy lost; default: the plan's, or 1.05 and 1"
    parser.add_argument("--baseline", default="", metavar="ARM", help="default: what the plan says, or baseline")
    parser.add_argument("--criterion", type=float, metavar="X", help=ratio)


def _verdict(options: argparse.Namespace) -> int:
    from oelm.lab.announce import show_verdict
    from oelm.lab.study import load_study

    return show_verdict(load_study(options.folder, options.baseline, options.criterion), options.json)


def report_verb(parser: Parser) -> None:
    """Write the report of a folder of runs, in English or Chinese.

    oelm report outputs/pocket
    oelm report outputs/pocket --lang zh --format html,md,pdf
    oelm report outputs --against published      beside the published figures
    oelm report outputs --update                 a dated entry on where every run is, in status-log.md
    """
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of run folders")
    parser.add_argument("--lang", default="en", metavar="en|zh", help="default en")
    parser.add_argument("--format", metavar="html,md,pdf,json", help="default html")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the report goes; default: DIR itself")
    _rule_flags(parser)
    parser.add_argument("--against", choices=["published"], help="add the published figures")
    parser.add_argument("--update", action="store_true", help="only append to the folder's status-log.md")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    from oelm.report.build import append_status, write_report

    if options.update:
        if options.format or options.out or options.against:
            raise UserError("--update only appends to DIR/status-log.md: leave --format, --out and --against out")
        print(append_status(options.folder, options.lang))
        return
    formats = [name for name in (options.format or "html").split(",") if name]
    published = options.against == "published"
    for path in write_report(
        options.folder, options.lang, formats, options.out, published, options.baseline, options.criterion
    ):
        print(path)


def pack_verb(parser: Parser) -> None:
    """Put the finished runs of a folder into one small file, without weights, logs and host names.

    oelm pack outputs/pocket results/pocket/runs.tar.xz
    tar xf results/pocket/runs.tar.xz          and back into outputs/pocket: oelm report and oelm run go on from there
    """
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of run folders")
    parser.add_argument("file", type=Path, metavar="FILE.tar.xz", help="replaced if it exists")
    parser.set_defaults(run=_pack)


def _pack(options: argparse.Namespace) -> None:
    from oelm.lab.pack import pack

    count, others = pack(options.folder, options.file)
    left = f"; {others} that are not finished, or not whole, were left out" if others else ""
    print(f"{options.file}: {count} runs, {options.file.stat().st_size / 2**10:,.0f} KiB{left}")


def demo_verb(parser: Parser) -> None:
    """The whole story on this machine: prepare, three arms x three seeds, verdict, report.

    oelm demo
    oelm demo --out demo --slots 2
    """
    parser.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help="default demo/")
    parser.add_argument(
        "--slots", type=int, default=0, metavar="N", help="runs side by side; default: cores, at most 4"
    )
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> None:
    from oelm.lab.demo import demo
    from oelm.report.build import write_report

    begin = time.monotonic()
    runs = demo(options.out, options.slots)
    (path,) = write_report(runs, "en", ["html"], options.out)
    print(f"\n{time.monotonic() - begin:.0f} s in all. The report: {path}   The runs: {runs}")
