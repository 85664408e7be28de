"""A plan that is right at the first step is proven again for new branches, shapes and weights."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrop
from engine_helpers import BOTH, evaluate, gradient, random_signs, relative, seeded
from problems import D, Problem
from undrop.engines import Antithetic, ScaledNoise
from undrop.errors import EngineError
from undrop.intercept import Interception, call, keep_buffers
from undrop.losses import CrossEntropy
from undrop.rng_snapshot import RngSnapshot

ONE_PASS = "antithetic: one stacked pass"
TWO_PASSES = "antithetic: two passes, since its examples interact"


class Net(nn.Module):
    """Two layers with a dropout between them, and a function that a test chooses at the end."""

    def __init__(self, way, p=0.3):
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(4, 8), nn.Dropout(p), nn.Linear(8, 3)
        self.way = way
        self.mixes = False
        self.gate = nn.Parameter(torch.zeros(()))
        self.to(D)

    def forward(self, x):
        return self.way(self, self.two(self.drop(torch.tanh(self.one(x)))))


def problem(way, batch=6, seed=0):
    torch.manual_seed(seed)
    x, y = torch.randn(batch, 4, dtype=D), torch.randint(3, (batch,))
    return Problem(Net(way), x, y, CrossEntropy())


def wanted(p, draw, h=1e-5):
    """The gradient of ℓ + uᵀHu + ∂ℓ/∂ε from plain passes, one after the other."""
    rng, outputs = RngSnapshot(p.model), []
    for epsilon in (0.0, h, -h):
        rng.restore()
        with keep_buffers(p.model), Interception(p.model, ScaledNoise(draw, epsilon)):
            outputs.append(call(p.model, p.inputs))
    rng.restore()
    f, plus, minus = outputs
    total, _ = p.loss.combined(f, (plus - minus) / (2 * h), p.targets, "hessian", BOTH)
    return gradient(total, p.model)


def assert_right(p, engine, seed=1):
    draw = random_signs(p, seed)
    expected = wanted(p, draw)
    found = evaluate(Antithetic(1e-4), p, draw, BOTH)
    assert found.engine == engine
    assert relative(gradient(found.total, p.model), expected) < 1e-4


def centered(h):
    return h - h.mean(0)


BRANCHES = {
    "an attribute": lambda net, h: centered(h) if net.mixes else h,
    "the data": lambda net, h: centered(h) if h.detach().abs().max() > 10 else h,
}


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("name", BRANCHES)
def test_another_branch_is_proven_before_it_is_trusted(name, fraction):
    p = problem(BRANCHES[name])
    if fraction == 1.0:
        assert_right(p, ONE_PASS)
        assert_right(p, ONE_PASS)
    else:
        evaluate(Antithetic(1e-4), p, seeded(0), fraction=fraction)
    p.model.mixes = True
    p.inputs.mul_(100.0)
    with torch.no_grad():
        p.model.two.weight.mul_(10.0)
    if fraction == 1.0:
        assert_right(p, TWO_PASSES)
    else:
        with pytest.raises(EngineError, match="fraction < 1 needs independent examples"):
            evaluate(Antithetic(1e-4), p, seeded(0), fraction=fraction)


def test_another_branch_of_independent_examples_stays_one_pass():
    p = problem(lambda net, h: F.layer_norm(h, (3,)) if net.mixes else h)
    assert_right(p, ONE_PASS)
    p.model.mixes = True
    assert_right(p, ONE_PASS)


def test_a_random_branch_is_proven_with_the_same_random_numbers():
    """One of two layers, chosen by Python's generator: every step is right, for either layer."""
    p = problem(lambda net, h: centered(h) if random.random() < 0.3 else h)
    random.seed(1)
    engines = []
    for seed in range(8):
        draw = random_signs(p, seed)
        expected = wanted(p, draw)
        found = evaluate(Antithetic(1e-4), p, draw, BOTH)
        engines.append(found.engine)
        assert relative(gradient(found.total, p.model), expected) < 1e-4
    assert TWO_PASSES in engines


