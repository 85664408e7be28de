"""One stacked pass: what it agrees with, when it is trusted, and what it costs."""

import copy
import gc
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import undrop
from device import new_generator
from engine_helpers import (
    EXPLICIT,
    design,
    evaluate,
    gradient,
    random_signs,
    relative,
    seeded,
)
from problems import D, classify
from undrop.engines import Antithetic, Exact, Tangent
from undrop.errors import EngineError
from undrop.lab.models import AWDLSTM, GPT

ONE_PASS = "antithetic: one stacked pass"


class ReluTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encoder(x))


class Gated(nn.Module):
    """Kinks by comparison, where, clamp and the largest of several entries."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(9, 3)

    def forward(self, x):
        h = self.drop(self.first(x))
        gated = torch.where(h > 0.1, h, 0.3 * h).clamp(-0.8, 0.8) + h * (h > 0) + h.abs()
        largest = torch.maximum(gated, h.square()).max(-1, keepdim=True).values
        return self.last(torch.cat((gated, largest + h.amax(-1, keepdim=True)), -1))


KINKED = {
    "ReLU MLP": lambda: classify(
        nn.Sequential(
            *(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.LeakyReLU()),
            *(nn.Dropout(0.2), nn.Linear(64, 3)),
        ),
        *(32, 20),
    ),
    "ConvNet with max pooling": lambda: classify(
        nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 6, 3), nn.ReLU6(), nn.Dropout(0.2), nn.AdaptiveMaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(24, 3)),
        ),
        *(6, 1, 12, 12),
    ),
    "ReLU transformer": lambda: classify(ReluTransformer(), 4, 5, 8),
    "hand-written gates": lambda: classify(Gated(), 16, 6),
    "batch norm in train mode": lambda: classify(
        nn.Sequential(
            *(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3)),
            *(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)),
        ),
        *(16, 6),
    ),
}


@pytest.mark.parametrize("name", KINKED)
def test_a_stacked_pass_on_a_net_with_kinks_has_the_gradient_of_the_tangent_engine(name):
    """Within 1 % at ε₀ = 0.05, and closer for a smaller ε₀."""
    p = KINKED[name]()
    draw = random_signs(p, 3)
    wanted = gradient(evaluate(Tangent(), p, draw, EXPLICIT).total, p.model)
    errors = []
    for epsilon in (0.05, 0.005):
        found = evaluate(Antithetic(epsilon), p, draw, EXPLICIT)
        assert found.engine == ONE_PASS
        errors.append(relative(gradient(found.total, p.model), wanted))
    assert errors[0] < 0.01, errors
    assert errors[1] < 1e-3, errors


def test_without_midpoints_the_gradient_on_a_relu_net_is_biased():
    """Without midpoints the error is far larger, so the rule is needed."""
    p = KINKED["ReLU MLP"]()
    draw = random_signs(p, 3)
    wanted = gradient(evaluate(Tangent(), p, draw, EXPLICIT).total, p.model)
    from undrop.engines.base import Request
    from undrop.intercept import Batch

    batch = Batch(p.model, p.inputs, p.targets, loss=p.loss)
    request = Request(batch=batch, draw=draw, coefficients=EXPLICIT)
    found = Antithetic(0.05).without_plan(request, "a test asks for it")
    assert relative(gradient(found.total, p.model), wanted) > 0.1


def test_over_all_signs_the_gradient_on_a_relu_net_has_no_bias():
    """The mean over a design of signs is the expectation: it agrees with the exact engine's."""
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.3), nn.Linear(4, 3), nn.ReLU()
    p = classify(nn.Sequential(*layers, nn.Linear(3, 3)), 5, 3)
    total = torch.stack(
        [evaluate(Antithetic(0.05), p, draw, EXPLICIT).total for draw in design(p)]
    ).mean()
    exact = evaluate(Exact(), p, seeded(0), EXPLICIT).total
    assert relative(gradient(total, p.model), gradient(exact, p.model)) < 0.01


class TimeMajor(nn.Module):
    """Flattens (T, B) to one dimension; the examples are the faster index."""

    def __init__(self):
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, x):  # (B, T, 4)
        h = torch.tanh(self.one(x)).transpose(0, 1)  # (T, B, 6)
        return self.two(self.drop(h.flatten(0, 1))).unflatten(0, h.shape[:2]).transpose(0, 1)


