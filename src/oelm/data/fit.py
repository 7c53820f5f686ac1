"""A config and its data: opened, or prepared on the way, and what the data decide about a run."""

import hashlib
import re
import time
from pathlib import Path

from oelm import encoders
from oelm.config import RunConfig
from oelm.data.documents import format_of
from oelm.data.examples import Labelling
from oelm.data.labelled import open_labelled
from oelm.data.prepare import prepare, prepare_lock
from oelm.data.tokenizer import encoder_tokenizer
from oelm.data.tokens import META_FILE, TokenData, check_data, data_root, open_data
from oelm.errors import UserError
from oelm.files import is_locked

PREPARED_SECONDS = 600.0
"""How long the other processes of a run wait for the first to prepare its data."""


def with_prepared(config: RunConfig, rank: int) -> RunConfig:
    """The config on the prepared form of the file that its `dataset` names; prepared now, if it has not been."""
    kind, _, given = config.dataset.partition(":")
    path = Path(given)
    if not path.is_file():
        raise UserError(f"dataset {config.dataset}: no such file")
    if format_of(path) != kind:
        raise UserError(f"dataset {config.dataset}: a file is read as its name ends: rename it to {path.stem}.{kind}")
    tokenizer = usual_tokenizer(config)
    digest = hashlib.sha256(path.read_bytes() + tokenizer.encode()).hexdigest()[:8]
    name = f"{re.sub(r'[^A-Za-z0-9_-]+', '-', path.stem)}-{digest}"
    folder = data_root() / name
    waited = 0.0
    while not (folder / META_FILE).exists():
        busy = is_locked(prepare_lock(folder))
        if rank == 0 and not busy:
            shares = "10 % of the rows for validation, 10 % for the test"
            print(f"preparing {path} in {folder}: tokenizer {tokenizer}, {shares}", flush=True)
            try:
                prepare(name, [], tokenizer, folder, labelling=Labelling(), placed={"train": [path]})
            except UserError:  # unless another run was quicker
                if not (is_locked(prepare_lock(folder)) or (folder / META_FILE).exists()):
                    raise
        elif (waited := waited + 0.2) > PREPARED_SECONDS:
            raise UserError(f"{folder} was not prepared by {'another run' if busy else 'the first process'}")
        else:
            time.sleep(0.2)
    return config.replace(dataset=name)


def usual_tokenizer(config: RunConfig) -> str:
    """What data for a run are tokenised with, if nothing is said of it: the encoder's own, or the preset's."""
    if encoders.is_pretrained(config.arch):
        return config.arch
    return {"pocket": "bpe:1024", "tiny": "bytes"}.get(config.preset, "gpt2")


def open_fitting(config: RunConfig, vocab_is_set: bool = False) -> tuple[RunConfig, TokenData]:
    """The data of a config, and the config with what they decide: vocabulary, classes, steps.

    Refused if they do not go together.
    """
    data = open_data(config.dataset, config.data_path)
    found = open_labelled(data)
    if data.vocab_size and not vocab_is_set and not encoders.is_pretrained(config.arch):
        config = config.replace(vocab_size=data.vocab_size)
    if found is None:
        if config.labels or config.arch != encoders.GPT:
            raise UserError(f"{data.folder} holds running text: prepare labelled texts (oelm prepare --help) for this")
        check_data(data, config.seq_len, config.vocab_size)
        return _with_steps(config, (len(data.splits["train"]) - 1) // config.seq_len / config.windows_per_step), data
    if config.labels not in (0, len(found.labels)):
        raise UserError(f"labels {config.labels}: {data.folder} has {len(found.labels)}: {', '.join(found.labels)}")
    if encoders.is_pretrained(config.arch):
        _check_tokenizer(config.arch, data)
    check_data(data, 1, config.vocab_size)
    template = found.template
    largest = max(*template.start, *template.between, *template.end, template.pad)
    if largest >= config.vocab_size:
        raise UserError(
            f"the special token {largest} of {data.folder} is outside the vocabulary of {config.vocab_size:,}: raise "
            "--vocab_size, or prepare the data with the model's own tokenizer"
        )
    kinds = encoders.settings_of(config.arch).get("type_vocab_size", 2) if config.arch != encoders.GPT else 2
    if found.pair and template.types and kinds < 2:
        raise UserError(f"arch {config.arch} has no token type for the second text of the pairs in {data.folder}")
    least = found.template.length(found.pair) + 1 + found.pair
    if config.seq_len < least:
        raise UserError(f"seq_len {config.seq_len}: with its special tokens an example takes {least} at least")
    examples, per_step = len(found.rows["train"]), config.windows_per_step
    if examples < per_step:
        raise UserError(f"{data.folder} has {examples} training examples, fewer than the {per_step} of a step")
    return _with_steps(config.replace(labels=len(found.labels)), examples // per_step), found


def _with_steps(config: RunConfig, per_epoch: float) -> RunConfig:
    if not config.num_epochs:
        return config
    return config.replace(max_steps=max(1, round(config.num_epochs * per_epoch)))


def _check_tokenizer(arch: str, data: TokenData) -> None:
    """A pretrained encoder understands its own tokens only."""
    own = encoder_tokenizer(encoders.with_tokenizer(arch))
    if own.hash != data.tokenizer_hash:
        raise UserError(
            f"{data.folder} was tokenised with {data.tokenizer} ({data.tokenizer_hash[:8]}), not with {arch}'s own "
            f"({own.hash[:8]}): oelm prepare … --tokenizer {arch}"
        )
