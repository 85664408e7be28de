"""Training language models: one config in, one run's folder out, resumable at any moment.

>>> from undrop.lab import train
>>> config = train.configure("ptb-lstm-tiny", {"data": {"dir": "data"}}, ["train.epochs=1"])
>>> config.train.epochs
1

``train.run(config, out="runs/first")`` trains it and returns a :class:`Summary`. The code of a run is
``session.run`` and ``trainer.Trainer``.
"""

from __future__ import annotations

from undrop.lab.train.callbacks import LOGGERS as LOGGERS
from undrop.lab.train.callbacks import Callback as Callback
from undrop.lab.train.callbacks import Logger as Logger
from undrop.lab.train.components import MODELS as MODELS
from undrop.lab.train.components import OBJECTIVES as OBJECTIVES
from undrop.lab.train.config import Config as Config
from undrop.lab.train.folder import RunFolder as RunFolder
from undrop.lab.train.presets import configure as configure
from undrop.lab.train.presets import merge as merge
from undrop.lab.train.presets import presets as presets
from undrop.lab.train.session import Summary as Summary
from undrop.lab.train.session import run as run
from undrop.lab.train.session import train_interleaved as train_interleaved

__all__ = [
    "LOGGERS",
    "MODELS",
    "OBJECTIVES",
    "Callback",
    "Config",
    "Logger",
    "RunFolder",
    "Summary",
    "configure",
    "merge",
    "presets",
    "run",
    "train_interleaved",
]
