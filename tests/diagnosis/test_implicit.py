"""Gradient noise against closed forms and enumeration, and the statistics that compare it."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrop
from device import new_generator
from problems import problem
from undrop.diagnosis.measure import implicit
from undrop.diagnosis.measure.gradients import GradientNoise, Sketch, group_of
from undrop.diagnosis.measure.implicit import (
    cosine,
    eigenspace_overlap,
    measure_implicit,
    trace_of_means,
)
from undrop.diagnosis.measure.model import MeasuredModel, collect
from undrop.diagnosis.measure.timing import Budget


def implicit_effect(model, batches, draws, **options):
    subject = MeasuredModel(
        model,
        collect(batches, 100),
        generator=new_generator(0),
        **options,
    )
    with subject.preserve():
        return measure_implicit(subject, Budget(1e9), draws=draws)


def small_net():
    torch.manual_seed(0)
    a, b = nn.Linear(3, 4), nn.Linear(4, 3)
    model = nn.Sequential(a, nn.Tanh(), nn.Dropout(0.3), b).double()
    return model, torch.randn(1, 3).double(), torch.tensor([1])


def gradients_by_mask(model, x, y, p):
    """∇ℓ for every mask of the four units, and the masks' probabilities."""
    a, b = model[0], model[3]
    rows, weights = [], []
    for dropped in product((0, 1), repeat=4):
        d = torch.tensor(dropped).double()
        h = torch.tanh(a(x)) * (1 - d) / (1 - p)
        gradients = torch.autograd.grad(F.cross_entropy(b(h), y), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in gradients]))
        weights.append(p ** sum(dropped) * (1 - p) ** (4 - sum(dropped)))
    return torch.stack(rows), torch.tensor(weights).double()


