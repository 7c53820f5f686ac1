"""What tests share: a small data set, and the command line called in this process."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes, whose small models a second thread only slows down

from oelm.cli import main
from oelm.data.prepare import prepare

WORDS = (
    "the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "big", "small", "red", "and", "then",
    "said", "was", "not", "it", "he", "she", "they", "saw", "little", "house", "happy", "friend",
)  # fmt: skip


class Result(NamedTuple):
    code: int
    out: str
    err: str


def make_documents(count: int = 300, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(20, 120))) + "." for _ in range(count)]


def make_data(folder: Path, tokenizer: str = "bytes") -> Path:
    """A prepared data set of about 90,000 byte tokens with small val and test splits."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    source = folder.parent / f"{folder.name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in make_documents()))
    prepare("tests", [source], tokenizer, folder, workers=1, held_out=0.02)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("shared") / "data")


@pytest.fixture
def oelm(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Call the command line; returns exit code, standard output and standard error."""

    def call(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(int(stop.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def tiny(oelm: Callable[..., Result], data: Path, tmp_path: Path) -> Callable[..., Result]:
    """`oelm train` with the tiny preset on the test data, into tmp_path/run unless told otherwise."""

    def call(*arguments: object, out: str = "run") -> Result:
        fixed = ("--preset", "tiny", "--data_path", data, "--threads", 1, "--device", "cpu")
        return oelm("train", *fixed, "--out_dir", tmp_path / out, *arguments)

    return call


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pretrained encoder; tests only read it."""
    from tests.small_encoder import make_encoder

    return make_encoder(tmp_path_factory.mktemp("small") / "encoder")


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Path:
    """Labelled pairs, prepared for it."""
    from tests.small_encoder import make_pairs

    return make_pairs(tmp_path_factory.mktemp("pairs") / "data", encoder)


@pytest.fixture
def classify(oelm: Callable[..., Result], encoder: Path, pairs: Path, tmp_path: Path) -> Callable[..., Result]:
    """`oelm train` with the small encoder on the pairs, into tmp_path/run unless told otherwise."""

    def call(*arguments: object, out: str = "run") -> Result:
        fixed = ("--arch", encoder, "--data_path", pairs, "--threads", 1, "--device", "cpu", "--seq_len", 32)
        return oelm("train", *fixed, "--out_dir", tmp_path / out, "--max_lr", 3e-3, *arguments)

    return call


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real corpora, kept outside the project."""
    place = os.environ.get("OELM_SHARED")
    if not place:
        pytest.skip("OELM_SHARED is not set: it names the folder with the real corpora")
    return Path(place)
