"""How far a trial moves the logarithm of a tuned value: log σ² of a site, or log λ of weight decay.

    move = ± size · min(1, |z|/2)

z is the benefit that the trial measures, divided by its standard error. The error is at least the
standard deviation of the benefit over the last ten trials. The size starts at the tuner's rate. It
doubles when a trial has the same sign as the previous trial of the same kind (of that site, of all sites
together or of weight decay), and halves when it has the opposite sign. So, whatever the rate, a few
trials correct a start that is far off, and trials without evidence move little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

START_P = 0.1
"""The p of every site at the first trial."""
MIN_P, MAX_P = 0.005, 0.7
"""The bounds of p."""
MIN_SIZE, MAX_SIZE = 0.1, math.log(9.0)
"""The bounds of a move's size."""
CLEAR_Z = 2.0
"""The |z| from which a trial makes a full move."""


def log_odds(p: float) -> float:
    """Return log σ² = log(p / (1 - p))."""
    return math.log(p / (1.0 - p))


def probability(log_variance: float) -> float:
    """Return the p of a site, given its log σ²."""
    return 1.0 / (1.0 + math.exp(-log_variance))


@dataclass
class MoveSize:
    """The size of the moves by trials of one kind, and the sign of the last of these trials."""

    size: float
    sign: float = 0.0

    def next_move(self, z: float) -> float:
        """Adapt the size to the z-score of a trial, and return how far to move."""
        if z == 0.0:
            return 0.0
        sign = math.copysign(1.0, z)
        if sign == self.sign:
            self.size = min(2.0 * self.size, MAX_SIZE)
        elif sign == -self.sign:
            self.size = max(0.5 * self.size, MIN_SIZE)
        self.sign = sign
        return sign * self.size * min(1.0, abs(z) / CLEAR_Z)
