import math

import pytest

from undrop.lab.train.config import ScheduleConfig
from undrop.lab.train.optimizers import RunProgress, lr_factor


def at(schedule, *, step=0, epoch=0.0, done=0.0):
    return lr_factor(ScheduleConfig.model_validate(schedule), RunProgress(step, epoch, done))


def test_the_constant_schedule_rises_during_warmup():
    schedule = {"name": "constant", "warmup": 4}
    assert [at(schedule, step=s) for s in (0, 1, 3, 4, 100)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert at({"name": "constant"}) == 1.0


def test_the_step_schedule_drops_at_each_milestone():
    schedule = {"name": "step", "milestones": [2, 5], "factor": 0.1}
    assert [at(schedule, epoch=e) for e in (0, 1.99, 2.0, 5.5)] == pytest.approx([1, 1, 0.1, 0.01])


def test_the_cosine_schedule_follows_its_formula():
    assert at({"name": "cosine"}, done=0.0) == 1.0
    assert at({"name": "cosine"}, done=0.25) == pytest.approx(0.5 + 0.5 * math.sqrt(0.5))
    assert at({"name": "cosine"}, done=1.0) == pytest.approx(0.0)
    assert at({"name": "cosine", "floor": 0.1}, done=1.0) == pytest.approx(0.1)
    assert at({"name": "cosine", "warmup": 2}, done=0.5) == pytest.approx(0.25)
