"""R_drop and its parts on nets with few masks, against an independent enumeration."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrop
from undrop.nn import LockedDropout, WeightDrop

TOLERANCE = 1e-8


class Case:
    """A net as a module, and again as a function of the relative noise z at its dropped entries."""

    def __init__(self, model, forward, inputs, targets, sites, loss=F.cross_entropy):
        self.model, self.forward = model, forward
        self.inputs, self.targets = inputs, targets
        self.sites = sites  # name -> (number of entries, p)
        self.loss = loss

    @property
    def p(self):
        return torch.tensor(
            [p for n, p in self.sites.values() for _ in range(n)], dtype=torch.float64
        )

    def value(self, z):
        return self.loss(self.forward(self.inputs, z), self.targets)

    @torch.no_grad()
    def r_drop(self, p, within):
        """Σ over masks of the entries in ``within``; the others carry no noise."""
        total = 0.0
        for dropped in product((0, 1), repeat=int(within.sum())):
            d = torch.zeros(len(p), dtype=torch.float64)
            d[within] = torch.tensor(dropped, dtype=torch.float64)
            weight = torch.where(d > 0, p, 1 - p)[within].prod()
            z = torch.where(d > 0, -1.0, p / (1 - p)) * within
            total += float(weight * self.value(z))
        return total - float(self.value(torch.zeros_like(p)))

    def second_order(self, p):
        """½σ²·diag of JᵀHJ and of the whole Hessian in z less that, entry by entry."""
        zero = torch.zeros_like(p)
        whole = torch.autograd.functional.hessian(self.value, zero).diagonal()
        output = self.forward(self.inputs, zero)
        jacobian = torch.autograd.functional.jacobian(lambda z: self.forward(self.inputs, z), zero)
        hessian = torch.autograd.functional.hessian(lambda f: self.loss(f, self.targets), output)
        size = output.numel()
        j, h = jacobian.reshape(size, -1), hessian.reshape(size, size)
        gauss_newton = (j.T @ h @ j).diagonal()
        scale = 0.5 * p / (1 - p)
        return scale * gauss_newton, scale * (whole - gauss_newton)

    def expected(self, factor=1.0):
        p = self.p * factor
        half, curvature = self.second_order(p)
        every = torch.ones(len(p), dtype=torch.bool)
        parts = {"": (self.r_drop(p, every), float(half.sum()), float(curvature.sum()))}
        start = 0
        for name, (n, _) in self.sites.items():
            mine = torch.zeros_like(every)
            mine[start : start + n] = True
            parts[name] = (
                self.r_drop(p, mine),
                float(half[mine].sum()),
                float(curvature[mine].sum()),
            )
            start += n
        return parts


def two_layers(batch=1, loss=F.cross_entropy):
    torch.manual_seed(0)
    a, b, c = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 3)
    model = nn.Sequential(a, nn.Tanh(), nn.Dropout(0.5), b, nn.Tanh(), nn.Dropout(0.3), c).double()

    def forward(x, z):  # every example has the same z: the mean over examples needs no more
        h = torch.tanh(a(x)) * (1 + z[:4])
        return c(torch.tanh(b(h)) * (1 + z[4:7]))

    x = torch.randn(batch, 3).double()
    return Case(model, forward, x, torch.arange(batch) % 3, {"2": (4, 0.5), "5": (3, 0.3)}, loss)


def joint_batch_norm():
    """Batch norm mixes the examples: their masks are enumerated together."""
    torch.manual_seed(1)
    a, norm, c = nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
    model = nn.Sequential(a, nn.Dropout(0.4), norm, nn.Tanh(), c).double()

    def forward(x, z):
        h = a(x) * (1 + z.view(3, 3))
        centred = h - h.mean(0)
        h = centred / (centred.square().mean(0) + norm.eps).sqrt()
        return c(torch.tanh(h * norm.weight + norm.bias))

    x = torch.randn(3, 2).double()
    return Case(model, forward, x, torch.tensor([0, 2, 1]), {"1": (9, 0.4)})


def weights_and_time():
    """DropConnect, and one mask over three time steps."""
    torch.manual_seed(2)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.connect = WeightDrop(nn.Linear(2, 3, bias=False), ["weight"], 0.25)
            self.locked = LockedDropout(0.5)
            self.out = nn.Linear(3, 2)

        def forward(self, x):
            return self.out(self.locked(torch.sin(self.connect(x))))

    model = Net().double()

    def forward(x, z):
        weight = model.connect.module.weight * (1 + z[:6].view(3, 2))
        h = torch.sin(F.linear(x, weight)) * (1 + z[6:9])
        return model.out(h)

    x = torch.randn(3, 1, 2).double()

    def loss(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    sites = {"connect.weight": (6, 0.25), "locked": (3, 0.5)}
    return Case(model, forward, x, torch.tensor([[0], [1], [1]]), sites, loss)


def cubic(output, target):
    """A loss that is no likelihood, and not convex."""
    return (output - target).pow(3).mean() + torch.cos(output).mean()


def any_loss():
    case = two_layers(loss=cubic)
    case.targets = torch.randn(1, 3).double()
    return case


CASES = {
    "two layers": lambda: two_layers(),
    "independent examples": lambda: two_layers(batch=3),
    "batch norm": joint_batch_norm,
    "weights and time": weights_and_time,
    "any loss": any_loss,
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_every_part_agrees_with_an_independent_enumeration(make):
    case = make()
    loss = case.loss if case.loss is cubic else None
    found = undrop.diagnose(
        case.model, [(case.inputs, case.targets)], loss=loss, implicit=False, progress=False
    ).explicit
    assert found.exact
    expected = case.expected()
    tables = {"": found.parts} | {name: effect.parts for name, effect in found.sites.items()}
    assert tables.keys() == expected.keys()
    for name, parts in tables.items():
        r_drop, half, curvature = expected[name]
        assert parts.r_drop.value == pytest.approx(r_drop, abs=TOLERANCE)
        assert parts.half_quadratic.value == pytest.approx(half, abs=TOLERANCE)
        assert parts.curvature.value == pytest.approx(curvature, abs=TOLERANCE)
        assert parts.rest.value == pytest.approx(r_drop - half - curvature, abs=TOLERANCE)
        assert parts.r_drop.value == pytest.approx(
            parts.half_quadratic.value + parts.curvature.value + parts.rest.value, abs=1e-15
        )
        assert parts.r_drop.stderr == 0.0  # one batch, every mask: nothing varies
    for name, effect in found.sites.items():
        share = expected[name][1] / expected[""][1]
        assert effect.share.value == pytest.approx(share, abs=TOLERANCE)
    assert sum(effect.share.value for effect in found.sites.values()) == pytest.approx(1.0)


def test_the_curve_in_p_agrees_with_an_independent_enumeration():
    case = two_layers()
    found = undrop.diagnose(
        case.model, [(case.inputs, case.targets)], implicit=False, progress=False
    ).explicit
    assert [round(point.p, 6) for point in found.curve] == [0.1, 0.2, 0.35, 0.5, 0.65, 0.8]
    for point in found.curve:
        r_drop, half, curvature = case.expected(point.factor)[""]
        assert point.parts.r_drop.value == pytest.approx(r_drop, abs=TOLERANCE)
        assert point.parts.half_quadratic.value == pytest.approx(half, abs=TOLERANCE)
        assert point.parts.curvature.value == pytest.approx(curvature, abs=TOLERANCE)


def test_batches_are_weighted_by_their_number_of_terms():
    big, small = two_layers(batch=4), two_layers(batch=1)
    batches = [(big.inputs, big.targets), (small.inputs + 1.0, small.targets)]
    small.inputs = small.inputs + 1.0
    found = undrop.diagnose(big.model, batches, implicit=False, progress=False).explicit
    values = [case.expected()[""][0] for case in (big, small)]
    assert found.parts.r_drop.value == pytest.approx(0.8 * values[0] + 0.2 * values[1], abs=1e-10)
    assert found.parts.r_drop.stderr > 0.0


@pytest.mark.slow
def test_sixteen_dropped_units_are_enumerated():
    torch.manual_seed(3)
    a, b = nn.Linear(3, 16), nn.Linear(16, 4)
    model = nn.Sequential(a, nn.Tanh(), nn.Dropout(0.5), b).double()
    x, y = torch.randn(5, 3).double(), torch.tensor([0, 1, 2, 3, 0])
    found = undrop.diagnose(model, [(x, y)], implicit=False, seconds=5, progress=False).explicit
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 2.0], dtype=torch.float64)] * 16)
    h = torch.tanh(a(x))
    with torch.no_grad():
        logits = torch.einsum("mi,bi,ci->mbc", masks, h, b.weight) + b.bias
        losses = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(masks)))
        r_drop = float(losses - F.cross_entropy(b(h), y))
    assert found.exact
    assert found.parts.r_drop.value == pytest.approx(r_drop, abs=TOLERANCE)
