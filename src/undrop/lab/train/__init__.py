"""Training language models: one config in, a run's folder out, and no way to lose it.

>>> from undrop.lab import train
>>> config = train.configure("ptb-lstm-tiny", {"data": {"dir": "data"}}, ["train.epochs=1"])
>>> config.train.epochs
1

``train.run(config, out="runs/first")`` trains it and returns a :class:`Summary`.
"""

from __future__ import annotations

from undrop.lab.train.components import MODELS as MODELS
from undrop.lab.train.components import OBJECTIVES as OBJECTIVES
from undrop.lab.train.config import Config as Config
from undrop.lab.train.folder import RunFolder as RunFolder
from undrop.lab.train.presets import configure as configure
from undrop.lab.train.presets import merge as merge
from undrop.lab.train.presets import presets as presets
from undrop.lab.train.reporters import Reporter as Reporter
from undrop.lab.train.session import Summary as Summary
from undrop.lab.train.session import run as run
from undrop.lab.train.session import take_turns as take_turns

__all__ = [
    "MODELS",
    "OBJECTIVES",
    "Config",
    "Reporter",
    "RunFolder",
    "Summary",
    "configure",
    "merge",
    "presets",
    "run",
    "take_turns",
]
