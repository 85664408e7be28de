"""Training language models: one config in, a run's folder out, and no way to lose it.

>>> from undrop import train
>>> config = train.configure("ptb-lstm-tiny", {"data": {"dir": "data"}}, ["train.epochs=1"])
>>> config.train.epochs
1

``train.run(config, out="runs/first")`` trains it and returns a :class:`Summary`.
"""

from __future__ import annotations

from undrop.train.components import MODELS as MODELS
from undrop.train.components import OBJECTIVES as OBJECTIVES
from undrop.train.config import Config as Config
from undrop.train.folder import RunFolder as RunFolder
from undrop.train.presets import configure as configure
from undrop.train.presets import merge as merge
from undrop.train.presets import presets as presets
from undrop.train.reporters import Reporter as Reporter
from undrop.train.session import Summary as Summary
from undrop.train.session import run as run
from undrop.train.session import take_turns as take_turns

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
