"""The sampled explicit effect: its errors, its derivatives, and that the model does not change."""

import pytest
import torch
from torch import nn

import undrop
from device import new_generator
from problems import PROBLEMS, problem
from undrop.diagnosis.measure.explicit import measure_explicit
from undrop.diagnosis.measure.model import MeasuredModel, collect
from undrop.diagnosis.measure.r_drop import DifferenceExpansion, ReverseExpansion
from undrop.diagnosis.measure.timing import Budget


@pytest.mark.portable
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.4, 0.9])
def test_a_mask_drops_to_zero_in_every_precision(p, dtype):
    """σ·η is exactly -1, at p itself and at a multiple of it."""
    model = nn.Sequential(nn.Linear(2, 90), nn.Dropout(p), nn.Linear(90, 2))
    subject = MeasuredModel(model, collect([(torch.randn(5, 2), torch.zeros(5).long())], 1))
    like = torch.zeros(5, 90, dtype=dtype)
    for factor in (1.0, 0.7):
        noise = subject.draw_masks([(subject.sites[0], like)], factor)["1"]
        assert noise.dtype == dtype
        assert set(noise[noise < 0].tolist()) == {-1.0}


def subject_of(name="mlp", loss=None, batches=1):
    made = problem(name, loss)
    pairs = [(made.inputs, made.targets)] * batches
    generator = new_generator(0)
    return MeasuredModel(made.model, collect(pairs, batches), loss=made.loss, generator=generator)


def test_the_standard_error_is_the_spread_between_repeated_studies():
    """The spread of R_drop in 16 studies with independent masks is the error that each study states."""
    values, errors = [], []
    for seed in range(16):
        subject = subject_of()
        subject.generators = type(subject.generators)(new_generator(seed))
        with subject.preserve():
            found = measure_explicit(subject, Budget(1e9), draws=30)
        values.append(found.parts.r_drop.value)
        errors.append(found.parts.r_drop.stderr)
    spread = torch.tensor(values).std().item()
    # the spread of 16 values has a relative error of 18 % itself
    assert 0.5 < spread / torch.tensor(errors).mean().item() < 1.6


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("loss", ["cross-entropy", "generic"])
def test_second_derivatives_by_differences_agree_with_autograd(name, loss):
    subject = subject_of(name, loss)
    batch = subject.batches[0]
    with subject.preserve():
        exact, rough = ReverseExpansion(subject, batch), DifferenceExpansion(subject, batch)
        noise = subject.draw_masks(exact.sites_and_leaves)
        ours, theirs = exact.terms_along(noise), rough.terms_along(noise)
        assert exact.directional(noise) == pytest.approx(ours.total.directional)
        assert rough.directional(noise) == pytest.approx(ours.total.directional, rel=1e-2, abs=2e-4)
    for a, b in zip(ours.total, theirs.total, strict=True):
        assert a == pytest.approx(b, rel=2e-2, abs=2e-4)
    assert sum(order.half_quadratic for order in ours.sites.values()) == pytest.approx(
        ours.total.half_quadratic
    )
    torch.testing.assert_close(ours.u, theirs.u, rtol=1e-2, atol=1e-3)


class Once(torch.autograd.Function):
    """An op whose gradient has no derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (1 - x.tanh() ** 2)


class Detaching(torch.autograd.Function):
    """An op with a wrong second derivative: torch takes its gradient for a constant."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g.detach() * (1 - x.tanh() ** 2)


class OnceNet(nn.Module):
    op = Once

    def __init__(self):
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.op.apply(self.drop(self.a(x))))


def test_a_model_without_double_backward_is_measured_by_differences():
    model, x = OnceNet().double(), torch.randn(4, 4).double()

    def study(model):
        options = {"implicit": False, "seconds": 1e6, "draws": 20, "progress": False}
        pair = (x, torch.tensor([0, 1, 2, 0]))
        return undrop.diagnose(model, [pair], generator=new_generator(0), **options)

    found = study(model)
    assert found.explicit.differences is not None
    assert "no double backward" in " ".join(str(found).split())  # wherever a line ends
    plain = nn.Sequential(model.a, model.drop, nn.Tanh(), model.b)
    truth = study(plain).explicit
    assert truth.differences is None
    for a, b in zip(found.explicit.parts, truth.parts, strict=True):
        assert a.value == pytest.approx(b.value, rel=0.02, abs=2e-4)


def test_a_wrong_second_derivative_is_found_and_named():
    class DetachingNet(OnceNet):
        op = Detaching

        def forward(self, x):
            return super().forward(x) + self.b(self.drop(self.a(x)))

    pair = (torch.randn(4, 4).double(), torch.tensor([0, 1, 2, 0]))
    options = {"implicit": False, "draws": 2, "progress": False}
    found = undrop.diagnose(DetachingNet().double(), [pair], seconds=1e6, **options)
    (note,) = [note for note in found.notes if "finite differences" in note]
    assert "because an op of the model has no double backward, or a wrong one." in note


def test_measuring_r_drop_leaves_the_model_unchanged():
    made = problem("batch_norm")
    model = made.model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with torch.no_grad():
        undrop.diagnose(
            model, [(made.inputs, made.targets)] * 2, seconds=1e3, draws=2, progress=False
        )
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_same_generator_gives_the_same_figures():
    made = problem("transformer")
    found = [
        undrop.diagnose(
            made.model,
            [(made.inputs, made.targets)],
            seconds=1e6,
            draws=4,
            generator=new_generator(7),
            progress=False,
        ).to_json()
        for _ in range(2)
    ]
    for one in found:
        del one["provenance"]
    assert found[0] == found[1]


def test_a_study_ends_when_its_seconds_are_over():
    made = problem("transformer")
    batches = [(made.inputs, made.targets)] * 8
    found = undrop.diagnose(made.model, batches, seconds=2.0, draws=10**6, progress=False)
    assert found.seconds < 6.0
