"""Encoders by name: where one lies and what shape it has. No torch here: a config is checked with it.

bert-base            the shape alone, drawn like a GPT's matrices
path/to/folder       config.json and model.safetensors, as `transformers` saves them
package:NAME         an installed Python package that holds such a folder
anything else        a name on the Hugging Face hub, such as bert-base-uncased
"""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from oelm.errors import UserError
from oelm.files import read_json

BERT_BASE: dict[str, Any] = {
    "model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "vocab_size": 30_522, "max_position_embeddings": 512,
}  # fmt: skip
KNOWN = {"bert-base": BERT_BASE, "bert-base-uncased": BERT_BASE, "google-bert/bert-base-uncased": BERT_BASE}
"""Shapes that need no download to be known."""
GPT = "gpt"
DRAWN = frozenset({GPT, "bert-base"})
"""Architectures without pretrained weights."""
CONFIG_FILE = "config.json"


def is_pretrained(arch: str) -> bool:
    return arch not in DRAWN


def folder_of(arch: str) -> Path | None:
    """Where a pretrained encoder lies on this machine; None: on the hub."""
    if arch.startswith("package:"):
        return _in_package(arch.removeprefix("package:"))
    path = Path(arch).expanduser()
    if path.is_dir():
        if not (path / CONFIG_FILE).is_file():
            raise UserError(f"arch {arch}: the folder has no {CONFIG_FILE}")
        return path
    if arch.startswith((".", "/", "~")) or arch.count("/") > 1:
        raise UserError(f"arch {arch}: no such folder")
    return None


def _in_package(name: str) -> Path:
    spec = importlib.util.find_spec(name) if name.isidentifier() and name != "__main__" else None
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise UserError(f"arch package:{name}: no such package is installed (pip install {name.replace('_', '-')})")
    found = sorted(Path(places[0]).rglob(f"**/{CONFIG_FILE}"), key=lambda path: len(path.parts))
    whole = [path.parent for path in found if (path.parent / "model.safetensors").is_file()]
    if not whole:
        raise UserError(f"arch package:{name}: the package holds no {CONFIG_FILE} with model.safetensors")
    return whole[0]


def on_hub(arch: str) -> bool:
    """Whether it can be a name there, which has an owner or is of several words; else it is a slip."""
    return "/" in arch or "-" in arch


def with_tokenizer(arch: str) -> Path:
    """A folder that holds the encoder's tokenizer; the hub's is downloaded."""
    folder = folder_of(arch)
    if folder is not None:
        return folder
    if not on_hub(arch):
        raise UserError(f"unknown tokenizer {arch}: take gpt2, bytes, bpe:N (for example bpe:1024) or an encoder")
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(arch, "tokenizer.json")).parent
    except Exception as error:
        reason = "it needs huggingface_hub: make hf" if isinstance(error, ImportError) else type(error).__name__
        raise UserError(
            f"tokenizer {arch}: neither gpt2, bytes, bpe:N nor a folder here, and not to be had from the hub ({reason})"
        ) from None


_remembered: dict[str, dict[str, Any]] = {}


def remember(arch: str, settings: dict[str, Any]) -> None:
    """What a run says of its encoder: enough to read the run where the encoder itself is not."""
    _remembered[arch] = settings


@cache
def settings_of(arch: str) -> dict[str, Any]:
    """The encoder's own config, as its library wrote it."""
    try:
        return _settings_here(arch)
    except UserError:
        if arch in _remembered:
            return _remembered[arch]
        raise


def _settings_here(arch: str) -> dict[str, Any]:
    if arch in KNOWN and not Path(arch).is_dir():
        return KNOWN[arch]
    folder = folder_of(arch)
    if folder is None:
        return _from_hub(arch)
    found = read_json(folder / CONFIG_FILE)
    if found is None:
        raise UserError(f"arch {arch}: {folder / CONFIG_FILE} cannot be read")
    return found


def _from_hub(arch: str) -> dict[str, Any]:
    if not on_hub(arch):
        raise UserError(f"unknown arch {arch}: take gpt, bert-base, a folder with an encoder, or a name on the hub")
    try:
        from transformers import AutoConfig
    except ImportError:
        raise UserError(f"arch {arch}: encoders need transformers: make hf (or pip install 'oelm[hf]')") from None
    try:
        return AutoConfig.from_pretrained(arch).to_dict()
    except Exception as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise UserError(
            f"arch {arch}: neither gpt, bert-base nor a folder here, and not to be had from the hub: {reason}"
        ) from None


NAMES = {
    "d_model": ("hidden_size", "dim"), "num_layers": ("num_hidden_layers", "n_layers"),
    "num_heads": ("num_attention_heads", "n_heads"), "d_ff": ("intermediate_size", "hidden_dim"),
    "vocab_size": ("vocab_size",),
}  # fmt: skip


def shape_of(arch: str) -> dict[str, int]:
    """The config fields that an encoder decides."""
    if arch == GPT:
        return {}
    found = settings_of(arch)
    shape = {}
    for field, names in NAMES.items():
        values = [found[name] for name in names if isinstance(found.get(name), int)]
        if not values:
            raise UserError(f"arch {arch}: its {CONFIG_FILE} names no {names[0]}: not an encoder like BERT")
        shape[field] = values[0]
    return shape


def longest(arch: str) -> int:
    """Tokens that an encoder has positions for; some of RoBERTa's are not for tokens."""
    found = settings_of(arch)
    spare = 2 if str(found.get("model_type", "")).endswith("roberta") else 0
    positions = found.get("max_position_embeddings", 512)
    if not isinstance(positions, int) or positions <= spare:
        raise UserError(f"arch {arch}: its {CONFIG_FILE} says max_position_embeddings {positions!r}")
    return positions - spare
