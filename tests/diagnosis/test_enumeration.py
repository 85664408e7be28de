"""R_drop and its parts on nets with few masks, against an independent enumeration."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrop
from device import new_generator
from undrop.diagnosis.measure.estimates import Samples
from undrop.diagnosis.measure.model import MeasuredModel, collect
from undrop.diagnosis.measure.r_drop import Expander, sample_parts
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
        """½σ²·diag of JᵀHJ, and of the whole Hessian in z minus JᵀHJ, entry by entry."""
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
        centered = h - h.mean(0)
        h = centered / (centered.square().mean(0) + norm.eps).sqrt()
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
    """A loss that is not a likelihood and not convex."""
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


def at_every_mask(case):
    """Return the mean of the parts over all masks, by site; "" is all sites together."""
    loss = case.loss if case.loss is cubic else None
    subject = MeasuredModel(case.model, collect([(case.inputs, case.targets)], 1), loss=loss)
    sums = {name: [0.0, 0.0, 0.0] for name in ("", *case.sites)}
    with subject.preserve():
        (batch,) = subject.batches
        expansion, base = Expander(subject)(batch), subject.loss_value(batch, {})
        shapes = {site.name: site.mask_shape for site, _ in expansion.sites_and_leaves}
        sizes = [n for n, _ in case.sites.values()]
        for dropped in product((False, True), repeat=len(case.p)):
            drops = torch.tensor(dropped)
            weight = float(torch.where(drops, case.p, 1 - case.p).prod())
            values = torch.where(drops, -1.0, case.p / (1 - case.p)).split(sizes)
            noise = {
                name: value.view(shape)
                if value.numel() == math.prod(shape)
                else value.expand(shape)
                for (name, shape), value in zip(shapes.items(), values, strict=True)
            }
            every, terms = sample_parts(expansion, noise)
            found = {"": every}
            for name, order in terms.sites.items():
                alone = subject.loss_value(batch, {name: noise[name]}) - base - order.directional
                found[name] = (alone, order.half_quadratic, order.curvature)
            for name, parts in found.items():
                sums[name] = [s + weight * x for s, x in zip(sums[name], parts, strict=True)]
    return sums


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_the_mean_over_all_masks_equals_an_independent_enumeration(make):
    case = make()
    expected, found = case.expected(), at_every_mask(case)
    assert found.keys() == expected.keys()
    for name, parts in found.items():
        assert parts == pytest.approx(expected[name], abs=TOLERANCE)


def close(found, truth):
    """None of about 60 figures may be off by 4.5 of its standard errors."""
    return abs(found.value - truth) <= 4.5 * found.stderr + 1e-12


def parts_agree(parts, expected):
    r_drop, half, curvature = expected
    truth = (r_drop, half, curvature, r_drop - half - curvature)
    return all(map(close, parts, truth))


def study(case, draws=500):
    pairs = [(case.inputs, case.targets)]
    options = {"implicit": False, "seconds": 1e6, "draws": draws, "progress": False}
    return undrop.diagnose(case.model, pairs, generator=new_generator(0), **options).explicit


@pytest.fixture(scope="module")
def sampled():
    case = two_layers(batch=3)
    return case, study(case)


def test_sampled_parts_agree_with_an_independent_enumeration(sampled):
    case, found = sampled
    expected = case.expected()
    assert parts_agree(found.parts, expected[""])
    for name, effect in found.sites.items():
        assert parts_agree(effect.parts, expected[name])
        assert close(effect.share, expected[name][1] / expected[""][1])
    assert found.parts.rest.stderr < found.parts.r_drop.stderr  # one mask serves all parts


def test_the_curve_in_p_agrees_with_an_independent_enumeration(sampled):
    case, found = sampled
    assert [round(point.p, 6) for point in found.curve] == [0.1, 0.2, 0.35, 0.5, 0.65, 0.8]
    for point in found.curve:
        assert parts_agree(point.parts, case.expected(point.factor)[""])


def test_class_shares_agree_with_an_independent_sum(sampled):
    case, found = sampled
    zero = torch.zeros_like(case.p)
    j = torch.autograd.functional.jacobian(lambda z: case.forward(case.inputs, z), zero)
    p = case.forward(case.inputs, zero).softmax(-1).unsqueeze(-1)
    v = j - (p * j).sum(1, keepdim=True)
    by_class = (p * v.square() * (case.p / (1 - case.p))).sum((0, 2))
    truth = (by_class / by_class.sum()).detach().tolist()
    assert len(found.classes) == len(truth)
    for each in found.classes:
        assert close(each.share, truth[each.number])


def test_parts_add_up_to_r_drop_and_shares_to_one(sampled):
    _, found = sampled
    for parts in (found.parts, *(effect.parts for effect in found.sites.values())):
        assert parts.r_drop.value == pytest.approx(
            parts.half_quadratic.value + parts.curvature.value + parts.rest.value, abs=1e-15
        )
    assert sum(effect.share.value for effect in found.sites.values()) == pytest.approx(1.0)


def test_batches_are_weighted_by_their_number_of_terms():
    big, small = two_layers(batch=4), two_layers(batch=1)
    pairs = [(case.inputs, case.targets) for case in (big, small)]
    subject = MeasuredModel(big.model, collect(pairs, 2))
    samples = Samples()
    with subject.preserve():
        for batch, value in zip(subject.batches, (1.0, 6.0), strict=True):
            samples.add(batch.number, Expander(subject)(batch).count, value)
    assert samples.mean(lambda x: x).value == pytest.approx(0.8 * 1.0 + 0.2 * 6.0)
