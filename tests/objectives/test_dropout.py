"""Drop_k: the plain step bit for bit for k = 1, its distribution, and the noise added back."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrop
from device import new_generator
from problems import Problem, problem
from undrop.intercept import Batch
from undrop.nn import LockedDropout


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def taken(objective, p):
    """The gradient that a step leaves."""
    p.model.zero_grad()
    objective(p.model, p.inputs, p.targets).backward()
    return gradient(p.model)


def by_hand(p, passes=1):
    """The gradients of plain training steps, one after the other."""
    found = []
    for _ in range(passes):
        p.model.zero_grad()
        output = p.model(p.inputs)
        output = output if isinstance(output, torch.Tensor) else output[0]
        F.cross_entropy(output.flatten(0, -2), p.targets.flatten()).backward()
        found.append(gradient(p.model))
    return found


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "gru", "transformer", "batch_norm"])
def test_dropout_with_one_mask_takes_the_plain_step_bit_for_bit(name):
    p = problem(name)
    objective = undrop.Dropout(loss=p.loss)
    for seed in range(3):  # also the first, in which the sites are looked for
        torch.manual_seed(seed)
        ours = taken(objective, p)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        (theirs,) = by_hand(p)
        assert torch.equal(ours, theirs)
        assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("k", [1, 2])
def test_the_first_evaluation_of_dropout_is_the_last_only_for_one_mask(k):
    """After the last evaluation, backward() does not request another one."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    batch = Batch(model, torch.randn(4, 3), torch.randint(2, (4,)), loss=undrop.CrossEntropy())
    assert next(undrop.Dropout(k).evaluations(batch)).last == (k == 1)


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_dropout_with_k_masks_takes_the_mean_of_k_plain_steps(name):
    p = problem(name)
    torch.manual_seed(1)
    ours = taken(undrop.Dropout(3), p)
    torch.manual_seed(1)
    theirs = by_hand(p, 3)
    torch.testing.assert_close(ours, sum(theirs) / 3)


def test_resampled_noise_is_the_difference_of_two_more_masks():
    p = problem("mlp")
    torch.manual_seed(1)
    ours = taken(undrop.Dropout(3, noise="resampled"), p)
    torch.manual_seed(1)
    a, b, c, plus, minus = by_hand(p, 5)
    torch.testing.assert_close(ours, (a + b + c) / 3 + math.sqrt(1 / 3) * (plus - minus))


@pytest.mark.parametrize("noise", ["resampled", "analytic"])
def test_dropout_with_one_mask_adds_no_noise(noise):
    p = problem("mlp")
    torch.manual_seed(1)
    ours = taken(undrop.Dropout(noise=noise), p)
    torch.manual_seed(1)
    assert torch.equal(ours, by_hand(p)[0])


@pytest.mark.parametrize("engine", ["tangent", "reverse"])
def test_analytic_noise_is_the_implicit_part_of_analytic(engine):
    p = problem("lstm")

    def generator():
        return new_generator(2)

    drop = undrop.Dropout(4, noise="analytic", engine=engine, generator=generator())
    step = drop(p.model, p.inputs, p.targets)
    noise = step.parts["implicit"]
    source = generator()
    silent = undrop.Dropout(4, generator=source)
    assert silent(p.model, p.inputs, p.targets).parts["loss"] == step.parts["loss"]
    analytic = undrop.Analytic(explicit=None, engine=engine, generator=source)
    expected = analytic(p.model, p.inputs, p.targets).parts["implicit"]
    assert noise == pytest.approx(math.sqrt(3 / 4) * expected, rel=1e-12)


