"""Sample text from a run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from oelm.data.tokenizer import Tokenizer, load_tokenizer
from oelm.errors import UserError
from oelm.model import freeze
from oelm.model.gpt import GPT
from oelm.train.checkpoint import Checkpoint, load_frozen, pick
from oelm.train.distributed import pick_device
from oelm.train.folder import RunFolder


def load_run(run: Path, which: str, device: str, warn: Callable[[str], None]) -> tuple[GPT, Tokenizer]:
    """The model of a run folder at its best, last or a named checkpoint, with its tokenizer."""
    folder = RunFolder(run)
    config = folder.config()
    found = pick(folder, which, warn)
    with torch.device("meta"):
        model = GPT(config)
    frozen = load_frozen(folder) if freeze.frozen_names(model, config) else {}
    try:
        model.load_state_dict({**found.model, **frozen}, assign=True)
    except RuntimeError as error:
        raise UserError(
            f"{folder.config_file} does not describe the checkpoint: {str(error).splitlines()[-1]}"
        ) from None
    if freeze.fingerprint(model, frozen) != found.state.get("frozen_hash"):
        raise UserError(f"{folder.frozen} is damaged: its frozen parameters are not those of the run")
    return model.to(pick_device(device)).eval(), _tokenizer_of(folder, found)


def _tokenizer_of(folder: RunFolder, found: Checkpoint) -> Tokenizer:
    data = found.state["data"]
    tokenizer = load_tokenizer(data["tokenizer"], folder.path)
    if data["tokenizer_hash"] and data["tokenizer_hash"] != tokenizer.hash:
        raise UserError(
            f"the tokenizer in {folder.path} ({tokenizer.hash[:8]}) is not the checkpoint's "
            f"({data['tokenizer_hash'][:8]}): restore tokenizer.json"
        )
    return tokenizer


@torch.inference_mode()
def sample(
    model: GPT, prompt: list[int], count: int, temperature: float, top_k: int, top_p: float, seed: int
) -> Iterator[int]:
    """Up to `count` new tokens, one by one. Temperature 0 takes the likeliest token."""
    device = model.tokens.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens_1T = torch.tensor([prompt], device=device)
    for _ in range(count):
        hidden_1TD = model.hidden(tokens_1T[:, -model.config.seq_len :])
        logits_V = model.tokens.weight @ hidden_1TD[0, -1]
        if temperature == 0:
            token = logits_V.argmax()
        else:
            logits_V = truncate(logits_V / temperature, top_k, top_p)
            token = torch.multinomial(logits_V.softmax(-1), 1, generator=generator)[0]
        yield int(token)
        tokens_1T = torch.cat((tokens_1T, token.view(1, 1)), dim=1)


def truncate(logits_V: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Rule out all but the `top_k` likeliest tokens (0: no limit), then all outside the nucleus of mass `top_p`."""
    ordered_V, index_V = logits_V.sort(descending=True)
    out_V = torch.zeros_like(ordered_V, dtype=torch.bool)
    if top_k:
        out_V[top_k:] = True
    mass_before_V = ordered_V.softmax(-1).cumsum(-1) - ordered_V.softmax(-1)
    out_V |= mass_before_V >= top_p
    out_V[0] = False
    return logits_V.masked_fill(out_V.scatter(0, index_V, out_V), float("-inf"))


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
