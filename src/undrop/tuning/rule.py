"""How far the logarithm of a value moves after a trial.

    move = rate · m / √v

m and v are running means of the differences that the trials of one thing found, and of their squares,
with the factors 0.5 and 0.8 and corrected for their start, as in Adam. So the scale of the loss does not
matter: trials that agree move the value by ``rate`` each, and those that contradict each other by less.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

START = 0.1
"""The p of every site at the first step."""
LOWEST, HIGHEST = 0.005, 0.7
"""The bounds of p."""
MEMORY, SQUARES = 0.5, 0.8
"""The factors of the running means."""


def log_odds(p: float) -> float:
    """log σ² = log(p / (1 - p))."""
    return math.log(p / (1.0 - p))


def probability(log_variance: float) -> float:
    """The p whose σ² has this logarithm."""
    return 1.0 / (1.0 + math.exp(-log_variance))


@dataclass
class Moments:
    """The running moments of the differences that trials of one thing found."""

    count: int = 0
    mean: float = 0.0
    square: float = 0.0

    def move(self, difference: float, rate: float) -> float:
        """Take in one difference, and return how far to move."""
        self.count += 1
        self.mean = MEMORY * self.mean + (1.0 - MEMORY) * difference
        self.square = SQUARES * self.square + (1.0 - SQUARES) * difference**2
        mean = self.mean / (1.0 - MEMORY**self.count)
        size = math.sqrt(self.square / (1.0 - SQUARES**self.count))
        return rate * mean / size if size > 0.0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return asdict(self)
