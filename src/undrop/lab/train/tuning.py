"""Tune p during a run, on a part of the training text that is set aside."""

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
    """Stores the tuner, the model and the last batches of a run.

    Args:
        interval: the steps between trials; None leaves the tuner's interval unchanged.
    """

    def __init__(self, interval: int | None = None) -> None:
        self.tuner: Tuner | None = None
        self.model: LanguageModel | None = None
        self.batches: deque[Any] = deque(maxlen=BATCHES)
        self.interval = interval

    def observe(self, trainer: Trainer, inputs: Any, targets: Any) -> None:
        """Store the tuner, the model and the batch, and set the tuner's interval."""
        self.tuner, self.model = trainer.tuner, trainer.model
        self.batches.append((inputs, targets))
        if self.tuner is not None and self.interval is not None:
            self.tuner.interval = self.interval


def build_tuner(
    config: Config, objective: Objective, text: Tokens, world: World
) -> tuple[Tuner | None, Tokens]:
    """Return the tuner, or None if ``train.tune`` is 0, and the text that remains for training.

    ``train.tune`` is the share of the text that is set aside, from its end. This part is cut into
    streams and windows as in training, and each batch of the tuner has one window of every stream.

    Raises:
        ConfigError: with several processes, because each would tune p differently.
        DataError: if the share is too small for two batches.
    """
    share, data = config.train.tune, config.data
    if not share:
        return None, text
    if world.size > 1:
        raise ConfigError("train.tune needs a single process: set it to 0, or start one process.")
    split = round((1.0 - share) * len(text))
    tuning_text, streams, length = text[split:], data.batch_size, data.length
    count = (len(tuning_text) - 1) // (streams * length)
    if count < 2:
        raise DataError(
            f"train.tune = {share:g} sets {len(tuning_text)} of {len(text)} tokens aside, fewer than "
            f"two batches of {streams} × {length}: make it larger, or the batches smaller."
        )
    predictions = count * streams * length
    tokens = torch.from_numpy(np.asarray(tuning_text, dtype=np.int64))
    inputs, targets = (
        tokens[shift : shift + predictions].view(streams, count, length).permute(1, 2, 0)
        for shift in (0, 1)
    )
    batches: list[Any] = [
        ({"tokens": x.to(world.device), "state": None, "logits": False}, y.to(world.device))
        for x, y in zip(inputs, targets, strict=True)
    ]
    return Tuner(objective, batches), text[:split]
