"""The census sees what a pass draws, and a draw that nothing accounts for."""

import importlib
import importlib.util
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from undrop.intercept import Sites

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture
def census(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("census")


FAMILIES = {
    ("timm", "vision_transformer"): ({"drop-path", "dropout"}, ""),
    ("transformers", "wav2vec2"): ({"layer-drop", "attention", "dropout"}, "NumPy's random"),
    ("peft", "LOHA"): ({"mask", "module-drop"}, ""),
    ("pyg", "utils.dropout_edge"): ({"dropout"}, "rand"),
}


@pytest.mark.parametrize(("library", "family"), FAMILIES)
def test_the_census_misses_no_draw(census, library, family):
    package = {"pyg": "torch_geometric"}.get(library, library)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    row = census.examine(library, family)
    kinds, named = FAMILIES[(library, family)]
    assert row["status"] == "built"
    assert set(row["kinds"]) == kinds
    assert row["draws"] > 0
    assert row["missed"] == {}
    assert not row["silent"]
    assert bool(row["named"]) == bool(named)
    assert all(who.startswith(named) for who in row["who"])


class Own(nn.Module):
    """A model with a dropout, and draws of two generators that undrop names."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(x) + torch.randn(()) + random.random()


def built(census):
    return census.Built(Own(), torch.ones(3, 4))


class FirstLayerStays(nn.Module):
    """Draws a number for its first layer, too, which it never skips."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            chance = torch.rand([])
            if i == 0 or chance >= 0.1:
                x = layer(x)
        return x


def test_a_number_that_nothing_reads_is_not_missed(census):
    model = census.Built(FirstLayerStays(), torch.ones(3, 4))
    unread = census.unread_draws(model)
    assert unread == {"": 1}
    draws, found = census.plain_draws(model), census.find_sites(model)
    assert [s.kind for s in found] == ["layer-drop"]
    assert census.missed_draws(draws, found, model.model, unread) == {}
    assert census.missed_draws(draws, found, model.model, type(unread)()) == {"": 1}


def test_a_draw_that_is_not_named_is_missed_by_place(census):
    model = built(census)
    draws = census.plain_draws(model)
    found = census.find_sites(model)
    assert sum(draw.calls for draw in draws) == 3
    unread = census.unread_draws(model)
    assert census.missed_draws(draws, found, model.model, unread) == {}
    assert census.missed_draws(draws, Sites(found, found.unaccounted[:1]), model.model, unread) == {
        "": 1
    }
    assert census.missed_draws(draws, Sites([], found.unaccounted), model.model, unread) == {
        "drop": 1
    }


@pytest.mark.parametrize("hidden", ["randn", "Python's random"])
def test_a_draw_that_is_not_named_is_seen_by_its_effect(census, hidden):
    model = built(census)
    named = {other.function for other in census.find_sites(model).unaccounted}
    assert named == {"randn", "Python's random"}

    def agree(held):
        passes = [census.pass_without_noise(model, number, held) for number in (2, 3)]
        return census.equal(*passes)

    assert agree(named)
    assert not agree(named - {hidden})
