"""Noise on a fraction of the batch: means and covariances, over every part of a batch and all signs."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from engine_helpers import (
    BOTH,
    EXPLICIT,
    IMPLICIT,
    Fixed,
    design,
    evaluate,
    gradient,
    random_signs,
    relative,
    seeded,
)
from problems import D, Problem, problem
from undrop.engines import Antithetic, Exact, Tangent
from undrop.errors import EngineError
from undrop.intercept import Interception, no_noise
from undrop.losses import FORMS, CrossEntropy, Generic, as_loss
from undrop.nn import WeightDrop

ENGINES = pytest.mark.parametrize(
    ("engine", "tolerance"),
    [(Antithetic(1e-4), 1e-6)],
    ids=["antithetic"],
)


@pytest.fixture
def parts(monkeypatch):
    """Yield draws for all parts of a batch that may carry noise, each with a whole design of signs."""

    def every(p, batch, rows):
        for chosen in itertools.combinations(range(batch), rows):
            others = [i for i in range(batch) if i not in chosen]
            order = torch.tensor([*others, *chosen])
            with monkeypatch.context() as patch:
                patch.setattr(torch, "randperm", lambda *_, **__: order)  # noqa: B023
                yield from design(p)

    return every


def four_examples():
    p = problem("mlp")
    torch.manual_seed(1)
    return replace(p, inputs=torch.randn(4, 2, dtype=D), targets=torch.tensor([0, 2, 1, 1]))


def uneven():
    """Time first, with examples of three, two and one term."""
    targets = torch.tensor([[0, 3, -100], [2, 1, -100], [1, -100, 2]])
    return replace(problem("lstm"), inputs=torch.randn(3, 3, 2, dtype=D), targets=targets)


@ENGINES
@pytest.mark.parametrize(
    ("make", "batch", "batch_dim"), [(four_examples, 4, 0), (uneven, 3, 1)], ids=["even", "uneven"]
)
def test_with_a_fraction_the_explicit_part_keeps_its_mean(
    parts, make, batch, batch_dim, engine, tolerance
):
    p = make()
    how = {"fraction": 2 / batch, "batch_dim": batch_dim}
    found = [evaluate(engine, p, draw, EXPLICIT, **how).total for draw in parts(p, batch, 2)]
    total = torch.stack(found).mean()
    exact = evaluate(Exact(), p, seeded(0), EXPLICIT).total
    assert total.item() == pytest.approx(exact.item(), rel=tolerance)
    assert relative(gradient(total, p.model), gradient(exact, p.model)) < tolerance


@pytest.mark.parametrize("form", FORMS)
def test_with_a_fraction_the_explicit_part_keeps_its_mean_in_every_form(parts, form):
    p = four_examples()
    found = [
        evaluate(Antithetic(1e-4), p, draw, EXPLICIT, form, fraction=0.5).total
        for draw in parts(p, 4, 2)
    ]
    exact = evaluate(Exact(), p, seeded(0), EXPLICIT, form).total
    assert torch.stack(found).mean().item() == pytest.approx(exact.item(), rel=1e-6)


def covariance(engine, p, draws, **how):
    rows = [gradient(evaluate(engine, p, draw, IMPLICIT, **how).total, p.model) for draw in draws]
    found = torch.stack(rows)
    assert found.mean(0).norm() < 1e-9
    return found.T @ found / len(found)


@ENGINES
def test_with_a_fraction_the_implicit_part_keeps_its_covariance(parts, engine, tolerance):
    p = four_examples()
    found = covariance(engine, p, parts(p, 4, 2), fraction=0.5)
    assert relative(found, covariance(Tangent(), p, design(p))) < tolerance


def drop_connect():
    layers = nn.Linear(2, 3), nn.Tanh(), WeightDrop(nn.Linear(3, 3), ["weight"], 0.4)
    p = four_examples()
    return Problem(nn.Sequential(*layers).to(D), p.inputs, p.targets, CrossEntropy())


def directions(p):
    """σ·∂²ℓ_n/∂W∂z for each example n: (examples, entries of z, parameters)."""
    w = {name: value.detach() for name, value in p.model.named_parameters()}
    plain = nn.Sequential(p.model[0], p.model[1], p.model[2].module)

    def loss(w, z, x, y):
        named = {name.replace("module.", ""): value for name, value in w.items()}
        named["2.weight"] = named["2.weight"] * (1 + z)
        return nn.functional.cross_entropy(functional_call(plain, named, x), y)

    rows = []
    for x, y in zip(p.inputs, p.targets, strict=True):
        mixed = jacrev(grad(loss, argnums=1))(w, torch.zeros(3, 3, dtype=D), x, y)
        rows.append(torch.cat([m.reshape(9, -1) for m in mixed.values()], 1))
    return torch.stack(rows) * (0.4 / 0.6) ** 0.5 / len(p.inputs)


@ENGINES
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_with_a_fraction_terms_between_examples_shrink_if_they_share_noise(
    parts, rows, engine, tolerance
):
    """They shrink by (r-1)/(B-1); the terms of each example with itself stay the same."""
    torch.manual_seed(0)
    p = drop_connect()
    each = directions(p)
    own = torch.einsum("nzp,nzq->pq", each, each)
    all_pairs = each.sum(0).T @ each.sum(0)
    found = covariance(engine, p, parts(p, 4, rows), fraction=rows / 4)
    assert relative(found, own + (rows - 1) / 3 * (all_pairs - own)) < tolerance


@ENGINES
@pytest.mark.parametrize(
    ("make", "batch_dim"), [(four_examples, 0), (uneven, 1)], ids=["even", "uneven"]
)
def test_with_a_fraction_the_loss_covers_the_batch_and_the_output_keeps_its_order(
    make, batch_dim, engine, tolerance
):
    p = make()
    whole = evaluate(engine, p, seeded(2), BOTH)
    found = evaluate(engine, p, seeded(2), BOTH, fraction=0.3, batch_dim=batch_dim)
    assert float(found.parts["loss"]) == pytest.approx(float(whole.parts["loss"]), rel=tolerance)
    assert float(sum(found.parts.values())) == pytest.approx(found.total.item(), rel=1e-12)
    # Examples share the noise on a weight, so those without noise have an error of O(ε₀).
    of_order = 1e-3 if make is uneven else 1e-7
    torch.testing.assert_close(found.output, whole.output, rtol=tolerance, atol=of_order)


def negated(draw):
    return Fixed(draw.row * -1.0)


def test_with_shared_noise_the_error_of_examples_without_noise_has_mean_zero(monkeypatch):
    """η and -η swap the weights that these examples see, so the mean error over both is O(ε₀²)."""
    monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n))
    torch.manual_seed(0)
    layers = WeightDrop(nn.Linear(2, 3), ["weight"], 0.4), nn.Tanh(), nn.Linear(3, 3)
    p, epsilon = replace(drop_connect(), model=nn.Sequential(*layers).to(D)), 1e-2
    clean = _without_noise(p)
    how = {"fraction": 0.25, "batch_dim": 0}
    draw = random_signs(p, 1)
    one = evaluate(Antithetic(epsilon), p, draw, BOTH, **how).output
    other = evaluate(Antithetic(epsilon), p, negated(draw), BOTH, **how).output
    assert relative(one, clean) > 0.1 * epsilon  # the error is there
    assert relative((one + other) / 2, clean) < 10 * epsilon**2
    exact = evaluate(Antithetic(epsilon), p, draw, BOTH, **how, exact_output=True).output
    torch.testing.assert_close(exact, clean)


def _without_noise(p):
    with Interception(p.model, no_noise):
        return p.model(p.inputs)


class BatchFirst(nn.Module):
    """The batch is dimension 0 of inputs and outputs, and dimension 1 of the state."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.3)
        self.lstm = nn.LSTM(2, 3, batch_first=True)

    def forward(self, x, state):
        return self.lstm(self.dropout(x), state)


