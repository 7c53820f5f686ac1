"""Where text comes from: corpora known by name, the standard library, files and folders, the hub."""

import os
import re
import shlex
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oelm.data.documents import FORMATS, WHOLE_FILES, SourceFile, format_of
from oelm.data.tokens import SPLITS
from oelm.errors import UserError, nearest


@dataclass(frozen=True)
class Corpus:
    """A corpus known by name."""

    about: str
    hub: tuple[str, str | None] | None = None
    """Data set and configuration on the Hugging Face hub."""
    lines: bool = False
    """The hub's rows are lines of one long text, not documents."""
    tokenizer: str = "gpt2"
    """Default tokenizer."""
    labels: tuple[str, ...] = ()
    """Classes, in the order of their numbers, of a set of labelled sentences or pairs."""
    columns: tuple[str, ...] = ()
    """The hub's columns of the texts, and the label's."""


NLI = ("entailment", "neutral", "contradiction")
CORPORA: dict[str, Corpus] = {
    "tinystories": Corpus("short synthetic stories", ("roneneldan/TinyStories", None)),
    "openwebtext": Corpus("web pages linked from Reddit", ("Skylion007/openwebtext", None)),
    "wikitext103": Corpus("Wikipedia articles", ("Salesforce/wikitext", "wikitext-103-raw-v1"), lines=True),
    "wikitext2": Corpus("Wikipedia, the small set", ("Salesforce/wikitext", "wikitext-2-raw-v1"), lines=True),
    "python-stdlib": Corpus("the running Python's standard library", tokenizer="bpe:1024"),
    "xnli": Corpus("natural-language inference, English (trained on MNLI's pairs)", ("facebook/xnli", "en"),
                   labels=NLI, columns=("premise", "hypothesis", "label")),
    "mnli": Corpus("natural-language inference", ("nyu-mll/glue", "mnli"), labels=NLI,
                   columns=("premise", "hypothesis", "label")),
    "sst2": Corpus("sentiment of film reviews' sentences", ("nyu-mll/glue", "sst2"),
                   labels=("negative", "positive"), columns=("sentence", "label")),
    "imdb": Corpus("sentiment of film reviews", ("stanfordnlp/imdb", None),
                   labels=("negative", "positive"), columns=("text", "label")),
    "ag_news": Corpus("topics of news", ("fancyzhx/ag_news", None),
                      labels=("world", "sports", "business", "science"), columns=("text", "label")),
}  # fmt: skip


def find_files(name: str, given: list[Path], placed: Mapping[str, list[Path]] | None = None) -> list[SourceFile]:
    """The files of corpus `name` that are here: the given ones or the standard library; none if it is on the hub.

    The split of a given file is told by its name; that of a placed one is said.
    """
    sources = {"": given, **(placed or {})}
    if any(sources.values()):
        return _local_files(sources)
    if name == "python-stdlib":
        return _stdlib_files()
    if name not in CORPORA:
        raise UserError(f"unknown data set {name}: {nearest(name, CORPORA)}; for your own text add --from PATH")
    return []


def names_by_split(files: list[SourceFile]) -> dict[str, list[str]]:
    """File names for the meta data, twenty of a split at most."""
    found = {split: sorted({file.path.name for file in files if file.split == split}) for split in SPLITS}
    return {split: names[:20] for split, names in found.items()}


_SPLIT_WORDS = {"train": "train", "valid": "val", "validation": "val", "val": "val", "dev": "val", "test": "test"}


def _local_files(given: dict[str, list[Path]]) -> list[SourceFile]:
    paths: list[tuple[Path, Path, str]] = []
    """Each file with the part of its path that names its split, and the split that was said."""
    for said, path in ((said, path) for said, some in given.items() for path in some):
        if path.is_dir():
            paths += [(file, file.relative_to(path), said) for file in _files_inside(path)]
        elif path.is_file():
            paths.append((path, Path(path.name), said))
        else:
            raise UserError(f"no such file or folder: {path} (--from takes ordinary files and folders)")
    sources, seen = [], set()
    sorted_out = any(_SPLIT_WORDS.get(named.parts[0].lower()) == "train" for _, named, _ in paths)
    for path, named, said in paths:
        if path.resolve() in seen:
            raise UserError(f"{path} is given twice")
        seen.add(path.resolve())
        if not os.access(path, os.R_OK):
            raise UserError(f"no right to read {path}: ask its owner, or leave it out")
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty: leave it out or give a file with text")
        if path.suffix.lower() not in WHOLE_FILES:
            split = _split_of(named)
        else:  # a source file is called test_x.py for what it does: its folder tells, where one of them is train
            split = _SPLIT_WORDS.get(named.parts[0].lower(), "train") if sorted_out else "train"
        sources.append(SourceFile(path, said or split, format_of(path)))
    if not any(source.split == "train" for source in sources):
        names = ", ".join(str(named) for _, named, _ in paths[:5])
        raise UserError(f"no training text: {names} are all validation or test files (--train PATH says otherwise)")
    return sources


