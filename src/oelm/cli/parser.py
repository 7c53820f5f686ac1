"""The parser: one-line errors, flags with dashes or underscores, one flag per config field."""

import argparse
import re
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from oelm.errors import UserError

if TYPE_CHECKING:
    from oelm.config import RunConfig


class Help(argparse.RawDescriptionHelpFormatter):
    """Sentences are wrapped to the terminal; examples and tables, which begin with oelm or have columns, are not."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = textwrap.dedent(text).strip().split("\n\n")
        raw = [paragraph.startswith("oelm ") or "  " in paragraph for paragraph in paragraphs]
        filled = [p if keep else textwrap.fill(p, width) for p, keep in zip(paragraphs, raw, strict=True)]
        return "\n\n".join(filled)


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors and the nearest name for an unknown flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=Help, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]


def add_config_flags(parser: Parser) -> None:
    """One flag per config field. Values stay text here: the config checks flags and TOML alike."""
    from oelm.arms import ARMS
    from oelm.config import PRESETS, RunConfig
    from oelm.fields import GROUPS

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


def given_settings(options: argparse.Namespace) -> dict[str, str]:
    """The config flags that were really given."""
    from oelm.config import RunConfig

    return {name: value for name, value in vars(options).items() if name in RunConfig.model_fields}


def config_of(options: argparse.Namespace) -> "RunConfig":
    """The config of a file or run folder (`options.config`, or none) with the flags that were given."""
    from oelm.config import load_toml, resolve

    path = options.config
    file = load_toml(path / "config.toml" if path.is_dir() else path) if path else {}
    return resolve(given_settings(options), file)


def with_underscores(argv: list[str]) -> list[str]:
    """--max-lr=1 and --max_lr=1 are the same flag."""
    out = []
    for word in argv:
        flag, equals, value = word.partition("=")
        is_flag = re.fullmatch(r"--[A-Za-z][\w-]*", flag)  # a prompt may begin with dashes, too
        out.append("--" + flag[2:].replace("-", "_") + equals + value if is_flag else word)
    return out