def test_a_gate_that_starts_at_zero_hides_nothing():
    """h + α·mean(h) over the batch with α = 0: the output is right, the gradient of α is not."""
    p = problem(lambda net, h: h + net.gate * h.mean(0))
    assert_right(p, TWO_PASSES)
    assert p.model.gate == 0.0


def test_examples_that_begin_to_interact_are_found():
    """Divided by the largest entry of the batch once that is above 10: no branch, no new shape."""
    p = problem(lambda net, h: h / h.abs().max().clamp(min=10.0))
    assert_right(p, ONE_PASS)
    with torch.no_grad():
        p.model.two.weight.mul_(100.0)
    engines = [evaluate(Antithetic(1e-4), p, seeded(0), BOTH).engine for _ in range(16)]
    assert engines[-1] == TWO_PASSES
    assert_right(p, TWO_PASSES)


def test_a_stacked_pass_is_proven_for_every_shape():
    """Nine examples interact, others do not."""
    p = problem(lambda net, h: centered(h) if len(h) in (9, 18) else h)
    for batch in (4, 5, 6, 7, 8, 10, 11, 9):
        q = problem(p.model.way, batch)
        q = Problem(p.model, q.inputs, q.targets, q.loss)
        assert_right(q, TWO_PASSES if batch == 9 else ONE_PASS)


def in_pairs(net, h):
    """Each example sees its neighbor, as two views of one thing do."""
    pairs = h.view(-1, 2, 3)
    return (pairs + pairs.mean(1, keepdim=True)).flatten(0, 1)


@pytest.mark.parametrize("batch", [4, 6, 8, 12])
def test_pairs_of_examples_are_not_torn_apart(batch):
    p = problem(in_pairs, batch)
    assert_right(p, ONE_PASS)
    with pytest.raises(EngineError, match="fraction < 1 needs independent examples"):
        evaluate(Antithetic(1e-4), p, seeded(0), fraction=0.5)


class Counting(Net):
    """Keeps a mean, or a count, of what it has seen in a buffer."""

    def __init__(self, update):
        super().__init__(None)
        self.register_buffer("seen", torch.zeros(3, dtype=D))
        self.way = lambda net, h: (update(net.seen, h.detach()), h)[1]


COUNTS = {
    "mean": lambda seen, h: seen.mul_(0.9).add_(0.1 * h.mean(0)),
    "sum": lambda seen, h: seen.add_(h.sum(0)),
    "count": lambda seen, h: seen.add_(len(h)),
}


