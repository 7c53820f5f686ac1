"""The command line: verbs to functions, nothing more. Imports torch only inside the verbs that need it."""

import inspect
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from oelm import __version__
from oelm.cli import lab, model, speed
from oelm.cli.parser import Parser, with_underscores
from oelm.errors import UserError, nearest
from oelm.machine import wait_politely

OVERVIEW = """\
Train small language models whose attention Query/Key projections are frozen at an orthogonal start,
and find out honestly what that costs.

  oelm demo                                          the whole story in five minutes, no download
  oelm prepare tinystories --from stories/           text to token files
  oelm train --model_type oelm_v2 --preset pocket    train one arm
  oelm run plans/pocket.toml                         a plan of many runs, queued and resumed
  oelm status                                        where they are
  oelm verdict outputs/pocket                        does an arm pass?
  oelm report outputs/pocket --lang zh               the report, in Chinese or English
  oelm pack outputs/pocket runs.tar.xz               keep the runs without their weights
  oelm inspect --model_type oelm_v2                  parameters, FLOPs, memory, bounds
  oelm generate outputs/RUN --prompt "Once upon"     sample from a run
  oelm predict outputs/RUN --text "A fine film."     classify with a run
  oelm bench baseline oelm_sliced                    training steps, timed side by side
  oelm profile --preset pocket                       where a step's time goes
"""


INTERNAL = 70
"""Exit code of an error that nobody expected (EX_SOFTWARE); 1 would say FAIL."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    argv = with_underscores(list(sys.argv[1:] if arguments is None else arguments))
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    wait_politely()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without arrows shows the rest
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
    except Exception as error:
        if debug:
            raise
        expected = isinstance(error, OSError | UnicodeError | RecursionError | MemoryError)
        what = " ".join(str(error).split()) or type(error).__name__
        what = what if expected else f"this should not happen ({type(error).__name__}: {what})"
        print(f"oelm: error: {what} (--debug shows where)".encode(errors="replace").decode(), file=sys.stderr)
        sys.exit(2 if expected else INTERNAL)


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
        about = inspect.getdoc(build) or ""
        verb = subparsers.add_parser(name, help=about.partition("\n")[0].replace("%", "%%"), description=about)
        build(verb)
        verbs[name] = verb
    return parser, verbs


VERBS = {
    "prepare": model.prepare_verb,
    "train": model.train_verb,
    "run": lab.run_verb,
    "status": lab.status_verb,
    "logs": lab.logs_verb,
    "stop": lab.stop_verb,
    "compare": lab.compare_verb,
    "verdict": lab.verdict_verb,
    "report": lab.report_verb,
    "pack": lab.pack_verb,
    "inspect": model.inspect_verb,
    "generate": model.generate_verb,
    "predict": model.predict_verb,
    "bench": speed.bench_verb,
    "profile": speed.profile_verb,
    "demo": lab.demo_verb,
}
