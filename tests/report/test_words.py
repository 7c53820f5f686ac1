import re
import tomllib
from importlib.resources import files

import pytest

from oelm.errors import UserError
from oelm.lab.verdict import PRETRAINED_STEPS, STEPS
from oelm.report.words import Words

TABLES = tomllib.loads((files("oelm.report") / "words.toml").read_text())


def test_both_languages_say_the_same_things():
    for english, chinese in ((TABLES["en"], TABLES["zh"]), (TABLES["en"]["accuracy"], TABLES["zh"]["accuracy"])):
        assert english.keys() == chinese.keys()
        for key, text in english.items():
            if isinstance(text, str):
                assert set(re.findall(r"\{(\w+)", text)) == set(re.findall(r"\{(\w+)", chinese[key])), key


def test_every_word_is_used():
    used = "".join(path.read_text() for path in files("oelm.report").iterdir() if path.name.endswith(".py"))
    used += "".join(f'"step_{name}"' for name in {**STEPS, **PRETRAINED_STEPS})
    for key in {**TABLES["en"], **TABLES["en"]["accuracy"]}:
        made = key.startswith(("axis_", "curve_", "log_", "frames_", "state_", "claim_", "schedule_")) or key.isupper()
        assert made or f'"{key}"' in used or f"'{key}'" in used, key


def test_an_unknown_language_is_refused():
    with pytest.raises(UserError, match="--lang fr"):
        Words("fr")
