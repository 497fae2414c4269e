"""Draft sampling."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def greedy(logits: Float[Tensor, "... V"]) -> Int[Tensor, "..."]:
    """The most likely token; the lowest id on ties, which `torch.max` documents and `argmax` refers to."""
    return torch.argmax(logits, dim=-1).int()
