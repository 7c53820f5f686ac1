"""The model of a config: a GPT, a GPT that classifies, or an encoder."""

import torch
from torch import nn

from oelm import encoders
from oelm.config import RunConfig
from oelm.model import encoder
from oelm.model.classifier import GPTClassifier
from oelm.model.gpt import GPT


def empty_model(config: RunConfig) -> nn.Module:
    """The model with whatever weights memory holds."""
    if config.arch != encoders.GPT:
        return encoder.empty_encoder(config)
    return GPTClassifier(config) if config.labels else GPT(config)


def skeleton(config: RunConfig) -> nn.Module:
    """The model's parameters as shapes only."""
    with torch.device("meta"):
        return empty_model(config)


def build_model(config: RunConfig, device: torch.device | str = "cpu") -> nn.Module:
    """A model with its initial weights. Built without torch's own initialisation, which would be overwritten."""
    if config.arch != encoders.GPT:
        return encoder.build_encoder(config)[0].to(device)
    # to_empty() would import the compiler's symbols, which takes longer than to train a small model's first steps
    model = skeleton(config)._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    assert isinstance(model, GPT)
    model.initialise(config.seed)
    return model.to(device)