def test_dropout_masks_are_as_declared_whatever_the_analytic_noise_is():
    class Ratio(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.locked, self.other = LockedDropout(0.5), nn.Dropout(0.5)

        def forward(self, x):
            h = self.layer(x)
            return self.locked(h) / h, self.other(h) / h

    drop = undrop.Dropout(
        2,
        noise="analytic",
        mask="independent",
        sites="locked",
        loss=undrop.MSE(),
        generator=new_generator(0),
    )
    locked, other = drop(Ratio(), torch.randn(20, 4, 3), torch.zeros(20, 4, 3)).output
    torch.testing.assert_close(locked, locked[:1].expand_as(locked))
    assert 0 < (other == 0).double().mean() < 1


@pytest.mark.portable
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.4, 0.9])
def test_dropped_entries_are_zero_in_every_precision(p, dtype):
    """As of torch's own dropout: either exactly 0, or scaled up."""
    model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(p)).to(dtype)
    x = torch.randn(8, 3, generator=new_generator(0)).to(dtype)
    drop = undrop.Dropout(loss=undrop.MSE(), generator=new_generator(0))
    output = drop(model, x, torch.zeros(8, 64, dtype=dtype)).output.detach()
    before = model[0](x).detach()
    kept = output.abs() > 0.5 * before.abs()
    assert 0 < kept.double().mean() < 1
    assert float(output[~kept].abs().max()) == 0.0
    expected = before[kept].double() / (1 - p)
    torch.testing.assert_close(
        output[kept].double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0.0
    )


# Covariances, as traces: over n draws their relative standard error is about 1/sqrt(2n).


def covariance_trace(p, draws, *args, seed=1, **how):
    objective = undrop.Dropout(*args, generator=new_generator(seed), **how)
    rows = torch.stack([taken(objective, p) for _ in range(draws)])
    return rows.var(0).sum().item()


LIGHT = pytest.param(800, id="light")
MANY = pytest.param(3000, id="many", marks=pytest.mark.slow)


@pytest.mark.parametrize("draws", [LIGHT, MANY])
def test_k_masks_have_a_kth_of_the_noise_and_resampling_restores_all_of_it(draws):
    p = problem("mlp")
    one = covariance_trace(p, 2 * draws, seed=0)
    assert covariance_trace(p, draws, 3) == pytest.approx(one / 3, rel=0.1)
    assert covariance_trace(p, draws, 2, noise="resampled") == pytest.approx(one, rel=0.1)


def wide():
    """Many hidden units of little influence, dropped rarely: first order describes this dropout."""
    torch.manual_seed(0)
    p = problem("mlp")
    model = nn.Sequential(nn.Linear(2, 100), nn.Tanh(), nn.Dropout(0.05), nn.Linear(100, 3))
    return Problem(model.double(), p.inputs, p.targets, p.loss)


@pytest.mark.parametrize("draws", [LIGHT, MANY])
def test_analytic_noise_restores_the_noise_if_dropout_is_of_first_order(draws):
    p = wide()
    one = covariance_trace(p, 2 * draws, seed=0)
    assert covariance_trace(p, draws, 2) == pytest.approx(one / 2, rel=0.1)
    assert covariance_trace(p, draws, 2, noise="analytic") == pytest.approx(one, rel=0.1)


def test_the_output_of_dropout_with_k_masks_is_that_of_the_first_mask():
    p = problem("mlp")
    torch.manual_seed(3)
    step = undrop.Dropout(4)(p.model, p.inputs, p.targets)
    step.backward()
    torch.manual_seed(3)
    assert torch.equal(step.output, p.model(p.inputs))


@pytest.mark.slow
def test_dropout_with_k_masks_has_the_mean_gradient_of_dropout():
    """Drop_4 and Drop_1 have the same mean, within 4 standard errors of 3,000 masks each."""
    p = problem("mlp")
    four = torch.stack([taken(undrop.Dropout(4), p) for _ in range(750)])
    one = torch.stack([taken(undrop.Dropout(), p) for _ in range(3000)])
    error = (four.var(0) / len(four) + one.var(0) / len(one)).sqrt()
    assert bool(((four.mean(0) - one.mean(0)).abs() <= 4 * error).all())
