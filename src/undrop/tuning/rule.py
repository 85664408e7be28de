"""How far the logarithm of a value moves after a trial.

    move = ± size · min(1, |z|/2)

z is the difference of the trial's branches over its standard error. The size begins at the rate, doubles
with every trial that agrees with the one before it of the same thing, and halves with one that does not.
So a start that is far off is left behind in a few trials, whatever the rate, and trials that say nothing
move nothing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

START = 0.1
"""The p of every site that the first trial sees."""
LOWEST, HIGHEST = 0.005, 0.7
"""The bounds of p."""
SMALLEST, LARGEST = 0.1, math.log(9.0)
"""The bounds of a move's size."""
CLEAR = 2.0
"""The z-score from which on a sign counts as known."""


def log_odds(p: float) -> float:
    """log σ² = log(p / (1 - p))."""
    return math.log(p / (1.0 - p))


def probability(log_variance: float) -> float:
    """The p whose σ² has this logarithm."""
    return 1.0 / (1.0 + math.exp(-log_variance))


@dataclass
class Pace:
    """The size of the moves of one thing, and the sign of its last trial."""

    size: float
    sign: float = 0.0

    def move(self, z: float) -> float:
        """Take in the z-score of one trial, and return how far to move."""
        if z == 0.0:
            return 0.0
        sign = math.copysign(1.0, z)
        if sign == self.sign:
            self.size = min(2.0 * self.size, LARGEST)
        elif sign == -self.sign:
            self.size = max(0.5 * self.size, SMALLEST)
        self.sign = sign
        return sign * self.size * min(1.0, abs(z) / CLEAR)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return asdict(self)
