"""The report's language: every sentence comes from words.toml."""

import tomllib
from importlib.resources import files
from typing import Any

from oelm.errors import UserError, nearest


class Words:
    """`measure`: what arms are judged by; sentences that speak of it stand in a table of its own."""

    def __init__(self, language: str, measure: str = "perplexity") -> None:
        tables = tomllib.loads((files("oelm.report") / "words.toml").read_text(encoding="utf-8"))
        if language not in tables:
            raise UserError(f"--lang {language}: {nearest(language, tables)}")
        self.language, table = language, tables[language]
        self._table = {**table, **table.get(measure, {})}

    def __call__(self, key: str, **facts: Any) -> str:
        return self._table[key].format(**facts)
