"""Unusual models and losses: every engine is right, or refuses."""

import pytest
import torch

import odd_functions  # noqa: F401, which adds models to odd_models
import odd_shapes  # noqa: F401, which adds models to odd_models
import undrop
from odd_models import LOSSES, MODELS, problem
from random_checks import (
    STEP,
    brute_force,
    compare,
    compare_fraction,
    compare_reverse,
    noise_of,
)
from random_models import RandomProblem
from undrop.engines import Antithetic, Auto, Tangent

NOT_REPEATED = (
    "moving mean in an attribute",
    "last hidden state",
    "Python's SystemRandom",
    "a fresh NumPy generator",
    "a global generator",
    "a generator in an object",
    "a generator in a dict in a list",
    "a clock",
    "a counter",
    "a Sobol sequence",
)
"""Two passes of these differ, so there is nothing to compare with."""


def auto():
    engine = Auto(STEP)
    return engine


@pytest.mark.parametrize("name", sorted({*MODELS, *LOSSES} - set(NOT_REPEATED)))
def test_every_engine_is_right_on_an_odd_model_or_refuses_it(name):
    p = problem(name)
    draw = noise_of(p, 1)
    wanted = brute_force(p, draw)
    found = {
        "antithetic": compare(p, Antithetic(STEP), draw, wanted),
        "a second step": compare(p, Antithetic(STEP), draw, wanted),
        "auto": compare(p, auto(), draw, wanted),
        "tangent": compare(p, Tangent(), draw, wanted),
    }
    if isinstance(p.inputs, torch.Tensor):
        found["half"] = compare_fraction(RandomProblem(p, 0, name), draw)
    assert set(found.values()) <= {"right", "refused"}, found
    assert found["antithetic"] == found["auto"] == "right"


BLIND = (
    "a number read from the batch",
    "detached norm",
    "divided by itself",
    "hook",
    "hook where there is a graph",
    "moving mean in a buffer",
    "no_grad inside",
    "reversed gradient",
    "steps as long as the batch allows",
    "vector quantization",
)
"""Reverse mode misses a part of what noise does here."""


@pytest.mark.parametrize("name", sorted({*MODELS, *LOSSES} - set(NOT_REPEATED)))
def test_the_reverse_engine_names_what_it_misses(name, caplog):
    p = problem(name)
    draw = noise_of(p, 1)
    found = compare_reverse(p, draw, brute_force(p, draw))
    said = any("misses a part of what dropout does" in r.getMessage() for r in caplog.records)
    assert said == (name in BLIND), found
    assert said or found in ("right", "refused")


@pytest.mark.parametrize("name", NOT_REPEATED)
def test_passes_that_can_not_be_repeated_are_refused(name):
    p = problem(name)
    with pytest.raises(undrop.errors.EngineError, match=r"two passes of .* without noise differ"):
        undrop.Analytic()(p.model, p.inputs, p.targets)
