"""Generating text with a trained language model, word by word."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from undrop.errors import OptionError
from undrop.lab.corpora import EOS, Vocabulary
from undrop.lab.models import LanguageModel, State


@torch.no_grad()
def sample(
    model: LanguageModel,
    vocabulary: Vocabulary,
    *,
    prompt: str = "",
    words: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[str]:
    """Draw words from softmax(logits / temperature), each fed back as the next input.

    Args:
        model: a language model, in eval mode.
        vocabulary: its words.
        prompt: words to start with; they are not returned. The text starts after an ``<eos>``.
        words: the number of words to draw.
        temperature: below 1 sharpens the distribution, above 1 flattens it; 0 always takes
            the most likely word.
        top_k: draw only from the ``top_k`` most likely words.
        generator: the source of random numbers.
    """
    if not 0.0 <= temperature < float("inf"):
        raise OptionError(f"temperature must be finite and not negative, got {temperature}.")
    if words < 0 or (top_k is not None and top_k < 1):
        raise OptionError(f"words must be at least 0 and top_k at least 1, got {words}, {top_k}.")
    device = next(model.parameters()).device
    seen = [vocabulary.index[EOS], *vocabulary.encode(prompt).tolist()]
    state: State | None = None
    for _ in range(words):
        # A model with a state has read all but the last word; a model without one reads all of them.
        logits, state = model(torch.tensor(seen, device=device)[:, None], state)
        word = _draw(logits[-1, 0].float().cpu(), temperature, top_k, generator)
        yield vocabulary.words[word]
        seen = [word] if state else [*seen, word]


def _draw(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    best, places = logits.topk(min(top_k or len(logits), len(logits)))
    chosen = torch.multinomial((best / temperature).softmax(-1), 1, generator=generator)
    return int(places[chosen])
