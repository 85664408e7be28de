import pytest
import torch
from torch import nn

from undrop.errors import NonFiniteError
from undrop.lab.train.config import OptimizerConfig
from undrop.lab.train.optimizers import Stepper


def parameters(*values):
    return [nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in values]


def stepper(weights, **options):
    return Stepper(weights, OptimizerConfig.model_validate(options))


def with_gradients(weights, *gradients):
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = torch.tensor(gradient, dtype=torch.float64)


def test_a_step_is_clipped_decayed_and_scaled():
    weights = parameters([1.0, 2.0], [3.0])
    with_gradients(weights, [3.0, 0.0], [4.0])
    norm = stepper(weights, lr=2.0, clip=0.5, weight_decay=0.1).step(factor=0.5)
    assert norm == 5.0
    # w - lr·factor·(g · clip/norm + decay · w)
    assert weights[0].tolist() == pytest.approx([1 - (0.3 + 0.1), 2 - 0.2], abs=1e-6)
    assert weights[1].tolist() == pytest.approx([3 - (0.4 + 0.3)], abs=1e-6)
    assert weights[0].grad is None


def test_a_gradient_below_the_clipping_norm_is_unchanged():
    weights = parameters([1.0])
    with_gradients(weights, [0.25])
    stepper(weights, lr=1.0, clip=0.5).step(1.0)
    assert weights[0].tolist() == [0.75]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_nonfinite_gradient_changes_no_parameter(clip):
    weights = parameters([1.0, 1.0])
    with_gradients(weights, [float("nan"), 1.0])
    with pytest.raises(NonFiniteError, match="the gradient's norm is nan"):
        stepper(weights, clip=clip).step(1.0)
    assert weights[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "reference"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_adam_matches_torchs(name, reference):
    ours, theirs = parameters([1.0, -2.0]), parameters([1.0, -2.0])
    step = stepper(ours, name=name, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.01)
    other = reference(theirs, 0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.01)
    for gradient in ([1.0, 2.0], [-1.0, 0.5]):
        with_gradients(ours, gradient)
        with_gradients(theirs, gradient)
        step.step(1.0)
        other.step()
    assert torch.equal(ours[0], theirs[0])


def test_averaging_starts_at_the_non_monotonic_trigger_and_is_a_plain_mean():
    weights = parameters([0.0])
    step = stepper(weights, name="asgd", lr=1.0, patience=2)
    for loss in (5.0, 4.0, 4.5, 4.2):  # 4.2 is above 4.0, but 4.0 is only two epochs old
        step.average.observe(loss)
        assert not step.average.active
    step.average.observe(4.3)  # now 4.0 is more than two epochs old
    assert step.average.active
    for _ in range(4):
        with_gradients(weights, [-1.0])
        step.step(1.0)
    assert weights[0].item() == 4.0
    with step.average.applied():
        assert weights[0].item() == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert weights[0].item() == 4.0


def test_a_resumed_stepper_is_bit_for_bit_the_same():
    def run(resume_at):
        weights = parameters([1.0, 2.0])
        step = stepper(weights, name="asgd", lr=0.1, momentum=0.9, patience=1)
        for count in range(6):
            if count == resume_at:
                state, values = step.state_dict(), weights[0].detach().clone()
                weights = [nn.Parameter(values)]
                step = stepper(weights, name="asgd", lr=0.1, momentum=0.9, patience=1)
                step.load_state_dict(state)
            with_gradients(weights, [0.3, -0.1 * count])
            step.step(1.0)
            step.average.observe(1.0 + count)
        with step.average.applied():
            return weights[0].tolist()

    assert run(resume_at=4) == run(resume_at=None)