class BatchMajor(TimeMajor):
    def forward(self, x):
        h = torch.tanh(self.one(x))
        return self.two(self.drop(h.flatten(0, 1))).unflatten(0, h.shape[:2])


class Positions(nn.Module):
    """A table of as many positions as there are examples."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 5))
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(5, 3)

    def forward(self, x):  # (4, 4, 5)
        return self.last(torch.tanh(self.drop(x + self.table)))


LAYOUTS = {
    "time-major": lambda: classify(TimeMajor(), 6, 5, 4),
    "batch-major": lambda: classify(BatchMajor(), 6, 5, 4),
    "time first": lambda: classify(
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)), 5, 6, 4
    ),
    "as many positions as examples": lambda: classify(Positions(), 4, 4, 5),
}


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_batch_dimension_is_found_wherever_it_is(monkeypatch, name, fraction):
    p = LAYOUTS[name]()
    monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n))
    draw = random_signs(p, 1)
    found = evaluate(Antithetic(1e-4), p, draw, EXPLICIT, fraction=fraction)
    assert found.engine == ONE_PASS
    if fraction == 1.0:
        wanted = gradient(evaluate(Tangent(), p, draw, EXPLICIT).total, p.model)
        assert relative(gradient(found.total, p.model), wanted) < 1e-5
    assert torch.allclose(found.output, p.model.eval()(p.inputs), atol=1e-6)


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_nothing_before_the_first_site_is_computed_twice(fraction):
    trunk, head = nn.Linear(4, 6), nn.Linear(6, 3)
    p = classify(nn.Sequential(trunk, nn.Tanh(), nn.Dropout(0.3), head), 8, 4)
    rows = []
    for layer in (trunk, head):
        layer.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    evaluate(Antithetic(), p, seeded(0), fraction=fraction)
    rows.clear()  # of the proof
    evaluate(Antithetic(), p, seeded(0), fraction=fraction)
    assert rows == [8, 16 if fraction == 1.0 else 10]


def test_an_exact_output_does_not_depend_on_epsilon():
    p = KINKED["ReLU MLP"]()
    plain = p.model.eval()(p.inputs)
    p.model.train()
    for fraction in (1.0, 0.25):
        step = undrop.Analytic(exact_output=True, fraction=fraction)(p.model, p.inputs, p.targets)
        torch.testing.assert_close(step.output, plain, rtol=1e-12, atol=1e-12)
        loss = F.cross_entropy(plain, p.targets)
        assert step.parts["loss"] == pytest.approx(loss.item(), rel=1e-12)


class HostReads(TorchDispatchMode):
    """Counts the operations that wait for the device."""

    WAITS = ("_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero", "_unique2")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.WAITS:
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "make",
    [
        undrop.Analytic,
        partial(undrop.Analytic, fraction=0.25),
        partial(undrop.Analytic, samples=3),
        undrop.Dropout,
        undrop.NoRegularization,
    ],
    ids=["analytic", "quarter", "three samples", "dropout", "none"],
)
def test_a_step_never_waits_for_the_device(make):
    p = KINKED["ReLU MLP"]()
    objective = make()
    for _ in range(2):
        objective(p.model, p.inputs, p.targets).backward()
    with HostReads() as reads:
        objective(p.model, p.inputs, p.targets).backward()
    assert reads.found == []


class OwnNoise(nn.Module):
    """Draws random numbers from a given source."""

    def __init__(self, draw):
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 3)
        self.draw = draw

    def forward(self, x):
        return self.two(self.drop(torch.tanh(self.one(x))) * (1 + self.draw(x)))


HELD = new_generator(3)
SOURCES = {
    "torch": lambda x: torch.rand(len(x), 1, dtype=D, device=x.device),
    "NumPy": lambda x: float(np.random.rand()),
    "Python": lambda x: random.random(),
    "Gamma": lambda x: torch.distributions.Gamma(2.0, 1.0).sample().clamp(max=2.0),
}


@pytest.mark.parametrize("source", SOURCES)
def test_random_numbers_of_the_model_are_the_same_for_both_signs(source):
    p = classify(OwnNoise(SOURCES[source]), 6, 4)
    parts = []
    for _ in range(200):
        parts.append(float(evaluate(Antithetic(), p, seeded(0), EXPLICIT).total.detach()))
    quiet = classify(OwnNoise(lambda x: 0.5), 6, 4)
    scale = float(evaluate(Antithetic(), quiet, seeded(0), EXPLICIT).total.detach())
    assert max(parts) < 20 * scale


def test_a_generator_that_the_model_holds_is_the_same_for_both_signs():
    class Holds(OwnNoise):
        def __init__(self):
            super().__init__(None)
            self.generator = new_generator(3)
            self.draw = lambda x: torch.rand((), generator=self.generator, device=x.device).to(D)

    p = classify(Holds(), 6, 4)
    parts = [
        float(evaluate(Antithetic(), p, seeded(0), EXPLICIT).total.detach()) for _ in range(50)
    ]
    assert max(parts) < 1.0


def test_random_numbers_that_cannot_be_repeated_are_refused():
    counter = iter(range(10_000))
    p = classify(OwnNoise(lambda x: float(next(counter))), 6, 4)
    with pytest.raises(EngineError, match="two passes of OwnNoise without noise differ"):
        evaluate(Antithetic(), p, seeded(0))


def test_epsilon_shrinks_where_sigma_is_large():
    """At p = 0.9999 σ is 100: ε₀·σ stays below 1."""
    p = classify(
        nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.9999), nn.Tanh(), nn.Linear(6, 3)), 6, 4
    )
    draw = random_signs(p, 2)
    wanted = gradient(evaluate(Tangent(), p, draw, EXPLICIT).total, p.model)
    found = gradient(evaluate(Antithetic(), p, draw, EXPLICIT).total, p.model)
    assert relative(found, wanted) < 0.02


def gradients(model, under, x, y, **options):
    objective = undrop.Analytic(generator=new_generator(1), **options)
    found = []
    for _ in range(3):
        under.zero_grad()
        objective(model, x, y).backward()
        found.append(torch.cat([q.grad.flatten() for q in under.parameters()]))
    return torch.stack(found)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.GELU()),
        *(nn.Dropout(0.1), nn.Linear(16, 4)),
    )


def wrapped(model, backend):
    return torch.compile(model, backend=backend)


def in_place(model, backend):
    model.compile(backend=backend)
    return model


def a_part(model, backend):
    model[3] = torch.compile(model[3], backend=backend)
    return model


def a_method(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)
    return model


WAYS = pytest.mark.parametrize("how", [wrapped, in_place, a_part, a_method])


@pytest.mark.parametrize("fraction", [1.0, 0.25])
@WAYS
def test_a_compiled_model_has_the_gradients_of_the_eager_one(how, fraction, backend):
    torch.manual_seed(1)
    x, y = torch.randn(16, 8), torch.randint(4, (16,))
    plain = net()
    wanted = gradients(plain, plain, x, y, fraction=fraction)
    under = net()
    model = how(under, backend)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = gradients(model, under, x, y, fraction=fraction)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


class ChangesItsInputs(nn.Sequential):
    """A model that changes its inputs in place, so that every pass needs a copy of them."""

    def forward(self, x):
        return super().forward(x.mul_(2.0))


@pytest.mark.parametrize("kind", [nn.Sequential, ChangesItsInputs])
def test_a_compiled_model_has_the_eager_gradients_if_another_model_is_deleted_while_it_compiles(
    kind,
):
    torch.manual_seed(1)
    x, y = torch.randn(16, 8), torch.randint(4, (16,))
    plain = kind(*net())
    wanted = gradients(plain, plain, x.clone(), y)
    others = [ChangesItsInputs(nn.Dropout(0.5), nn.Linear(8, 4))]
    undrop.Analytic()(others[0], x.clone(), y)

    def deleting(graph, inputs):
        others.clear()
        gc.collect()
        return graph

    under = kind(*net())
    torch._dynamo.reset()
    found = gradients(torch.compile(under, backend=deleting), under, x.clone(), y)
    assert not others
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@WAYS
def test_the_stacked_pass_is_compiled_by_the_backend_that_the_user_chose(how):
    graphs = []

    def chosen(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    under = net()
    gradients(how(under, chosen), under, torch.randn(16, 8), torch.randint(4, (16,)))
    assert len(graphs) == 1


class Disabled(nn.Sequential):
    """A model that is not compiled, and says so."""

    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


def test_a_model_that_is_kept_from_torch_compile_is_not_compiled(monkeypatch, caplog):
    monkeypatch.setattr(torch, "compile", None)
    model = Disabled(*net())
    gradients(model, model, torch.randn(16, 8), torch.randint(4, (16,)))
    assert "torch.compile" not in caplog.text


def test_a_transformer_compiles_whole_and_once_per_shape(caplog):
    """With attention, a separate head, time first and two lengths: one graph for each length."""

    def run(compiled, lengths):
        torch.manual_seed(0)
        under = GPT(20, size=8, layers=2, heads=2, context=8)
        model = torch.compile(under, backend="eager") if compiled else under
        generator = new_generator(1)
        objective = undrop.Analytic(loss=under.loss(), batch_dim=1, generator=generator)
        tokens = torch.randint(20, (9, 4), generator=new_generator(2))
        for length in lengths:
            inputs = {"tokens": tokens[:length], "logits": False}
            objective(model, inputs, tokens[1 : length + 1]).backward()
        return torch.cat([q.grad.flatten() for q in under.parameters() if q.grad is not None])

    lengths = [8, 6, 8, 6, 8, 8]
    wanted = run(False, lengths)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(run(True, lengths), wanted, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]
    assert "without torch.compile" not in caplog.text


class Unfollowed(nn.Module):
    """A model that torch.compile can't follow as a whole."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.inner(x)


