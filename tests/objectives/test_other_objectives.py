"""The other objectives against the formulas of their papers, written out by hand."""

import pytest
import torch
from torch import nn

from device import new_generator
from engine_helpers import seeded
from problems import problem
from undrop.engines import ScaledNoise
from undrop.errors import OptionError
from undrop.intercept import Interception, call, logits_of
from undrop.losses import MSE
from undrop.objectives import SAM, EarlyDropout, Jacobian, NoRegularization, RDrop, WeightNoise

NETS = ["mlp", "lstm", "gru", "transformer"]


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def generator():
    return new_generator(3)


def dropped(made, draw):
    with Interception(made.model, ScaledNoise(draw, 1.0)):
        return logits_of(call(made.model, made.inputs))


@pytest.mark.parametrize("name", NETS)
def test_r_drop_is_two_losses_and_both_divergences(name):
    made = problem(name)
    step = RDrop(3.0, loss=made.loss, generator=generator())(made.model, made.inputs, made.targets)
    source = generator()
    kept = made.targets.flatten() != -100
    logs = []
    for _ in range(2):
        draw = seeded(0, noise="dropout")
        draw.generator = lambda device: source
        logs.append(dropped(made, draw).flatten(0, -2).log_softmax(-1)[kept])
    labels = made.targets.flatten()[kept]
    one, two = logs
    nll = sum(-log.gather(1, labels[:, None]).mean() for log in logs) / 2
    apart = (one.exp() * (one - two)).sum(1).mean() + (two.exp() * (two - one)).sum(1).mean()
    assert step.parts["loss"] == pytest.approx(nll.item())
    assert step.parts["consistency"] == pytest.approx(3.0 / 4 * apart.item())
    step.backward()
    ours = gradient(made.model)
    made.model.zero_grad()
    (nll + 3.0 / 4 * apart).backward()
    torch.testing.assert_close(ours, gradient(made.model))


def test_jacobian_of_a_diagonal_net_is_exact_for_every_draw():
    weights = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3, bias=False)).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.diag(weights))
    x, y = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    loss = MSE()
    step = Jacobian(0.2, loss=loss, generator=generator())(model, x, y)
    # The mean of the loss is over single outputs: a row's norm is spread over its three.
    assert step.parts["explicit"] == pytest.approx(0.1 * float(weights.square().sum()) / 3)
    assert step.parts["loss"] == pytest.approx(loss.value(model[1](x), y).item())
    step.backward()
    plain = torch.autograd.grad(loss.value(model[1](x), y), model[1].weight)[0]
    expected = plain.diagonal() + 0.2 * weights / 3
    torch.testing.assert_close(model[1].weight.grad.diagonal(), expected)


def test_jacobian_returns_the_output_without_noise():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)).double()
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    step = Jacobian(0.2, loss=MSE())(model, x, y)
    torch.testing.assert_close(step.output, model[1](x))


def test_jacobian_returns_the_output_without_noise_in_any_class():
    class Out:
        def __init__(self, logits):
            self.logits = logits

    class Net(nn.Sequential):
        def forward(self, x):
            return Out(super().forward(x))

    model = Net(nn.Dropout(0.5), nn.Linear(3, 2)).double()
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    step = Jacobian(0.2, loss=MSE())(model, x, y)
    torch.testing.assert_close(step.output.logits, model[1](x))


def test_jacobian_is_computed_at_the_named_site():
    made = problem("mlp")
    parts = [
        Jacobian(1.0, site=site, loss=made.loss, generator=generator())(
            made.model, made.inputs, made.targets
        ).parts["explicit"]
        for site in (None, "2", "5")
    ]
    assert parts[0] == parts[1] != parts[2]
    with pytest.raises(OptionError, match="there is no site '3': the sites are 2, 5"):
        Jacobian(1.0, site="3", loss=made.loss)(made.model, made.inputs, made.targets)


@pytest.mark.parametrize("name", NETS)
def test_sam_has_the_gradient_at_the_perturbed_weights(name):
    made = problem(name)
    before = [p.detach().clone() for p in made.model.parameters()]
    step = SAM(0.3, loss=made.loss, generator=generator())(made.model, made.inputs, made.targets)
    for now, then in zip(made.model.parameters(), before, strict=True):
        assert torch.equal(now, then)
    step.backward()
    ours = gradient(made.model)
    draw = seeded(3, noise="dropout")

    made.model.zero_grad()
    made.loss.value(dropped(made, draw), made.targets).backward()
    norm = gradient(made.model).norm()
    with torch.no_grad():
        for p in made.model.parameters():
            p += 0.3 / norm * p.grad
    made.model.zero_grad()
    there = made.loss.value(dropped(made, draw), made.targets)
    there.backward()
    assert step.parts == {"loss": pytest.approx(there.item())}
    torch.testing.assert_close(ours, gradient(made.model))