@ENGINES
@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_a_state_with_the_batch_in_another_dimension_stays_in_order(fraction, engine, tolerance):
    state = torch.randn(1, 4, 3, dtype=D), torch.randn(1, 4, 3, dtype=D)
    inputs = (torch.randn(4, 5, 2, dtype=D), state)
    p = Problem(BatchFirst().to(D), inputs, torch.randint(3, (4, 5)), CrossEntropy())
    whole = evaluate(engine, p, seeded(2), BOTH)
    found = evaluate(engine, p, seeded(2), BOTH, fraction=fraction)
    torch.testing.assert_close(found.output, whole.output, rtol=tolerance, atol=1e-7)


class Deep(nn.Module):
    """Returns a state with the batch in dimension 1, and a number for each layer."""

    def __init__(self, layers):
        super().__init__()
        self.dropout = nn.Dropout(0.3)
        self.lstm = nn.LSTM(2, 5, layers, batch_first=True)
        self.scale = nn.Parameter(torch.randn(layers))

    def forward(self, x):
        output, state = self.lstm(self.dropout(x))
        return output, state, self.scale


@pytest.mark.parametrize(("layers", "batch"), [(2, 4), (1, 2), (3, 6), (4, 4)])
def test_the_batch_is_found_if_there_are_as_many_layers_as_examples(layers, batch):
    inputs = torch.randn(batch, 3, 2, dtype=D)
    p = Problem(Deep(layers).to(D), inputs, torch.randint(5, (batch, 3)), CrossEntropy())
    found = evaluate(Antithetic(1e-4), p, seeded(2), BOTH, fraction=0.5)
    whole = p.model.eval()(inputs)
    torch.testing.assert_close(found.output, whole, rtol=1e-6, atol=1e-7)


