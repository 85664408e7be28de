"""Models in which examples interact: two passes or forward mode, no fraction, no exact figures."""

import logging

import pytest
import torch
from torch import nn

import undrop
from engine_helpers import BOTH, EXPLICIT, IMPLICIT, evaluate, gradient, random_signs, relative
from problems import Problem, classify
from undrop.engines import Antithetic, Auto, Tangent
from undrop.errors import EngineError


class Clip(nn.Module):
    """Every example is compared with every other one."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 5), nn.Linear(4, 5), nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(torch.tanh(self.a(x))) @ self.drop(self.b(x)).T


class Graph(nn.Module):
    """The adjacency of the nodes is in the model."""

    def __init__(self, nodes=6):
        super().__init__()
        self.register_buffer("adjacency", torch.rand(nodes, nodes).softmax(-1))
        self.one, self.drop, self.two = nn.Linear(4, 5), nn.Dropout(0.2), nn.Linear(5, 3)

    def forward(self, x):
        return self.two(self.adjacency @ self.drop(torch.tanh(self.adjacency @ self.one(x))))


class Centered(nn.Sequential):
    def forward(self, x):
        h = super().forward(x)
        return h - h.mean(0)


class AcrossExamples(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.attention, self.last = (
            nn.Dropout(0.2),
            nn.MultiheadAttention(4, 1),
            nn.Linear(4, 3),
        )

    def forward(self, x):
        h = self.drop(x).unsqueeze(1)  # the examples are the sequence
        return self.last(self.attention(h, h, h)[0].squeeze(1))


INTERACTING = {
    "contrastive": lambda: classify(Clip(), 6, 4, classes=6),
    "graph": lambda: classify(Graph(), 6, 4),
    "centered": lambda: classify(
        Centered(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3)), 6, 4
    ),
    "attention across examples": lambda: classify(AcrossExamples(), 6, 4),
}


@pytest.mark.parametrize("name", INTERACTING)
def test_if_examples_interact_the_model_runs_twice_and_logs_it(name, caplog):
    p = INTERACTING[name]()
    draw = random_signs(p, 3)
    found = [evaluate(Antithetic(1e-4), p, draw, BOTH) for _ in range(2)]
    if name != "contrastive":  # each side is a separate block, so one pass is right
        assert found[0].engine == "antithetic: two passes, since its examples interact"
        assert len(caplog.messages) == 1
    wanted = gradient(evaluate(Tangent(), p, draw, BOTH).total, p.model)
    assert relative(gradient(found[0].total, p.model), wanted) < 1e-5


@pytest.mark.parametrize("name", INTERACTING)
def test_if_examples_interact_a_fraction_is_refused(name):
    p = INTERACTING[name]()
    message = (
        f"fraction < 1 needs independent examples, but in {type(p.model).__name__} its examples"
    )
    with pytest.raises(EngineError, match=message):
        undrop.Analytic(fraction=0.5)(p.model, p.inputs, p.targets)


@pytest.mark.portable
@pytest.mark.parametrize("engine", [Auto, Antithetic])
@pytest.mark.parametrize("name", INTERACTING)
def test_if_examples_interact_gradients_under_bfloat16_autocast_stay_close(name, engine):
    """Two passes in bfloat16 are for models that forward mode can't take; they lose more digits."""
    for form in (EXPLICIT, IMPLICIT):
        off = []
        for seed in range(4):
            p = INTERACTING[name]()
            draw = random_signs(p, seed)
            wanted = gradient(evaluate(Tangent(), p, draw, form).total, p.model)
            narrow = Problem(p.model.float(), p.inputs.float(), p.targets, p.loss)
            with torch.autocast(p.inputs.device.type, torch.bfloat16):
                total = evaluate(engine(), narrow, draw, form).total
            off.append(relative(gradient(total, narrow.model).double(), wanted))
        assert sum(off) / len(off) < (0.03 if engine is Auto else 0.1)


def test_the_reason_for_two_passes_is_logged_once_per_model(caplog):
    p = INTERACTING["centered"]()
    with caplog.at_level(logging.INFO, "undrop"):
        for engine in ("auto", "antithetic") * 2:
            undrop.Analytic(engine=engine)(p.model, p.inputs, p.targets)
    assert [line.split(", since")[0] for line in caplog.messages] == [
        "undrop uses the tangent engine for Centered",
        "undrop runs Centered twice per step",
    ]


@pytest.mark.parametrize("name", INTERACTING)
def test_if_examples_interact_a_diagnosis_calls_no_figure_exact(name):
    """p is so small that most masks are equal."""
    p = INTERACTING[name]()
    for module in p.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.02
    batches = [(p.inputs, p.targets)]
    found = undrop.diagnose(p.model, batches, seconds=1e3, draws=4, implicit=False, progress=False)
    parts = found.explicit.parts
    assert "(exact)" not in f"{parts.r_drop} {parts.half_quadratic} {parts.rest}"