def _files_inside(folder: Path) -> list[Path]:
    """The files of text in a folder: not hidden, not empty; one that is compressed is not passed over in silence."""
    known = {*FORMATS, *WHOLE_FILES}
    shown = [path for path in folder.rglob("*") if not any(p.startswith(".") for p in path.relative_to(folder).parts)]
    if packed := next((p for p in shown if p.suffix == ".gz" and Path(p.stem).suffix.lower() in known), None):
        raise UserError(f"{packed} is compressed: unpack it (gunzip) or move it out of {folder}")
    found = sorted(p for p in shown if p.suffix.lower() in known and p.is_file() and p.stat().st_size)
    if not found:
        raise UserError(f"no text in folder {folder}: expected files ending in {' '.join(sorted(known))}")
    return found


def _split_of(named: Path) -> str:
    """From a word in the file's name or a folder's: tinystories_valid.txt and valid/part-1.txt are validation."""
    for name in (named.stem, *reversed(named.parent.parts)):
        for word in re.split(r"[^a-z]+", name.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return "train"


def _stdlib_files() -> list[SourceFile]:
    """Modules of the standard library, without its tests and bundled third-party code."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "_vendor"}
    files = []
    for path in sorted(root.rglob("*.py")):
        if skipped & set(path.relative_to(root).parts) or not path.stat().st_size:
            continue
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        files.append(SourceFile(path, "train", "file"))
    if not files:
        raise UserError(f"the standard library's source is not in {root}: use --from with text of your own")
    return files


def download(name: str, cache: Path) -> list[SourceFile]:
    """Bring a corpus from the hub to local files, which are then read like any others."""
    corpus = CORPORA[name]
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"downloading {name} needs the datasets library: make hf (or pip install 'oelm[hf]'), or give local "
            f"files with --from PATH"
        ) from None
    assert corpus.hub is not None
    repository, configuration = corpus.hub
    try:
        loaded = datasets.load_dataset(repository, configuration)
    except Exception as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise UserError(
            f"cannot download {name} ({repository}) from the hub: {reason}; offline, give local files with --from PATH"
        ) from None
    cache.mkdir(parents=True, exist_ok=True)
    files = []
    for split, rows in loaded.items():
        if corpus.lines:
            path = cache / f"{split}.txt"
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(row["text"] for row in rows)
        else:
            path = cache / f"{split}.parquet"
            if corpus.labels and all(label == -1 for label in rows.unique(corpus.columns[-1])):
                continue  # the hub keeps the labels of some splits to itself: what is missing is drawn from train
            _check_classes(name, rows)
            rows.select_columns(list(corpus.columns) or ["text"]).to_parquet(str(path))
        files.append(SourceFile(path, _split_of(Path(path.name)), format_of(path)))
    return files


def _check_classes(name: str, rows: Any) -> None:
    """The hub's own names of the classes, where it has them, must be in our order."""
    corpus = CORPORA[name]
    theirs = getattr(rows.features.get(corpus.columns[-1]), "names", None) if corpus.columns else None
    if theirs and corpus.labels and len(theirs) != len(corpus.labels):
        raise UserError(f"{name} on the hub has the classes {', '.join(theirs)}, not {', '.join(corpus.labels)}")


def prepare_command(dataset: str, tokenizer: str, place: str, labels: Sequence[str] = ()) -> str:
    """What to type for the data set; a suffix that names the tokenizer is not part of the corpus's name."""
    name = dataset.removesuffix("-" + tokenizer.replace(":", ""))
    words = ["oelm", "prepare", name, *([] if name in CORPORA else ["--from", "PATH"])]
    if labels and name not in CORPORA:
        words += ["--labels", ",".join(labels)]
    if tokenizer != "gpt2" or place != f"data/{name}":
        words += ["--tokenizer", tokenizer, "--out", place]
    return shlex.join(words)
