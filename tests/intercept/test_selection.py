"""Choosing and weighting sites by name pattern."""

import pytest
import torch
from torch import nn

import undrop
from device import new_generator
from undrop.errors import OptionError, SiteSelectionError
from undrop.intercept import Selection

NAMES = ("encoder.0", "encoder.1", "decoder.0")


@pytest.mark.parametrize(
    ("patterns", "weights"),
    [
        (None, (1, 1, 1)),
        ("encoder.*", (1, 1, 0)),
        (["encoder.1", "decoder.?"], (0, 1, 1)),
        (("*",), (1, 1, 1)),
        ({"*": 0.5}, (0.5, 0.5, 0.5)),
        ({"*": 1.0, "encoder.*": 2.0, "encoder.1": 0.0}, (2, 0, 1)),
        ({"encoder.1": 3.0, "encoder.*": 2.0}, (2, 2, 0)),
    ],
)
def test_the_last_pattern_that_matches_decides(patterns, weights):
    assert tuple(Selection(patterns).weight(name) for name in NAMES) == weights


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan"), "x", "1", None, [1.0]])
def test_weights_out_of_range_raise_an_error(weight):
    with pytest.raises(OptionError, match="site weights must be finite and not negative"):
        Selection({"*": weight})


@pytest.mark.parametrize(
    ("patterns", "got"),
    [(3, "int"), ([3], r"\[3\]"), ([["*"]], r"\[\['\*'\]\]"), ({None: 1.0}, r"\{None: 1.0\}")],
)
def test_patterns_that_are_not_strings_are_refused(patterns, got):
    message = f"sites must be a name pattern, a list of them, or a mapping .* to weights, got {got}"
    with pytest.raises(OptionError, match=message):
        Selection(patterns)


def test_a_pattern_that_matches_nothing_is_named_with_the_nearest_site():
    message = (
        r"no dropout site matches 'encodr.1' \(did you mean 'encoder.1'\?\): the sites are enc"
    )
    with pytest.raises(SiteSelectionError, match=message):
        Selection(["decoder.*", "encodr.1"]).check(NAMES)
    with pytest.raises(SiteSelectionError, match=r"matches 'xyzzy': the sites are encoder.0, "):
        Selection("xyzzy").check(NAMES)


def test_all_weights_zero_is_an_error():
    with pytest.raises(SiteSelectionError, match="every dropout site has weight 0: choose"):
        Selection({"*": 0.0}).check(NAMES)


def model():
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 4), nn.Dropout(0.2)
    return nn.Sequential(*layers, nn.Linear(4, 3)).double()


X, Y = torch.randn(2, 3, dtype=torch.float64), torch.tensor([0, 2])


def explicit(sites):
    return undrop.Analytic(engine="exact", sites=sites)(model(), X, Y).parts["explicit"]


def test_the_explicit_part_is_the_weighted_sum_over_sites():
    first, last = explicit("2"), explicit(["4"])
    assert explicit(None) == pytest.approx(first + last, rel=1e-12)
    assert explicit({"2": 0.5, "4": 3.0}) == pytest.approx(0.5 * first + 3 * last, rel=1e-12)
    assert explicit({"*": 2.0, "4": 0.0}) == pytest.approx(2 * first, rel=1e-12)


@pytest.mark.parametrize("engine", ["tangent", "antithetic", "reverse"])
def test_sites_that_are_not_chosen_are_off(engine):
    """The implicit part equals that of a model in which the other dropout has p = 0."""
    other = model()
    other[2].p = 0.0
    parts = [
        undrop.Analytic(explicit=None, engine=engine, sites=sites, generator=new_generator(0))(
            net, X, Y
        ).parts
        for net, sites in ((model(), "4"), (other, None))
    ]
    assert parts[0] == pytest.approx(parts[1], rel=1e-12)


@pytest.mark.parametrize("objective", [undrop.Analytic, undrop.Dropout])
def test_objectives_refuse_a_pattern_that_matches_nothing(objective):
    with pytest.raises(SiteSelectionError, match="no dropout site matches '3'"):
        objective(sites="3")(model(), X, Y)
