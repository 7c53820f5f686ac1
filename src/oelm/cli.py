"""The command line: verbs to functions, nothing more. Imports torch only inside the verbs that need it."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, get_args

from oelm import __version__
from oelm.errors import RunFailed, Stopped, UserError, nearest

OVERVIEW = """\
Train small language models whose attention Query/Key projections are frozen at an orthogonal start,
and find out honestly what that costs.

  oelm demo                                          the whole story in five minutes, no download
  oelm prepare tinystories --from stories/           text to token files
  oelm train --model_type oelm_v2 --preset pocket    train one arm
  oelm run plans/pocket.toml                         a plan of many runs, queued and resumed
  oelm status                                        where they are
  oelm inspect --model_type oelm_v2                  parameters, FLOPs, memory, bounds
  oelm generate outputs/RUN --prompt "Once upon"     sample from a run
"""


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors and the nearest name for an unknown flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    argv = _with_underscores(list(sys.argv[1:] if arguments is None else arguments))
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, _leave)
    try:
        sys.exit(_run(argv))
    except UserError as error:
        if debug:
            raise
        print(f"oelm: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (OSError, UnicodeError, RecursionError, MemoryError) as error:
        if debug:
            raise
        what = " ".join(str(error).split()) or type(error).__name__
        print(f"oelm: error: {what} (--debug shows where)".encode(errors="replace").decode(), file=sys.stderr)
        sys.exit(2)


def _leave(number: int, frame: object) -> NoReturn:
    """SIGTERM unwinds like Ctrl-C, so that nothing half-written stays behind."""
    sys.exit(128 + number)


def _run(argv: list[str]) -> int:
    parser, verbs = _parsers()
    if not argv:
        parser.print_help()
        return 0
    if not argv[0].startswith("-") and argv[0] not in verbs:
        raise UserError(f"unknown verb {argv[0]}: {nearest(argv[0], verbs)}")
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        verb = verbs.get(getattr(known, "verb", None) or "", parser)
        flag = unknown[0].partition("=")[0]
        hint = nearest(flag, verb.flags()) if flag.startswith("--") else f"see {verb.prog} --help"
        raise UserError(f"unknown argument {unknown[0]}: {hint}")
    known.argv = argv
    return known.run(known) or 0


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(prog="oelm", description=OVERVIEW)
    parser.add_argument("--version", action="version", version=f"oelm {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    verbs = {}
    for name, build in VERBS.items():
        about = (build.__doc__ or "").partition("\n")
        verb = subparsers.add_parser(name, help=about[0], description=f"{about[0]}\n{_dedent(about[2])}")
        build(verb)
        verbs[name] = verb
    return parser, verbs


def _prepare_verb(parser: Parser) -> None:
    """Turn text into token files: data/NAME/{train,val,test}.bin.

    oelm prepare python-stdlib
    oelm prepare tinystories                                  (from the Hugging Face hub)
    oelm prepare tinystories --from TinyStories/ --tokenizer gpt2
    oelm prepare mine --from a.txt b.jsonl --tokenizer bpe:1024 --out data/mine-1k

    Files whose name has valid, val, dev or test in it are used as those splits; splits without a file
    are drawn from the training documents. No document ends up in two splits.
    """
    known = "tinystories, openwebtext, wikitext103, wikitext2, python-stdlib, or your own name with --from"
    held_out = "share of the documents to draw for each split without a file (default: 0.5 to 5 %%, about 4 MiB)"
    formats = "local files or folders: text, WikiText, JSONL, Parquet"
    parser.add_argument("name", metavar="NAME", help=known)
    parser.add_argument("--from", dest="sources", nargs="+", type=Path, default=[], metavar="PATH", help=formats)
    parser.add_argument("--tokenizer", metavar="gpt2|bpe:N|bytes", help="default gpt2; bpe:1024 for python-stdlib")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default data/NAME (or $OELM_DATA/NAME)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes; default: one per core")
    parser.add_argument("--held_out", type=float, metavar="SHARE", help=held_out)
    parser.add_argument("--force", action="store_true", help="replace token files of another tokenizer")
    parser.add_argument("--json", action="store_true", help="print meta.json instead of a table")
    parser.set_defaults(run=_prepare)


def _prepare(options: argparse.Namespace) -> None:
    from oelm.data.prepare import prepare
    from oelm.data.progress import progress_bar, show_meta

    with progress_bar(quiet=options.json) as progress:
        meta = prepare(
            options.name,
            options.sources,
            options.tokenizer,
            options.out,
            options.workers,
            options.force,
            options.held_out,
            progress,
        )
    if options.json:
        print(json.dumps(meta, indent=2, ensure_ascii=False))
    else:
        show_meta(meta, options.out)


def _train_verb(parser: Parser) -> None:
    """Train one arm into a run folder.

    oelm train --model_type baseline --dataset tinystories --max_lr 3e-4 --max_steps 100000 \\
               --out_dir outputs/GPT-01_baseline
    oelm train --preset pocket --model_type oelm_v2 --dataset python-stdlib
    oelm train settings.toml --seed 43
    oelm train --resume outputs/GPT-01_baseline
    torchrun --nproc_per_node=2 -m oelm train …

    Flags take dashes or underscores. Order: defaults < preset < arm < TOML file < flags.
    """
    parser.add_argument("config", nargs="?", type=Path, metavar="FILE.toml", help="settings, by the names of the flags")
    resume = "continue an unfinished run (RUN, or the one in --out_dir); auto: if there is one, else start"
    parser.add_argument("--resume", nargs="?", const="", metavar="RUN", help=resume)
    parser.usage = "oelm train [FILE.toml] [--resume [RUN]] [--SETTING VALUE ...]"
    _add_config_flags(parser)
    parser.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> int:
    from oelm.config import load_toml, resolve
    from oelm.train.folder import RunFolder, unfinished

    flags, resume = _given(options), options.resume is not None
    if options.resume and options.resume.endswith(".toml"):
        options.config = Path(options.resume)
    elif options.resume and options.resume != "auto":
        flags["out_dir"] = options.resume
        RunFolder(Path(options.resume)).config()
    file = load_toml(options.config) if options.config else {}
    folder = RunFolder(resolve(flags, file).folder)
    if resume and options.resume != "auto" and not folder.config_file.exists():
        raise UserError(f"{folder.path} holds no run to resume: leave --resume out to start one, or name its folder")
    held = folder.config_file.exists() and not folder.finished() and not folder.alive()
    if resume and folder.config_file.exists() and not options.config:
        file = {**load_toml(folder.config_file), "out_dir": str(folder.path)}
    alone = "RANK" not in os.environ and sys.stdin.isatty() and sys.stdout.isatty()
    if held and not resume and alone:
        print(unfinished(folder).partition(": add")[0])
        if not _yes("Continue it? [Y/n] "):
            print("left as it is")
            return 0
        resume = True

    from oelm.train.run import train

    try:
        other_data = any(flags.get(key, file.get(key)) != file.get(key) for key in ("dataset", "data_path"))
        vocab_is_set = "vocab_size" in flags or ("vocab_size" in file and not other_data)
        train(resolve(flags, file), resume, vocab_is_set)
    except Stopped as stop:
        return 128 + stop.number
    except RunFailed as error:
        print(f"oelm: the run failed: {error}", file=sys.stderr)
        return 1
    return 0


def _yes(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("", "y", "yes")
    except EOFError:
        return False


def _inspect_verb(parser: Parser) -> None:
    """Parameters, FLOPs, checkpoint size, memory, and the bound on what freezing can save.

    oelm inspect --model_type oelm_v2 --preset medium-512
    oelm inspect --model_type oelm_v2 --json
    oelm inspect --arms
    """
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--arms", action="store_true", help="list the arms")
    parser.add_argument("config", nargs="?", type=Path, metavar="FILE.toml|RUN", help="settings, or a run folder")
    _add_config_flags(parser)
    parser.usage = "oelm inspect [FILE.toml|RUN] [--json] [--arms] [--SETTING VALUE ...]"
    parser.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> None:
    from oelm.config import load_toml, resolve
    from oelm.inspect import show_arms, show_cost

    if options.arms:
        show_arms()
        return
    path = options.config
    file = load_toml(path / "config.toml" if path.is_dir() else path) if path else {}
    show_cost(resolve(_given(options), file), as_json=options.json)


def _generate_verb(parser: Parser) -> None:
    """Sample text from a run.

    oelm generate outputs/GPT-01_baseline --prompt "Once upon a time"
    oelm generate outputs/GPT-02_oelm_freeze --prompt "Lily" --temperature 0.8 --top_k 50 --seed 7
    """
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--prompt", default="", help="text to continue; empty: start a new document")
    parser.add_argument("--max_tokens", type=int, default=200, metavar="N", help="tokens to add (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0: the likeliest (0.8)")
    parser.add_argument("--top_k", type=int, default=0, metavar="K", help="only the K likeliest tokens; 0: all")
    parser.add_argument("--top_p", type=float, default=1.0, metavar="P", help="only the nucleus of mass P (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    parser.add_argument("--checkpoint", default="last", metavar="last|best|step-…", help="default last")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto")
    parser.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> None:
    if (
        not (options.temperature == 0 or 0.01 <= options.temperature < 1e6)
        or not 0 < options.top_p <= 1
        or options.top_k < 0
    ):
        raise UserError("temperature must be 0 or at least 0.01, top_p in (0, 1], top_k 0 or more")
    if not 0 < options.max_tokens <= 1_000_000 or not 0 <= options.seed < 2**63:
        raise UserError("max_tokens must be 1 to 1,000,000 and seed 0 or more")
    from oelm.train.folder import RunFolder

    RunFolder(options.run_dir).config()
    from oelm.generate import load_run, sample, stream_text

    model, tokenizer = load_run(
        options.run_dir, options.checkpoint, options.device, lambda line: print(line, file=sys.stderr)
    )
    prompt = [tokenizer.end_of_text, *tokenizer.encode(options.prompt)]
    ids = sample(model, prompt, options.max_tokens, options.temperature, options.top_k, options.top_p, options.seed)
    print(options.prompt, end="", flush=True)
    for text in stream_text(tokenizer, ids):
        print(text, end="", flush=True)
    print()


def _run_verb(parser: Parser) -> None:
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
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings for every run of the plan")
    parser.add_argument(
        "--gpus", metavar="auto|2,3", help="GPUs to use, each when nobody else does; default: CPU slots"
    )
    parser.add_argument("--slots", type=int, default=0, metavar="N", help="runs side by side; default: half the cores")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the run folders go; default: what the plan says")
    parser.add_argument("--detach", action="store_true", help="go on in the background, without this terminal")
    parser.add_argument("--on", choices=["here", "slurm"], default="here", help="default here")
    group = parser.add_argument_group("slurm")
    group.add_argument("--partition", metavar="NAME")
    group.add_argument(
        "--time", type=int, dest="minutes", metavar="MINUTES", help="time limit of a job; it is requeued"
    )
    group.add_argument("--gres", metavar="gpu:1")
    group.add_argument("--cpus", type=int, metavar="N", help="cores per job (default 1)")
    group.add_argument("--mem", metavar="8G")
    parser.set_defaults(run=_run_plan)


def _run_plan(options: argparse.Namespace) -> int:
    if not 0 <= options.slots <= 1024:
        raise UserError(f"--slots {options.slots}: take 1 to 1024")
    from oelm.lab import run
    from oelm.lab.plan import load_plan

    plan = load_plan(options.plan, options.out, **run.parse_overrides(options.set))
    if options.dry_run:
        run.show_dry_run(plan, options.only)
        return 0
    if options.on == "slurm":
        keys = ("partition", "minutes", "gres", "cpus", "mem")
        run.submit_plan(plan, options.only, {key: getattr(options, key) for key in keys})
        return 0
    if options.detach:
        log = Path(options.out or "outputs") / f"{options.plan.stem}.queue.log"
        run.detach([word for word in options.argv if word != "--detach"], log)
        return 0
    from oelm.lab.gpus import GpuPool, parse_gpus

    gpus = GpuPool(parse_gpus(options.gpus)) if options.gpus else None
    return 1 if run.run_plan(plan, options.only, options.slots, gpus) else 0


def _status_verb(parser: Parser) -> None:
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


def _logs_verb(parser: Parser) -> None:
    """Print a run's log.

    oelm logs outputs/GPT-01_baseline -f
    """
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as the run does")
    parser.set_defaults(run=_logs)


def _logs(options: argparse.Namespace) -> None:
    from oelm.lab.watch import show_log

    show_log(options.run_dir, options.follow)


def _stop_verb(parser: Parser) -> None:
    """Ask runs to save and leave.

    oelm stop outputs/GPT-01_baseline
    oelm stop --all              every run below outputs/
    """
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders; with --all, where to look")
    parser.add_argument("--all", action="store_true", help="every run below the given folders, or outputs/")
    parser.set_defaults(run=_stop)


def _stop(options: argparse.Namespace) -> None:
    from oelm.lab.watch import running_below, stop_runs

    if not options.runs and not options.all:
        raise UserError("which run? give its folder, or --all")
    if options.all:
        stop_runs([run for root in options.runs or [Path("outputs")] for run in running_below(root)])
    else:
        stop_runs(options.runs)


def _compare_verb(parser: Parser) -> None:
    """Compare the validation curves of runs, in a table and a chart.

    oelm compare outputs/GPT-01_baseline outputs/GPT-02_oelm_freeze
    """
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders; gaps are to the first")
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> None:
    from oelm.lab.watch import compare_runs

    compare_runs(options.runs)


def _demo_verb(parser: Parser) -> None:
    """The whole story on this machine: prepare, three arms x three seeds, verdict.

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

    demo(options.out, options.slots)


