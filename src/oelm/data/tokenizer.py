"""Tokenizers: GPT-2 BPE (tiktoken), a small byte-level BPE trained on the data, plain bytes, or an encoder's own."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from oelm.errors import UserError

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
MAX_BPE = 1_000_000


@dataclass(frozen=True)
class Template:
    """What a model expects around one text or two: [CLS] first [SEP] second [SEP]."""

    start: list[int]
    between: list[int]
    end: list[int]
    pad: int
    types: bool = False
    """The second text is of another token type."""

    def length(self, pair: bool) -> int:
        return len(self.start) + len(self.end) + (len(self.between) if pair else 0)

    def join(self, texts: Sequence[np.ndarray], seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, token types); what is too long is cut at the end of the longer text."""
        pair = len(texts) == 2
        room = max(0, seq_len - self.length(pair))
        sizes = [len(text) for text in texts]
        if pair and sum(sizes) > room:
            shorter = min(min(sizes), room // 2)
            sizes = [room - shorter, shorter] if sizes[0] > sizes[1] else [shorter, room - shorter]
        parts: list[Sequence[int] | np.ndarray] = [self.start, texts[0][: min(sizes[0], room)]]
        parts += [self.between, texts[1][: sizes[1]], self.end] if pair else [self.end]
        tokens = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
        kinds = np.zeros_like(tokens)
        if pair and self.types:
            kinds[len(parts[0]) + len(parts[1]) + len(parts[2]) :] = 1
        return tokens, kinds


class Tokenizer(Protocol):
    name: str
    hash: str
    vocab_size: int
    end_of_text: int

    def encode(self, text: str) -> list[int]: ...

    def encode_array(self, text: str) -> np.ndarray:
        """The same ids as an integer array, by the quickest way there is."""
        return np.array(self.encode(text), dtype=np.uint32)

    def decode(self, ids: list[int]) -> str: ...

    def template(self) -> Template:
        """Texts end with end-of-text, which also stands between two."""
        return Template([], [self.end_of_text], [self.end_of_text], self.end_of_text)


class Gpt2Tokenizer(Tokenizer):
    """The published 50,257-token vocabulary. Special tokens in the text are text."""

    name = "gpt2"

    def __init__(self) -> None:
        import tiktoken

        try:
            self._encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:
            raise UserError(
                f"the GPT-2 vocabulary is not here and cannot be downloaded ({type(error).__name__}): "
                "set TIKTOKEN_CACHE_DIR to a folder that holds it, or take --tokenizer bpe:N"
            ) from error
        ranks = sorted(self._encoding._mergeable_ranks.items(), key=lambda item: item[1])
        self.hash = hashlib.sha256(b"".join(token + b"\n" for token, _ in ranks)).hexdigest()
        self.vocab_size = self._encoding.n_vocab
        self.end_of_text = self._encoding.eot_token

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def encode_array(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)


class BpeTokenizer(Tokenizer):
    """Byte-level BPE from a `tokenizer.json` of the tokenizers library."""

    def __init__(self, serialised: str) -> None:
        from tokenizers import Tokenizer as HfTokenizer

        self.serialised = serialised
        self._tokenizer = HfTokenizer.from_str(serialised)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.name = f"bpe:{self.vocab_size}"
        self.hash = hashlib.sha256(serialised.encode()).hexdigest()
        end_of_text = self._tokenizer.token_to_id(END_OF_TEXT)
        if end_of_text is None:
            raise ValueError(f"it has no token {END_OF_TEXT}")
        self.end_of_text: int = end_of_text

    def encode(self, text: str) -> list[int]:
        # The special token has no place inside a document; written out there, it is text like any other.
        pieces = text.split(END_OF_TEXT)
        ids = self._tokenizer.encode(pieces[0], add_special_tokens=False).ids
        for piece in pieces[1:]:
            for part in ("<|", "endoftext|>" + piece):
                ids = ids + self._tokenizer.encode(part, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes and an end-of-text token: 257 ids, nothing to learn or to download."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256
    hash = hashlib.sha256(b"utf-8 bytes, 256 = end of text").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: list[int]) -> str:
        special = {self.end_of_text: END_OF_TEXT.encode()}
        parts = [special.get(i, b"\xff") if i > 255 else bytes([i]) for i in ids]
        return b"".join(parts).decode(errors="replace")


class EncoderTokenizer(Tokenizer):
    """An encoder's own, from its `tokenizer.json` (or the `vocab.txt` of BERT's lower-case WordPiece)."""

    name = "encoder"

    def __init__(self, serialised: str) -> None:
        from tokenizers import Tokenizer as HfTokenizer

        self.serialised = serialised
        self._tokenizer = HfTokenizer.from_str(serialised)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # written out in a text, they are text
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.hash = hashlib.sha256(serialised.encode()).hexdigest()
        self.end_of_text = self.template().end[-1]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def template(self) -> Template:
        """Read off a pair that the tokenizer itself puts together."""
        pair = self._tokenizer.encode("a", "a")
        ids, special = pair.ids, pair.special_tokens_mask
        texts = [i for i, mark in enumerate(special) if not mark]
        if not texts or len(texts) % 2 or not special[-1]:
            raise UserError("its tokenizer does not put special tokens around a pair of texts")
        half = len(texts) // 2
        first, second = texts[:half], texts[half:]
        pad = next((i for t in ("[PAD]", "<pad>") if (i := self._tokenizer.token_to_id(t)) is not None), 0)
        between = ids[first[-1] + 1 : second[0]]
        return Template(ids[: first[0]], between, ids[second[-1] + 1 :], pad, types=1 in pair.type_ids)


def encoder_tokenizer(folder: Path) -> EncoderTokenizer:
    """The tokenizer of a folder with an encoder."""
    try:
        if (folder / TOKENIZER_FILE).is_file():
            return EncoderTokenizer((folder / TOKENIZER_FILE).read_text(encoding="utf-8"))
        if (folder / "vocab.txt").is_file():
            from tokenizers.implementations import BertWordPieceTokenizer

            return EncoderTokenizer(BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=True).to_str())
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    except Exception as error:
        raise UserError(f"the tokenizer in {folder} is damaged: {error}") from None
    raise UserError(f"no tokenizer in {folder}: expected {TOKENIZER_FILE} or vocab.txt")


