"""A small BERT with random weights and its tokenizer, saved as transformers does, and labelled pairs for it."""

import json
import random
from pathlib import Path
from typing import Any

from oelm.data.examples import Labelling
from oelm.data.prepare import prepare
from tests.conftest import WORDS

LABELS = ("same", "other", "odd")
MARKS = {"same": "the", "other": "not", "odd": "tree"}


def make_encoder(folder: Path, layers: int = 2, **settings: int) -> Path:
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    folder.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    shape = dict(vocab_size=len(words), hidden_size=32, num_hidden_layers=layers, num_attention_heads=2,
                 intermediate_size=64, max_position_embeddings=64) | settings  # fmt: skip
    model = BertModel(BertConfig(**shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name or "key" in name:  # biases too: a pretrained encoder's are not zero
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return folder


def make_rows(count: int = 240, seed: int = 0) -> list[dict[str, str]]:
    """Pairs whose label can be told from the second text's first word, which stands nowhere else."""
    chance = random.Random(seed)
    plain = [word for word in WORDS if word not in MARKS.values()]
    rows = []
    for i in range(count):
        label = LABELS[i % 3]
        first, second = (" ".join(chance.choices(plain, k=chance.randint(2, 14))) for _ in range(2))
        rows.append({"premise": first, "hypothesis": f"{MARKS[label]} {second}", "label": label})
    return rows


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_pairs(folder: Path, encoder: Path | str) -> Path:
    """Prepared pairs: about 190 for training, 25 each for validation and test."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    source = write_rows(folder.parent / f"{folder.name}.jsonl", make_rows())
    prepare("pairs", [], str(encoder), folder, labelling=Labelling(LABELS), placed={"train": [source]})
    return folder


def prepared(tmp_path: Path, rows: list[dict[str, str]], labels: tuple[str, ...] = LABELS) -> dict[str, Any]:
    """What `prepare` says of the rows; the data lie in tmp_path/out."""
    source = write_rows(tmp_path / "rows.jsonl", rows)
    return prepare("x", [], "bytes", tmp_path / "out", labelling=Labelling(labels), placed={"train": [source]})
