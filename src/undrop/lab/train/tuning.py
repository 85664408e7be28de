"""Tuning p within a run, on a part of the training text that is set aside."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from undrop.errors import ConfigError, DataError
from undrop.lab.corpora.corpus import Tokens
from undrop.lab.models import LanguageModel
from undrop.lab.train.callbacks import Callback
from undrop.lab.train.config import Config
from undrop.lab.train.environment import World
from undrop.objectives import Objective
from undrop.tuning import Tuner
from undrop.tuning.advice import BATCHES

if TYPE_CHECKING:
    from undrop.lab.train.trainer import Trainer


class TunerRecorder(Callback):
    """Keeps the tuner of a run (its history has the results), the model and the last batches.

    Args:
        interval: the steps between trials; None keeps the tuner's own interval.
    """

    def __init__(self, interval: int | None = None) -> None:
        self.tuner: Tuner | None = None
        self.model: LanguageModel | None = None
        self.batches: deque[Any] = deque(maxlen=BATCHES)
        self.interval = interval

    def observe(self, trainer: Trainer, inputs: Any, targets: Any) -> None:
        """Keep the tuner, the model and the batch, and set the interval."""
        self.tuner, self.model = trainer.tuner, trainer.model
        self.batches.append((inputs, targets))
        if self.tuner is not None and self.interval is not None:
            self.tuner.interval = self.interval


def tuner_for(
    config: Config, objective: Objective, text: Tokens, world: World
) -> tuple[Tuner | None, Tokens]:
    """Return the tuner that the config asks for, if any, and the text that is left to train on.

    The last part of the text, a share of ``train.tune``, is cut into batches as in training: each has
    one window of every stream, from all over that part.

    Raises:
        ConfigError: with several processes, because each would tune on its own.
        DataError: if the share makes fewer than two batches.
    """
    share, data = config.train.tune, config.data
    if not share:
        return None, text
    if world.size > 1:
        raise ConfigError("train.tune needs a single process: set it to 0, or start one process.")
    left = round((1.0 - share) * len(text))
    held, streams, length = text[left:], data.batch_size, data.length
    count = (len(held) - 1) // (streams * length)
    if count < 2:
        raise DataError(
            f"train.tune = {share:g} sets {len(held)} of {len(text)} tokens aside, fewer than two "
            f"batches of {streams} × {length}: make it larger, or the batches smaller."
        )
    used = count * streams * length
    words = torch.from_numpy(np.asarray(held, dtype=np.int64))
    inputs, targets = (
        words[shift : shift + used].view(streams, count, length).permute(1, 2, 0)
        for shift in (0, 1)
    )
    batches: list[Any] = [
        ({"tokens": x.to(world.device), "state": None, "logits": False}, y.to(world.device))
        for x, y in zip(inputs, targets, strict=True)
    ]
    return Tuner(objective, batches), text[:left]