def test_a_model_stays_compiled_if_its_p_changes(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    fast, slow = (undrop.Analytic(generator=new_generator(2)) for _ in range(2))
    eager, compiled = copy.deepcopy(model), torch.compile(model, backend="eager")
    for p in (0.3, 0.6, 0.5):
        model[2].p = eager[2].p = p
        parts = fast(compiled, x, y).parts
        assert parts == pytest.approx(slow(eager, x, y).parts, rel=1e-4)
    assert not [m for m in caplog.messages if "without torch.compile" in m]


def test_a_model_that_does_not_compile_whole_runs_eagerly_and_says_so_once(caplog):
    torch.manual_seed(1)
    x, y = torch.randn(16, 8), torch.randint(4, (16,))
    wanted = gradients(*(2 * [net()]), x, y)
    torch.manual_seed(0)
    under = Unfollowed()
    torch._dynamo.reset()
    found = gradients(torch.compile(under, backend="eager"), under, x, y)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert caplog.text.count("undrop runs Unfollowed without torch.compile") == 1


def broken(graph, inputs):
    raise RuntimeError("no kernel for this CPU.\nSee kernel.cpp:3:1: error: 'vec' is not declared")


def test_a_model_that_the_backend_of_torch_compile_refuses_runs_eagerly_and_the_log_says_why(
    caplog,
):
    torch.manual_seed(1)
    x, y = torch.randn(16, 8), torch.randint(4, (16,))
    wanted = gradients(*(2 * [net()]), x, y)
    under = net()
    torch._dynamo.reset()
    found = gradients(torch.compile(under, backend=broken), under, x, y)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    reason = "(no kernel for this CPU: 'vec' is not declared)."
    assert [line for line in caplog.messages if "undrop" in line] == [
        "undrop runs Sequential without torch.compile: it does not compile as one graph " + reason
    ]


def test_more_shapes_than_torch_compiles_run_eagerly_and_the_log_says_so_once(caplog):
    torch._dynamo.reset()
    plain, under = net(), net()
    model = torch.compile(under, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for size in (8, 10, 12, 14):
            x, y = torch.randn(size, 8), torch.randint(4, (size,))
            found, wanted = gradients(model, under, x, y), gradients(plain, plain, x, y)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert caplog.text.count("more shapes than torch._dynamo.config.recompile_limit") == 1


def test_compile_around_the_step_keeps_the_regularizers():
    torch.manual_seed(1)
    x, y = torch.randn(16, 8), torch.randint(4, (16,))

    def step(objective, model):
        found = objective(model, x, y)
        found.backward()
        return found.total.detach()

    totals = []
    for run in (step, torch.compile(step, backend="eager")):
        objective = undrop.Analytic(generator=new_generator(1))
        totals.append([float(run(objective, net())) for _ in range(2)])
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)


def test_weights_as_long_as_the_stacked_batch_are_not_mistaken_for_it():
    model = AWDLSTM(13, embedding_size=4, hidden_size=6, layers=2).double().train()
    tokens, targets = torch.randint(13, (5, 3)), torch.randint(13, (5, 3))
    objective = undrop.Analytic(loss=model.loss(), batch_dim=1)
    step = objective(model, {"tokens": tokens, "logits": False}, targets)
    assert step.engine == ONE_PASS  # 3 + 3 rows, and 6 hidden units
