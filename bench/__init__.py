"""Benchmarks of the project's own; each is a command: python -m bench.NAME --help."""

import argparse
import sys
from collections.abc import Callable

from oelm.bench.measure import where
from oelm.errors import UserError

PREPARED = "prepared tokens, e.g. by: oelm prepare tinystories --tokenizer bpe:1024 --out data/tinystories-bpe1024"


def run(main: Callable[[], None]) -> None:
    """Call it; bad input ends in one line."""
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")


def again(name: str, options: argparse.Namespace) -> str:
    """The command that measures it again and what it was measured on, for the end of what is written."""
    given = "".join(f" --{key} {value}" for key, value in vars(options).items() if key != "out")
    facts = ", ".join(f"{key} {value}" for key, value in where().items())
    return f"\n```\npython -m bench.{name}{given} --out PREFIX\n```\n\n{facts}\n"
