"""Which engine ``auto`` chooses: one stacked pass, the tangent engine, or two passes."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrop
from undrop.engines import Antithetic, Auto, Tangent
from undrop.engines.proven import first_unproven_op
from undrop.errors import EngineError, OptionError


class Net(nn.Module):
    """A layer, dropout, a function that a test chooses, and a layer."""

    def __init__(self, way):
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(4, 6), nn.Dropout(0.3), nn.LazyLinear(3)
        self.way = way

    def forward(self, x):
        return self.last(self.way(self.dropout(self.first(x))))


class Doubled(torch.autograd.Function):
    """A custom autograd function made of proven ops."""

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class UnderAutocast(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        return 2 * g


def through_a_slice(h):
    """The tangent enters a tensor by writing into a part of it."""
    buffer = torch.zeros_like(h)
    buffer[:, :2] = h[:, :2]
    return F.glu(buffer)


def through_a_view(h):
    """It enters a view that was taken before."""
    base = torch.zeros_like(h)
    view = base.view(-1)
    base.add_(h)
    return F.glu(view.view_as(h))


@torch.jit.script
def doubled(h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(2.0 * h)


class Twice(nn.Module):
    """The same as a module."""

    def forward(self, h):
        return torch.tanh(2.0 * h)


BLOCKED = {
    "aten::glu": F.glu,
    "aten::_fft_r2c": lambda h: torch.fft.rfft(h).abs(),
    "aten::linalg_qr": lambda h: torch.linalg.qr(h @ h.T + torch.eye(len(h)))[0],
    "aten::glu after a slice": through_a_slice,
    "aten::glu after a view": through_a_view,
    "the autograd function Doubled": Doubled.apply,
    "the autograd function OldStyle": OldStyle.apply,
    "the autograd function UnderAutocast": UnderAutocast.apply,
    "code in TorchScript": doubled,
    "code in TorchScript after a call": torch.jit.script(Twice()),
}
FREE = {
    "activations": lambda h: F.gelu(h).tanh(),
    "unproven, but before the noise": lambda h: h * F.glu(torch.ones(5, 12)),
    "constants of its shape": lambda h: h + F.glu(torch.zeros_like(torch.cat((h, h), -1))),
    "by our own rules": lambda h: F.layer_norm(h, (6,)).softmax(-1),
}


def batch(way):
    torch.manual_seed(0)
    model, x = Net(way), torch.randn(5, 4)
    with torch.no_grad():
        model(x)  # the lazy layer learns its size
    return model, x, torch.randint(3, (5,))


def chosen(objective, model, x, y):
    return objective(model, x, y).engine


@pytest.mark.parametrize("way", [*BLOCKED.values(), *FREE.values()], ids=[*BLOCKED, *FREE])
def test_auto_takes_one_stacked_pass_or_says_why_not(way, caplog):
    model, x, y = batch(way)
    objective = undrop.Analytic()
    with caplog.at_level(logging.INFO, "undrop"):
        engines = {chosen(objective, model, x, y) for _ in range(3)}
    assert len(engines) == 1
    if way is BLOCKED["aten::linalg_qr"]:  # h @ h.T: examples interact
        assert engines == {"antithetic: two passes, since its examples interact"}
        assert len(caplog.messages) == 1
    elif way is FREE["unproven, but before the noise"]:  # a constant with 5 rows, as the batch
        assert engines == {"tangent"}
        assert len(caplog.messages) == 1
    else:
        assert engines == {"antithetic: one stacked pass"}
        kinks = [m for m in caplog.messages if "a kink or a jump" in m]
        assert kinks == caplog.messages
        assert len(kinks) == (way is BLOCKED["aten::_fft_r2c"])  # |z| of a real z has a kink at 0


class Mixed(nn.Sequential):
    """Subtracts the mean over the batch: examples interact."""

    def forward(self, x):
        h = super().forward(x)
        return h - h.mean(0)


def test_auto_takes_the_tangent_engine_where_examples_interact(caplog):
    model = Mixed(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    with caplog.at_level(logging.INFO, "undrop"):
        for _ in range(2):
            assert chosen(undrop.Analytic(), model, x, y) == "tangent"
    assert caplog.messages == [
        "undrop uses the tangent engine for Mixed, since its examples interact."
    ]


class Called(nn.Module):
    """A function or a module, as a layer."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, h):
        return self.way(h)