class Out:
    """An output of a class that torch does not know as a container."""

    def __init__(self, logits, state):
        self.logits, self.state, self.name = logits, [state, None], "out"


@dataclass(frozen=True, slots=True)
class Slots:
    logits: Tensor
    state: list[Tensor | None]
    name: str = "out"


class Items(dict):
    __getattr__ = dict.__getitem__


MAKERS = {
    "attributes": Out,
    "slots": lambda logits, state: Slots(logits, [state, None]),
    "items": lambda logits, state: Items(logits=logits, state=[state, None], name="out"),
}


class Returning(nn.Module):
    def __init__(self, net, make):
        super().__init__()
        self.net, self.make, self.last = net, make, None

    def forward(self, x):
        state = self.net[:-1](x)
        self.last = self.make(self.net[-1](state), state)
        return self.last


@ENGINES
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_output_of_any_class_is_without_noise_and_in_order(make, fraction, engine, tolerance):
    p = four_examples()
    p = replace(p, model=Returning(p.model, make))
    found = evaluate(engine, p, seeded(2), BOTH, fraction=fraction).output
    assert found is not p.model.last  # the model may use its output again
    plain = p.model.eval()(p.inputs)
    assert type(found) is type(plain)
    assert found.name == "out"
    assert found.state[1] is None
    for mine, theirs in [(found.logits, plain.logits), (found.state[0], plain.state[0])]:
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=1e-7)


@ENGINES
def test_inputs_of_any_class_are_reordered(engine, tolerance):
    class Doubled(nn.Sequential):
        def forward(self, x):
            return super().forward(x.logits + x.state[0])

    p = four_examples()
    made = Out(p.inputs, torch.randn(4, 2, dtype=D))
    p = replace(p, model=Doubled(*p.model), inputs=made)
    found = evaluate(engine, p, seeded(2), BOTH, fraction=0.5)
    torch.testing.assert_close(found.output, p.model.eval()(made), rtol=tolerance, atol=1e-7)


def weighed(output, target):
    return (nn.functional.cross_entropy(output, target["y"], reduction="none") * target["w"]).mean()


@ENGINES
@pytest.mark.parametrize("tree", [lambda y, w: (y, w), lambda y, w: {"y": y, "w": w}])
def test_with_a_fraction_targets_may_be_several_tensors(parts, tree, engine, tolerance):
    p = four_examples()
    targets = tree(p.targets, torch.tensor([0.5, 2.0, 1.0, 0.1], dtype=D))
    loss = Generic(lambda f, y: weighed(f, y if isinstance(y, dict) else {"y": y[0], "w": y[1]}))
    p = replace(p, targets=targets, loss=loss)
    found = [evaluate(engine, p, draw, EXPLICIT, fraction=0.5).total for draw in parts(p, 4, 2)]
    exact = evaluate(Exact(), p, seeded(0), EXPLICIT).total
    assert torch.stack(found).mean().item() == pytest.approx(exact.item(), rel=tolerance)


