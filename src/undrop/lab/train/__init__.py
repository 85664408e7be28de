"""Train language models: a config describes a run, a folder holds it, and it resumes at any time.

>>> from undrop.lab import train
>>> config = train.configure("ptb-lstm-tiny", {"data": {"dir": "data"}}, ["train.epochs=1"])
>>> config.train.epochs
1

``train.run(config, out="runs/first")`` trains it and returns a :class:`Summary`. The code of a run is
``session.run`` and ``trainer.Trainer``.
"""

from __future__ import annotations

from undrop.lab.models import MODELS
from undrop.lab.train.callbacks import LOGGERS, Callback, Logger
from undrop.lab.train.components import OBJECTIVES
from undrop.lab.train.config import Config, configure, merge, presets
from undrop.lab.train.folder import RunFolder
from undrop.lab.train.session import Summary, run, train_interleaved

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