@pytest.mark.parametrize("way", [doubled, torch.jit.script(Twice())], ids=["function", "module"])
def test_the_tangent_is_not_lost_in_torchscript(way):
    """Torch drops the tangent from the second call with gradients on."""
    found = []
    for part in (Twice(), way):
        torch.manual_seed(0)
        model = Mixed(nn.Linear(4, 6), nn.Dropout(0.3), Called(part), nn.Linear(6, 3)).double()
        x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
        for _ in range(3):
            model(x).sum().backward()
        objective = undrop.Analytic(generator=torch.Generator().manual_seed(1))
        found.append([objective(model, x, y).parts["explicit"] for _ in range(4)])
    assert found[1] == pytest.approx(found[0], rel=1e-3)


@pytest.mark.parametrize("name", BLOCKED)
def test_the_tangent_engine_names_the_unproven_op_and_a_way_out(name):
    model, x, y = batch(BLOCKED[name])
    op = name.split(" after")[0]
    with pytest.raises(EngineError, match=f"no proven rule for {op}: use engine='antithetic'"):
        undrop.Analytic(engine="tangent")(model, x, y)


def test_looking_for_unproven_ops_leaves_the_model_unchanged():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).train()
    x = torch.randn(5, 4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    assert first_unproven_op(model, x) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_an_unknown_engine_raises_an_error_that_lists_all_engines():
    with pytest.raises(
        OptionError,
        match=r"unknown engine 'fast': there are antithetic, reverse, exact, tangent, auto",
    ):
        undrop.Analytic(engine="fast")


@pytest.mark.parametrize("epsilon", [0.0, -0.1, 1.5])
def test_epsilon_out_of_range_raises_an_error(epsilon):
    with pytest.raises(OptionError, match=r"epsilon must lie in \(0, 1\]"):
        Antithetic(epsilon)


def test_every_engine_has_its_name():
    assert Auto().name == "auto"
    assert [type(undrop.Analytic(engine=n).engine) for n in ("tangent", "antithetic")] == [
        Tangent,
        Antithetic,
    ]


@pytest.mark.filterwarnings("ignore:The reduce argument")
@pytest.mark.parametrize(
    ("way", "op"),
    [
        (lambda h: h / h.norm(p=1, dim=1, keepdim=True), "aten::linalg_vector_norm of order 1"),
        (
            lambda h: h.scatter(1, torch.zeros(len(h), 6, dtype=torch.long), h, reduce="multiply"),
            "aten::scatter with reduce",
        ),
        (lambda h: (torch.eye(6).to_sparse() @ h.T).T, "aten::mm of a sparse tensor"),
    ],
)
def test_the_proof_of_an_op_does_not_cover_its_variants(way, op):
    assert first_unproven_op(Net(way), torch.randn(5, 4)) == op


class Late(nn.Module):
    """An unproven op behind a dropout that a test may switch on."""

    def __init__(self, p):
        super().__init__()
        self.first, self.late, self.last = nn.Dropout(p), nn.Dropout(0.3), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.late(torch.asinh(self.first(x))))


def test_a_dropout_that_is_switched_on_later_is_found():
    torch.manual_seed(0)
    model, x, y = Late(0.0).double(), torch.randn(5, 4).double(), torch.randint(3, (5,))
    objective = undrop.Analytic(implicit=False)
    before = objective(model, x, y).parts["explicit"]
    undrop.Analytic(engine="tangent")(model, x, y)
    model.first.p = 0.5
    found = [objective(model, x, y).parts["explicit"] for _ in range(400)]
    exact = undrop.Analytic(engine="exact")(model, x, y).parts["explicit"]
    mean, error = torch.tensor(found).mean(), torch.tensor(found).std() / 20
    assert abs(mean - exact) < 4 * error
    assert abs(before - exact) > 8 * error
    with pytest.raises(EngineError, match="no proven rule for aten::asinh"):
        undrop.Analytic(engine="tangent")(model, x, y)


@pytest.mark.parametrize("engine", ["tangent", "auto"])
def test_a_function_without_forward_mode_that_is_called_later_is_named_or_avoided(engine):
    model = Net(lambda h: torch.tanh(h - h.mean(0)))  # examples interact
    objective = undrop.Analytic(engine=engine)
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    assert objective(model, x, y).engine == "tangent"
    model.way = lambda h: OldStyle.apply(h - h.mean(0))
    if engine == "auto":
        assert objective(model, x, y).engine.startswith("antithetic: two passes")
        return
    with pytest.raises(EngineError, match=r"has no forward mode: use engine='antithetic' \(torch"):
        objective(model, x, y)