def test_sam_perturbs_the_weights_of_a_loss_that_is_a_module():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([2.0, 0.5]).double())

        def forward(self, output, target):
            return (self.scale * output - target).square().mean()

    loss, model = Scaled(), nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)).double()
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    before = loss.scale.detach().clone()
    step = SAM(0.3, loss=loss, generator=generator())(model, x, y)
    assert torch.equal(loss.scale, before)
    step.backward()

    class Whole(nn.Sequential):
        def forward(self, x):
            return loss.scale * super().forward(x)

    whole = Whole(*model)
    whole.register_parameter("scale", loss.scale)
    expected = [p.grad for p in whole.parameters()]
    whole.zero_grad()
    SAM(0.3, loss=MSE(), generator=generator())(whole, x, y).backward()
    torch.testing.assert_close([p.grad for p in whole.parameters()], expected)


def test_sam_restores_the_weights_after_an_error(monkeypatch):
    made = problem("mlp")
    objective = SAM(0.3, loss=made.loss)
    before = [p.detach().clone() for p in made.model.parameters()]
    passed, calls = objective.forward_and_loss, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            assert not torch.equal(before[0], next(made.model.parameters()))
            raise RuntimeError("no memory")
        return passed(*args)

    monkeypatch.setattr(objective, "forward_and_loss", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        objective(made.model, made.inputs, made.targets)
    for now, then in zip(made.model.parameters(), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("name", NETS)
def test_weight_noise_is_the_mean_of_the_gradients_on_both_sides(name):
    made = problem(name)
    weights = list(made.model.parameters())
    before = [p.detach().clone() for p in weights]
    objective = WeightNoise(0.1, loss=made.loss, generator=generator())
    step = objective(made.model, made.inputs, made.targets)
    for now, then in zip(weights, before, strict=True):
        assert torch.equal(now, then)
    step.backward()
    ours = gradient(made.model)

    source = generator()
    noise = [0.1 * torch.randn(p.shape, generator=source, dtype=p.dtype) for p in weights]
    losses, gradients = [], []
    for sign in (1.0, -1.0):
        with torch.no_grad():
            for p, u, w in zip(weights, noise, before, strict=True):
                p.copy_(w + sign * u)
        made.model.zero_grad()
        step_there = NoRegularization(loss=made.loss)(made.model, made.inputs, made.targets)
        step_there.backward()
        losses.append(step_there.parts["loss"])
        gradients.append(gradient(made.model))
    assert step.parts == {"loss": pytest.approx(sum(losses) / 2)}
    torch.testing.assert_close(ours, sum(gradients) / 2)


def test_weight_noise_adds_the_trace_of_the_hessian_to_a_quadratic_loss():
    """On a linear net with a squared loss the second order is exact: E total = ℓ + ½σ² tr ∇²ℓ."""
    model = nn.Linear(3, 2, bias=False).double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    loss = MSE()
    plain = loss.value(model(x), y)
    hessian = torch.autograd.functional.hessian(
        lambda w: loss.value(x @ w.t(), y), model.weight.detach()
    )
    trace = hessian.reshape(6, 6).trace()
    objective = WeightNoise(0.5, loss=loss, generator=generator())
    draws = torch.tensor([objective(model, x, y).parts["loss"] for _ in range(2000)])
    error = draws.std() / len(draws) ** 0.5
    assert abs(draws.mean() - (plain + 0.5 * 0.25 * trace)) < 4 * error
    # Both sides have the same distance from the middle: the first order cancels in every draw.
    assert (draws >= plain.item() - 1e-12).all()


def test_early_dropout_ends_and_saves_its_step():
    made = problem("mlp")
    plain = NoRegularization(loss=made.loss)(made.model, made.inputs, made.targets).parts["loss"]
    objective = EarlyDropout(2, loss=made.loss)
    losses = [objective(made.model, made.inputs, made.targets).parts["loss"] for _ in range(3)]
    assert plain not in losses[:2]
    assert losses[2] == plain
    again = EarlyDropout(2, loss=made.loss)
    again.load_state_dict(objective.state_dict())
    assert again(made.model, made.inputs, made.targets).parts["loss"] == plain


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RDrop(-1.0), "weight must be finite and not negative, got -1.0"),
        (lambda: Jacobian(1.0, step=0.0), r"step must lie in \(0, 1\], got 0.0"),
        (lambda: SAM(float("inf")), "radius must be finite and not negative, got inf"),
        (lambda: WeightNoise(-0.1), "scale must be finite and not negative, got -0.1"),
        (lambda: EarlyDropout(-1), "until must be a whole number of at least 0, got -1"),
    ],
)
def test_options_out_of_range_are_named(make, text):
    with pytest.raises(OptionError, match=text):
        make()
