"""Use a run: load its model, sample text from it, or have it classify."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from oelm import encoders
from oelm.config import RunConfig
from oelm.data.tokenizer import Tokenizer, load_tokenizer
from oelm.errors import UserError
from oelm.files import read_json
from oelm.model.build import skeleton
from oelm.model.encoder import empty_encoder
from oelm.train.checkpoint import Checkpoint, give_weights, pick
from oelm.train.distributed import pick_device
from oelm.train.folder import RunFolder


@dataclass(frozen=True)
class LoadedRun:
    model: nn.Module
    tokenizer: Tokenizer
    data: dict[str, Any]
    """What the checkpoint knows of the data that it was trained on."""


def load_run(run: Path, which: str, device: str, warn: Callable[[str], None]) -> LoadedRun:
    """The model of a run folder at its best, last or a named checkpoint, with its tokenizer."""
    folder = RunFolder(run)
    config = folder.config()
    found = pick(folder, which, warn)
    model = _skeleton(folder, config)
    give_weights(model, found, folder, config, assign=True)
    return LoadedRun(model.to(pick_device(device)).eval(), _tokenizer_of(folder, found), found.state["data"])


def _skeleton(folder: RunFolder, config: RunConfig) -> nn.Module:
    """The model's shapes; an encoder's as it was when the run began, wherever the pretrained one may be now."""
    if config.arch == encoders.GPT:
        return skeleton(config)
    settings = read_json(folder.encoder)
    if not settings:
        raise UserError(f"{folder.encoder} is missing or damaged: the run cannot be loaded without it")
    return empty_encoder(config, settings)


def _tokenizer_of(folder: RunFolder, found: Checkpoint) -> Tokenizer:
    data = found.state["data"]
    tokenizer = load_tokenizer(data["tokenizer"], folder.path)
    if data["tokenizer_hash"] and data["tokenizer_hash"] != tokenizer.hash:
        raise UserError(
            f"the tokenizer in {folder.path} ({tokenizer.hash[:8]}) is not the checkpoint's "
            f"({data['tokenizer_hash'][:8]}): restore tokenizer.json"
        )
    return tokenizer


def stream_text(tokenizer: Tokenizer, ids: Iterator[int]) -> Iterator[str]:
    """Decoded text as it becomes certain: a character split over tokens is held back until it is whole."""
    seen: list[int] = []
    shown = ""
    for token in ids:
        if token == tokenizer.end_of_text:
            break
        seen.append(token)
        text = tokenizer.decode(seen)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(seen)[len(shown) :]
