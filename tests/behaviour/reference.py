"""The independent implementation that greedy ids are compared with: `transformers`, float32."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

# Importing the oracle warns about things that are not ours.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM


@dataclass(frozen=True, kw_only=True)
class Greedy:
    """What a prompt must give, and how clearly.

    Attributes:
        output: ids, end tokens ignored.
        gap: the smallest distance of the two highest logits at any of them.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    gap: float


def greedy(folder: Path, prompts: Sequence[Sequence[int]], length: int) -> list[Greedy]:
    """Greedy continuations of `prompts`, each alone and without a cache."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens, gap = list(prompt), float("inf")
            for _ in range(length):
                best = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
                gap = min(gap, float(best.values[0] - best.values[1]))
                tokens.append(int(best.indices[0]))
            output = tuple(tokens[len(prompt) :])
            found.append(Greedy(prompt=tuple(prompt), output=output, gap=gap))
    return found
