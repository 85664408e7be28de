"""Train language models: a config describes a run, and from the run's folder it can always resume.

>>> from undrop.lab import train
>>> config = train.configure("ptb-lstm-tiny", {"data": {"dir": "data"}}, ["train.epochs=1"])
>>> config.train.epochs
1

``train.run(config, out="runs/first")`` trains a model and returns a :class:`Summary`. To follow a run
through the code, start at ``run`` in ``session.py``; its module docstring says how a run resumes.
"""

from __future__ import annotations

from undrop.lab.models import MODELS
from undrop.lab.train.callbacks import LOGGERS, Callback, Logger
from undrop.lab.train.config import Config, configure, merge, presets
from undrop.lab.train.folder import RunFolder
from undrop.lab.train.session import Summary, run, train_interleaved
from undrop.objectives import OBJECTIVES

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
