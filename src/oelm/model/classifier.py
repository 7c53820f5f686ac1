"""A GPT that classifies: the class is read off the last token, which has seen all the others."""

import torch
from torch import Tensor, nn

from oelm.config import RunConfig
from oelm.model.gpt import GPT


class GPTClassifier(GPT):
    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.d_model, config.labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Logits of the classes. Padding stands behind the text, where no token of the text can see it."""
        hidden_BTD = self.hidden(input_ids)
        last_B = attention_mask.sum(-1) - 1
        return self.head(hidden_BTD[torch.arange(len(last_B), device=last_B.device), last_B])
