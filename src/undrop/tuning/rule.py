"""How far the logarithm of a value moves after a trial.

    move = ± size · min(1, |z|/2)

z is the difference between the branches of the trial, divided by its standard error, which is at least
the standard deviation of the last ten trials. The size starts at the rate. It doubles when a trial
agrees with the previous trial of the same site, or of weight decay, and halves when it does not. So a
few trials correct a start that is far off, whatever the rate, and trials without evidence move little.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

START = 0.1
"""The p of every site at the first trial."""
LOWEST, HIGHEST = 0.005, 0.7
"""The bounds of p."""
SMALLEST, LARGEST = 0.1, math.log(9.0)
"""The bounds of a move's size."""
CLEAR = 2.0
"""The z-score above which a sign counts as known."""


def log_odds(p: float) -> float:
    """log σ² = log(p / (1 - p))."""
    return math.log(p / (1.0 - p))


def probability(log_variance: float) -> float:
    """Return the p whose σ² has this logarithm."""
    return 1.0 / (1.0 + math.exp(-log_variance))


@dataclass
class Pace:
    """The size of the moves of one site or of weight decay, and the sign of its last trial."""

    size: float
    sign: float = 0.0

    def move(self, z: float) -> float:
        """Return how far to move, given the z-score of a trial, and update the size."""
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
        """Return the state."""
        return asdict(self)