def only(p, dim):
    """The targets of the last half of the batch alone; the others are ignored."""
    targets = p.targets.clone()
    targets.narrow(dim, 0, targets.shape[dim] - targets.shape[dim] // 2).fill_(-100)
    return replace(p, targets=targets)


@pytest.mark.parametrize("part", [EXPLICIT, IMPLICIT], ids=["explicit", "implicit"])
@pytest.mark.parametrize(
    ("name", "dim"),
    [("mlp", 0), ("cnn", 0), ("lstm", 1), ("gru", 1), ("transformer", 0)],
)
def test_a_fraction_of_a_half_has_the_regularizers_of_its_own_terms(monkeypatch, name, dim, part):
    p = four_examples() if name == "mlp" else problem(name)
    size = p.targets.shape[dim]
    monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n))
    row = next(design(p)).row
    how = {"fraction": (size // 2) / size}
    found = evaluate(Antithetic(1e-4), p, Fixed(row), part, **how).total
    whole = evaluate(Tangent(), only(p, dim), Fixed(row), part).total
    half, all_terms = (int((q.targets != -100).sum()) for q in (only(p, dim), p))
    rho = (size // 2) / size
    share = half / all_terms / (rho if part is EXPLICIT else rho**0.5)
    assert found.item() == pytest.approx(share * whole.item(), rel=1e-5)
    assert relative(gradient(found, p.model), share * gradient(whole, p.model)) < 1e-5


@ENGINES
def test_a_fraction_in_which_all_targets_are_ignored_works(parts, engine, tolerance):
    p = replace(four_examples(), targets=torch.tensor([-100, 0, 2, -100]))
    loss = nn.functional.cross_entropy(p.model.eval()(p.inputs), p.targets)
    p.model.train()
    for draw in parts(p, 4, 1):
        found = evaluate(engine, p, draw, fraction=0.25)
        assert float(found.parts["loss"]) == pytest.approx(loss.item(), rel=tolerance)


@ENGINES
def test_a_fraction_that_rounds_to_the_whole_batch_uses_every_example(engine, tolerance):
    p = four_examples()
    found = evaluate(engine, p, seeded(2), fraction=0.99)
    assert torch.equal(found.total, evaluate(engine, p, seeded(2)).total)


@ENGINES
def test_a_fraction_is_refused_if_inputs_or_outputs_lack_the_batch(engine, tolerance):
    p = four_examples()
    refusal = r"fraction < 1 needs independent examples, but in .* interact: use fraction=1"
    with pytest.raises(EngineError, match=refusal):
        evaluate(engine, p, seeded(0), fraction=0.5, batch_dim=1)
    pooled = replace(p, model=Pooled(p.model), loss=Generic(lambda f, y: f.square().mean()))
    with pytest.raises(EngineError, match=refusal):
        evaluate(engine, pooled, seeded(0), fraction=0.5)


class Pooled(nn.Sequential):
    """A net with an output that has no batch dimension."""

    def forward(self, x):
        return super().forward(x).mean(0)


@ENGINES
def test_a_fraction_is_refused_with_batch_norm_in_train_mode(engine, tolerance):
    p = problem("batch_norm")
    with pytest.raises(EngineError, match=r"batch norm in train mode mixes .*: use fraction=1"):
        evaluate(engine, p, seeded(0), fraction=0.5)
    for module in p.model:
        module.train(isinstance(module, nn.Dropout))
    assert evaluate(engine, p, seeded(0), fraction=0.5).total.isfinite()


class TimeFirst(nn.Module):
    """Takes the batch first and works with time first, as torch's own attention layers do."""

    def __init__(self):
        super().__init__()
        self.dropout, self.inner, self.last = nn.Dropout(0.3), nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.inner(self.dropout(x).transpose(0, 1))).transpose(0, 1))


class Attending(nn.Module):
    """Torch's attention layer, which has time first inside of it."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x):
        h = self.dropout(x)
        return self.attention(h, h, h)[0]


@pytest.mark.parametrize("model", [TimeFirst(), Attending()])
def test_a_time_dimension_as_long_as_the_batch_is_not_mistaken_for_it(monkeypatch, model):
    torch.manual_seed(0)
    x, y = torch.randn(4, 4, 2).double(), torch.randint(2, (4, 4))
    p = Problem(model.double().train(), x, y, CrossEntropy())
    monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n))
    row = next(design(p)).row
    found = evaluate(Antithetic(1e-4), p, Fixed(row), EXPLICIT, fraction=0.5).total
    expected = evaluate(Tangent(), only(p, 0), Fixed(row), EXPLICIT).total
    assert relative(gradient(found, p.model), gradient(expected, p.model)) < 1e-5


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.2], dtype=D)),
    ],
    ids=["sum", "class weights"],
)
def test_with_a_fraction_the_loss_is_exact_for_sums_and_class_weights(loss):
    p = replace(four_examples(), loss=as_loss(loss))
    found = evaluate(Antithetic(1e-4), p, seeded(0), fraction=0.5)
    expected = loss(p.model.eval()(p.inputs), p.targets)
    assert float(found.parts["loss"]) == pytest.approx(expected.item(), rel=1e-6)
