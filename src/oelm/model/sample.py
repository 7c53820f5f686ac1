"""Sample tokens from a model, one by one."""

from collections.abc import Iterator

import torch

from oelm.model.gpt import GPT


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
