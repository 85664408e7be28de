"""Learning rates as functions of how far the training is: no state, so nothing to resume."""

from __future__ import annotations

import math
from typing import NamedTuple

from undrop.lab.train.config import ScheduleConfig

__all__ = ["Progress", "rate"]


class Progress(NamedTuple):
    """How far a training is, in each of the units that a schedule may count in."""

    step: int  # optimizer steps done
    epoch: float  # epochs done, with the part of the present one
    done: float  # the part of the whole training that is done, in [0, 1]


def rate(schedule: ScheduleConfig, progress: Progress) -> float:
    """The factor on the learning rate.

    With ``w`` the warmup's steps the factor is ``min(1, (step + 1) / w)`` times

    - constant: 1;
    - step: ``factor`` to the power of the number of milestones (in epochs) passed;
    - cosine: ``floor + (1 - floor) · ½(1 + cos(π · done))``.
    """
    warm = min(1.0, (progress.step + 1) / schedule.warmup) if schedule.warmup else 1.0
    if schedule.name == "step":
        passed = sum(progress.epoch >= milestone for milestone in schedule.milestones)
        return float(warm * schedule.factor**passed)
    if schedule.name == "cosine":
        falling = 0.5 * (1.0 + math.cos(math.pi * progress.done))
        return warm * (schedule.floor + (1.0 - schedule.floor) * falling)
    return warm
