"""How a site's p follows from its slopes.

The target of log σ² lies between p = 0.03 and p = 0.69 and depends on the evidence alone: with z, the
mean of the recent slopes over its standard error,

    target = log σ²(0.2) + 2.2·z/√(4 + z²),

and log σ² is the running mean of the targets with factor 1 - rate, corrected for its start as Adam's
moments are. Without evidence p returns to 0.2, the first measurement included, whose error is unknown:
where p starts matters up to there alone. Nothing adds up from signal to signal, so noise makes no
random walk and a slope that keeps its sign can't drive p to 0 or 1. Rules that add up steps do both:
they were compared with this one, and docs/tuning.md has the figures.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["CENTRE", "Knob", "log_odds", "probability", "target"]

CENTRE = 0.2
"""The p of a site about which nothing is known."""
REACH = 2.2
"""How far strong evidence moves log σ² from the centre."""
DOUBT = 4.0
"""The z² at which the evidence moves p by REACH/√2."""
MEMORY = 0.9
"""The factor of the running mean over slopes."""


def log_odds(p: float) -> float:
    """log σ² = log(p / (1 - p))."""
    return math.log(p / (1.0 - p))


def probability(log_variance: float) -> float:
    """The p whose σ² has this logarithm."""
    return 1.0 / (1.0 + math.exp(-log_variance))


def target(centre: float, z: float) -> float:
    """Where evidence z draws a value that rests at ``centre``."""
    return centre + REACH * z / math.sqrt(DOUBT + z**2)


@dataclass
class Knob:
    """One number that is tuned: its logarithm, and the running moments of its slope."""

    value: float
    """The logarithm: of σ² for a site, of λ for weight decay."""
    centre: float
    """Where it rests without evidence."""
    count: int = 0
    mean: float = 0.0
    square: float = 0.0

    @property
    def slope(self) -> float:
        """The mean of the recent slopes."""
        return self.mean / self._weight

    @property
    def error(self) -> float:
        """The standard error of :attr:`slope`."""
        effective = min(self.count, (1.0 + MEMORY) / (1.0 - MEMORY))
        square = self.square / self._weight
        spread = square - self.slope**2 if self.count > 3 else square
        return math.sqrt(max(spread, 0.0) / max(effective, 1.0))

    @property
    def z(self) -> float:
        """The evidence: the slope over its standard error; none from one measurement."""
        return self.slope / self.error if self.count > 1 and self.error > 0.0 else 0.0

    @property
    def _weight(self) -> float:
        return 1.0 - MEMORY**self.count if self.count else 1.0

    def move(self, slope: float, rate: float) -> None:
        """Take in one slope and move the value to the mean of the targets so far."""
        self.count += 1
        self.mean = MEMORY * self.mean + (1.0 - MEMORY) * slope
        self.square = MEMORY * self.square + (1.0 - MEMORY) * slope**2
        share = rate / (1.0 - (1.0 - rate) ** self.count)
        self.value += share * (target(self.centre, self.z) - self.value)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return asdict(self)