def analytic_directions(model, x, y, p):
    """σ·∇(∂ℓ/∂z_j) for every unit: ξ_approx is their sum with random signs."""
    a, b = model[0], model[3]
    z = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    loss = F.cross_entropy(b(torch.tanh(a(x)) * (1 + z)), y)
    (slopes,) = torch.autograd.grad(loss, z, create_graph=True)
    rows = []
    for slope in slopes:
        gradients = torch.autograd.grad(slope, list(model.parameters()), retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return (p / (1 - p)) ** 0.5 * torch.stack(rows)


def test_traces_and_cosine_agree_with_enumeration():
    model, x, y = small_net()
    found = implicit_effect(model, [(x, y)], 300)
    g, w = gradients_by_mask(model, x, y, 0.3)
    diagonal = w @ g**2 - (w @ g) ** 2
    xi = analytic_directions(model, x, y, 0.3).square().sum(0)
    checks = [
        (found.trace_dropout, float(diagonal.sum())),
        (found.trace_analytic, float(xi.sum())),
        (found.analytic_ratio, float(xi.sum() / diagonal.sum())),
        (found.cosine, float(F.cosine_similarity(diagonal, xi, dim=0))),
        (found.groups["0"].trace_dropout, float(diagonal[:16].sum())),
        (found.groups["3"].trace_analytic, float(xi[16:].sum())),
    ]
    for figure, truth in checks:
        assert abs(figure.value - truth) <= 4.0 * figure.stderr  # 300 samples
        assert figure.stderr < 0.15 * truth
    assert found.trace_batch is None  # one batch says nothing about the noise between batches
    assert found.batch_ratio is None


def test_mini_batch_noise_has_the_variance_of_the_batch_gradients():
    model, _, _ = small_net()
    x, y = torch.randn(400, 3).double(), torch.randint(3, (400,))
    batches = [(x[i : i + 2], y[i : i + 2]) for i in range(0, 400, 2)]
    subject = MeasuredModel(model, collect(batches, 200))
    noise = GradientNoise(subject)
    rows = []
    for one, two in batches:
        gradients = torch.autograd.grad(
            F.cross_entropy(model.eval()(one), two), list(model.parameters())
        )
        rows.append(torch.cat([g.flatten() for g in gradients]))
    model.train()
    truth = float(torch.stack(rows).var(0).sum())
    pairs = zip(subject.batches[::2], subject.batches[1::2], strict=True)
    with subject.preserve():
        samples = [
            sum(float(part.square().sum()) for part in noise.sample_batching(*pair))
            for pair in pairs
        ]
    mean = torch.tensor(samples).mean().item()
    error = torch.tensor(samples).std().item() / len(samples) ** 0.5
    assert abs(mean - truth) <= 4.0 * error  # 100 pairs


def test_the_trace_of_a_mean_of_k_noise_samples_falls_as_one_over_k():
    made = problem("mlp")
    found = implicit_effect(made.model, [(made.inputs, made.targets)], 160, loss=made.loss)
    assert [point.k for point in found.shrinking] == [1, 2, 4, 8]
    for point in found.shrinking[1:]:
        for now, before in (
            (point.dropout, found.trace_dropout),
            (point.analytic, found.trace_analytic),
        ):
            error = (now.stderr**2 + before.stderr**2) ** 0.5
            assert abs(now.value - before.value) <= 4.5 * error


def test_a_noise_sample_has_the_covariance_of_the_dropout_gradient():
    """Scaled by 1/√2, the difference of two dropout gradients has one's covariance."""
    model, x, y = small_net()
    subject = MeasuredModel(model, collect([(x, y)], 1), generator=new_generator(0))
    noise = GradientNoise(subject)
    with subject.preserve():
        samples = torch.stack(
            [
                torch.cat([part.flatten() for part in noise.sample_dropout(subject.batches[0])])
                for _ in range(800)
            ]
        )
    g, w = gradients_by_mask(model, x, y, 0.3)
    truth = (g * w[:, None]).T @ g - torch.outer(w @ g, w @ g)
    error = (samples.T @ samples / 800 - truth).norm() / truth.norm()
    assert error < 0.15  # 800 samples: about 2/√800


def test_sketches_keep_inner_products():
    torch.manual_seed(0)
    parts = [[torch.randn(30, 40), torch.randn(800)] for _ in range(6)]
    flat = torch.stack([torch.cat([p.flatten() for p in sample]) for sample in parts]).double()
    whole = Sketch(2000, 4096, torch.device("cpu"))
    assert whole.is_identity
    assert torch.equal(torch.stack([whole(sample) for sample in parts]), flat)
    short = Sketch(2000, 1024, torch.device("cpu"))
    assert short.width == 1024
    kept = torch.stack([short(sample) for sample in parts])
    assert kept.shape == (6, 1024)
    error = (kept @ kept.T - flat @ flat.T) / flat.square().sum(1).mean()
    assert float(error.abs().max()) < 4.0 / 1024**0.5


def test_a_sketched_model_is_reported_as_sketched(monkeypatch):
    monkeypatch.setattr(implicit, "SKETCH_WIDTH", 16)
    model, x, y = small_net()
    found = undrop.diagnose(model, [(x, y)] * 4, seconds=1e3, draws=4, progress=False)
    assert found.implicit.kept == 16
    assert "random sketch of 16 numbers of 31" in " ".join(str(found).split())


def test_overlap_and_cosine_of_known_covariances_are_right():
    torch.manual_seed(0)
    # two strong directions of forty, and two others
    mine = torch.randn(64, 40).double() * torch.tensor([30.0, 20.0] + [1.0] * 38)
    same = torch.randn(64, 40).double() * torch.tensor([30.0, 20.0] + [1.0] * 38)
    other = torch.randn(64, 40).double() * torch.tensor([1.0] * 38 + [30.0, 20.0])
    assert eigenspace_overlap(mine, same, 2).value > 0.95
    assert eigenspace_overlap(mine, other, 2).value < 0.05
    assert cosine(mine**2, same**2).value == pytest.approx(1.0, abs=0.05)
    assert abs(cosine(mine**2, other**2).value) < 0.05
    k = trace_of_means(mine, 4)
    assert abs(k.value - (900 + 400 + 38)) < 4.0 * k.stderr


def test_the_cosine_is_unbiased_with_few_samples():
    """Equal diagonals have cosine 1 for any number of samples; a plain ratio is far smaller."""
    torch.manual_seed(0)
    found, plain = [], []
    for _ in range(50):
        a, b = (torch.randn(6, 200).double() ** 2 for _ in range(2))
        found.append(cosine(a, b).value)
        plain.append(float(F.cosine_similarity(a.mean(0), b.mean(0), dim=0)))
    assert sum(plain) / 50 < 0.8
    assert sum(found) / 50 > 0.95


def test_gradient_noise_is_grouped_by_top_level_module_or_list_element():
    assert group_of("encoder.layers.0.weight") == "encoder"
    assert group_of("layers.3.linear.weight") == "layers.3"
    assert group_of("0.weight") == "0"
    assert group_of("scale") == "scale"


def test_a_model_without_trainable_parameters_is_refused():
    model, x, y = small_net()
    model.requires_grad_(False)
    with pytest.raises(undrop.errors.GradientsDisabledError, match="no parameter of Sequential"):
        undrop.diagnose(model, [(x, y)], seconds=1, progress=False)
    found = undrop.diagnose(model, [(x, y)], implicit=False, draws=2, progress=False)
    assert found.implicit is None