@pytest.mark.parametrize("start", [0.0, 1000.0], ids=["at first", "later"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("name", COUNTS)
def test_a_buffer_that_counts_examples_counts_each_once(name, fraction, start):
    """Also if it has counted many before, so that a step changes it little."""
    torch.manual_seed(0)
    model = Counting(COUNTS[name])
    x, y = torch.randn(6, 4, dtype=D), torch.randint(3, (6,))
    model.seen.fill_(start)
    with torch.no_grad(), Interception(model, lambda site, h: h):
        model(x)
    once = model.seen.clone()
    model.seen.fill_(start)
    try:
        undrop.Analytic(fraction=fraction)(model, x, y)
    except EngineError as error:
        assert fraction < 1 and "buffer 'seen' depends on all examples" in str(error)  # noqa: PT017, PT018
        return
    torch.testing.assert_close(model.seen - start, once - start, rtol=0.1, atol=0.05)


class WithSummary(Net):
    """Returns the logits and a number that depends on all examples."""

    def __init__(self, summary):
        super().__init__(None)
        self.summary = summary
        self.way = lambda net, h: (h, net.summary(h))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("summary", [lambda h: h.mean(), lambda h: h.square().sum()])
def test_an_output_of_the_whole_batch_is_the_one_of_a_plain_pass(summary, fraction):
    torch.manual_seed(0)
    model = WithSummary(summary)
    x, y = torch.randn(6, 4, dtype=D), torch.randint(3, (6,))
    expected = model.eval()(x)[1]
    model.train()
    try:
        step = undrop.Analytic(fraction=fraction)(model, x, y)
    except EngineError as error:
        assert fraction < 1 and "an output without a batch depends on all" in str(error)  # noqa: PT017, PT018
        return
    torch.testing.assert_close(step.output[1], expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(
    "norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm], ids=["old", "new"]
)
def test_spectral_norm_has_one_weight_in_all_passes_of_a_step(norm, fraction):
    """The power iteration of spectral norm changes a buffer in every pass."""
    torch.manual_seed(0)
    net = nn.Sequential(norm(nn.Linear(4, 8)), nn.Tanh(), nn.Dropout(0.3), norm(nn.Linear(8, 3)))
    p = Problem(net.to(D), torch.randn(6, 4, dtype=D), torch.randint(3, (6,)), CrossEntropy())
    if fraction == 1.0:
        assert_right(p, ONE_PASS)
    else:
        evaluate(Antithetic(1e-4), p, seeded(0), fraction=fraction)
    mixing = Problem(Mixed(*net), p.inputs, p.targets, p.loss)
    assert_right(mixing, TWO_PASSES)


class Mixed(nn.Sequential):
    def forward(self, x):
        return centered(super().forward(x))


GENERATOR = np.random.default_rng(0)
ROWS = {
    "NumPy": lambda h: torch.from_numpy(np.random.rand(len(h), 1)),
    "Python": lambda h: torch.tensor([[random.random()] for _ in h], dtype=D),
    "Gamma": lambda h: torch.distributions.Gamma(torch.full((len(h), 1), 2.0, dtype=D), 1).sample(),
    "Beta": lambda h: torch.distributions.Beta(torch.full((len(h), 1), 2.0, dtype=D), 1).sample(),
    "Dirichlet": lambda h: torch.distributions.Dirichlet(h.new_ones(len(h), 3)).sample(),
    "nn.init": lambda h: nn.init.normal_(h.new_empty(len(h), 1)),
    "aten.bernoulli": lambda h: torch.ops.aten.bernoulli.p(h.new_empty(len(h), 1), 0.5),
    "aten.rand": lambda h: torch.ops.aten.rand([len(h), 1], dtype=D),
    "rand": lambda h: torch.rand(len(h), 1, dtype=D),
}


@pytest.mark.parametrize("source", ROWS)
def test_two_passes_draw_the_same_random_numbers_from_every_source(source):
    """Numbers for each row: a stacked pass would draw others, so the model runs twice."""
    p = problem(lambda net, h: h * (1.0 + ROWS[source](h.detach())))
    assert_right(p, TWO_PASSES)


def test_finding_sites_does_not_advance_a_generator_that_the_model_holds():
    p = problem(lambda net, h: h * (1.0 + torch.rand((), generator=net.own, dtype=D)))
    p.model.own = torch.Generator().manual_seed(3)
    before = p.model.own.get_state()
    undrop.sites(p.model, p.inputs)
    assert torch.equal(p.model.own.get_state(), before)
    assert_right(p, ONE_PASS)


def test_a_pass_that_is_abandoned_does_not_change_a_buffer():
    """The site's p changes, so the first attempt fails after the buffer has moved."""
    torch.manual_seed(0)
    model = Counting(COUNTS["mean"])
    x, y = torch.randn(6, 4, dtype=D), torch.randint(3, (6,))
    objective = undrop.Analytic()
    objective(model, x, y)
    model.seen.zero_()
    model.last = nn.Dropout(0.2)
    way = model.way
    model.way = lambda net, h: net.last(way(net, h))
    with torch.no_grad(), keep_buffers(model), Interception(model, lambda site, h: h):
        model(x)
        once = model.seen.clone()
    objective(model, x, y)
    torch.testing.assert_close(model.seen, once, rtol=1e-2, atol=1e-3)