VERBS = {
    "prepare": _prepare_verb,
    "train": _train_verb,
    "run": _run_verb,
    "status": _status_verb,
    "logs": _logs_verb,
    "stop": _stop_verb,
    "compare": _compare_verb,
    "inspect": _inspect_verb,
    "generate": _generate_verb,
    "demo": _demo_verb,
}


def _add_config_flags(parser: Parser) -> None:
    """One flag per config field. Values stay text here: the config checks flags and TOML alike."""
    from oelm.arms import ARMS
    from oelm.config import GROUPS, PRESETS, RunConfig

    shown: set[str] = set()
    for fields in GROUPS:
        group = parser.add_argument_group((fields.__doc__ or "").lower())
        for name, field in fields.model_fields.items():
            if name in shown or name == "processes":  # torchrun's to set
                continue
            shown.add(name)
            default = RunConfig.model_fields[name].default
            about = (field.description or "").replace("%", "%%")
            about += f" [{default}]" if default not in ("", None) else ""
            options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": about}
            if field.annotation is bool:
                group.add_argument(f"--{name}", nargs="?", const="true", metavar="BOOL", **options)
                group.add_argument(f"--no_{name}", dest=name, action="store_const", const="false",
                                   default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # fmt: skip
                continue
            tables: dict[str, Iterable[str]] = {"model_type": ARMS, "preset": PRESETS}
            choices = tables.get(name, get_args(field.annotation))
            metavar = "|".join(choices) or getattr(field.annotation, "__name__", "X").upper()
            group.add_argument(f"--{name}", metavar=metavar, **options)


def _given(options: argparse.Namespace) -> dict[str, str]:
    """The config flags that were really given."""
    from oelm.config import RunConfig

    return {name: value for name, value in vars(options).items() if name in RunConfig.model_fields}


def _with_underscores(argv: list[str]) -> list[str]:
    """--max-lr=1 and --max_lr=1 are the same flag."""
    out = []
    for word in argv:
        flag, equals, value = word.partition("=")
        out.append(flag.replace("-", "_").replace("__", "--", 1) + equals + value if flag[:2] == "--" else word)
    return out


def _dedent(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.splitlines())
