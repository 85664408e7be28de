"""The loss on a whole split, without noise, the state carried on from window to window."""

from __future__ import annotations

from collections.abc import Callable

import torch

from undrop.errors import NonFiniteError
from undrop.lab.corpora.batching import IGNORED, evaluation_windows
from undrop.lab.corpora.encode import Tokens
from undrop.lab.models import LanguageModel
from undrop.lab.train.world import World

__all__ = ["mean_loss"]


@torch.no_grad()
def mean_loss(
    model: LanguageModel,
    tokens: Tokens,
    *,
    batch_size: int,
    length: int,
    world: World | None = None,
    between: Callable[[], None] = lambda: None,
) -> float:
    """The mean cross-entropy over every token of a split but the first.

    Args:
        model: a language model; its mode is put back.
        tokens: the split.
        batch_size: the number of streams that are read side by side.
        length: the number of steps per window.
        world: the processes that share the streams.
        between: called between two windows; it may raise to end the evaluation.

    Raises:
        NonFiniteError: if it is not finite.
    """
    world = world or World(device=next(model.parameters()).device)
    columns = world.share(batch_size)
    loss, state = model.loss(), None
    total = count = 0.0
    training = model.training
    model.eval()
    try:
        for window in evaluation_windows(tokens, batch_size, length):
            inputs, targets = window.inputs[:, columns], window.targets[:, columns]
            counted = int((targets != IGNORED).sum())
            if inputs.numel() == 0 or counted == 0:
                continue
            features, state = model(inputs.to(world.device), state, logits=False)
            value = loss.value(features, targets.to(world.device))
            total, count = total + float(value) * counted, count + counted
            between()
    finally:
        model.train(training)
    total, count = world.sums([total, count])
    if not abs(total) < float("inf"):
        raise NonFiniteError("the loss in evaluation is not finite")
    return total / count