def check_spec(spec: str) -> None:
    """Refuse a tokenizer name that `load_tokenizer` and `train_bpe` cannot serve."""
    if spec in ("gpt2", "bytes", EncoderTokenizer.name):
        return
    kind, _, size = spec.partition(":")
    if kind != "bpe" or not size.isascii() or not size.isdigit() or len(size) > 9:
        raise UserError(f"unknown tokenizer {spec}: take gpt2, bytes, bpe:N (for example bpe:1024) or an encoder")
    if not 257 <= int(size) <= MAX_BPE:
        raise UserError(f"tokenizer {spec}: N must lie between 257 (the bytes and end-of-text) and {MAX_BPE:,}")


def load_tokenizer(spec: str, folder: Path) -> Tokenizer:
    """The tokenizer called `spec`; a trained BPE is read from `folder`."""
    check_spec(spec)
    if spec == "gpt2":
        return Gpt2Tokenizer()
    if spec == "bytes":
        return ByteTokenizer()
    if spec == EncoderTokenizer.name:
        return encoder_tokenizer(folder)
    path = folder / TOKENIZER_FILE
    try:
        return BpeTokenizer(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"the tokenizer {spec} of {folder} is missing: {path} was not found") from None
    except Exception as error:
        raise UserError(f"{path} is damaged: {error}") from None


def train_bpe(texts: Iterator[str], vocab_size: int) -> BpeTokenizer:
    """Train a byte-level BPE of exactly `vocab_size` tokens, end-of-text included."""
    from tokenizers import Tokenizer as HfTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found < vocab_size:
        raise UserError(f"the train split has text for only {found:,} tokens: take --tokenizer bpe:{found} or less")
    return BpeTokenizer(tokenizer.to_str())
