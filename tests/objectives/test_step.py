"""A step: backward() and total have the same gradient, one graph at a time, one update of batch norm."""

import weakref

import pytest
import torch
from torch import nn

import undrop
from device import DEVICE, new_generator
from problems import problem
from undrop.errors import StepError
from undrop.losses import LinearCrossEntropy
from undrop.objectives import SAM, RDrop

ENGINES = ("tangent", "antithetic", "reverse")
OBJECTIVES = {
    "none": undrop.NoRegularization,
    "l2": lambda **how: undrop.L2(0.1),
    "dropout": undrop.Dropout,
    "drop-3": lambda **how: undrop.Dropout(3, **how),
    "resampled": lambda **how: undrop.Dropout(3, noise="resampled", **how),
    "drop-3 analytic": lambda **how: undrop.Dropout(3, noise="analytic", **how),
    "exact": lambda **how: undrop.Analytic(engine="exact", **how),
    **{e: lambda e=e, **how: undrop.Analytic(engine=e, **how) for e in ENGINES},
    **{f"{e} × 3": lambda e=e, **how: undrop.Analytic(engine=e, samples=3, **how) for e in ENGINES},
}


@pytest.fixture(params=OBJECTIVES)
def objective(request):
    """A new objective, with the same noise each time."""
    return lambda: OBJECTIVES[request.param](generator=new_generator(1))


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def called(objective, name="batch_norm"):
    p = problem(name)
    return p, objective()(p.model, p.inputs, p.targets)


@pytest.mark.parametrize("name", ["mlp", "lstm", "batch_norm"])
def test_backward_leaves_the_gradient_of_the_total(objective, name):
    p, step = called(objective, name)
    step.backward()
    one = gradient(p.model)
    q, step = called(objective, name)
    step.total.backward()
    torch.testing.assert_close(one, gradient(q.model))


def test_backward_adds_the_gradient_and_can_scale_it(objective):
    p, step = called(objective)
    step.backward()
    one = gradient(p.model)
    p.model.zero_grad()
    q, step = called(objective)
    step.backward(scale=0.25)
    objective()(q.model, q.inputs, q.targets).backward(scale=0.5)
    # The second step has other running statistics than the first, but they do not affect gradients.
    torch.testing.assert_close(gradient(q.model), 0.75 * one)


def test_the_parts_of_a_step_add_up_to_its_total_before_and_after_backward(objective):
    _, step = called(objective)
    parts, total = step.parts, step.total.item()
    assert sum(parts.values()) == pytest.approx(total, rel=1e-12)
    step.backward()
    assert step.parts == parts
    assert step.total.item() == pytest.approx(total, rel=1e-12)
    assert not step.total.requires_grad
    assert "total=" in repr(step)
    assert "loss=" in repr(step)


def test_the_l2_part_is_the_squared_norm_of_the_weights():
    p = problem("mlp")
    parts = undrop.L2(0.1)(p.model, p.inputs, p.targets).parts
    norm = sum(q.square().sum() for q in p.model.parameters()).item()
    assert parts["l2"] == pytest.approx(0.1 * norm, rel=1e-12)
    assert parts["loss"] == undrop.NoRegularization()(p.model, p.inputs, p.targets).parts["loss"]


def test_l2_ignores_frozen_parameters():
    p = problem("mlp")
    p.model[0].requires_grad_(False)
    norm = sum(q.square().sum() for q in p.model.parameters() if q.requires_grad).item()
    parts = undrop.L2(1.0)(p.model, p.inputs, p.targets).parts
    assert parts["l2"] == pytest.approx(norm, rel=1e-12)


# An output layer in the loss


def with_head(inside, *, tied=False):
    """The net, all its parameters, and the loss, with the last layer in one of the two."""
    p = problem("mlp")
    net, head = p.model[:-1], p.model[-1]
    if tied:
        head.weight = net[3].weight = nn.Parameter(net[3].weight[:, :3].detach())
        net[0] = nn.Linear(2, 3, dtype=torch.float64)
    every = nn.ModuleList([net, head])
    if inside:
        return p, nn.Sequential(*net, head), every, undrop.CrossEntropy()
    return p, net, every, LinearCrossEntropy(head.weight, head.bias)


def gradients_with_head(make, inside, **how):
    p, model, every, loss = with_head(inside, **how)
    step = make(loss=loss, generator=new_generator(1))(model, p.inputs, p.targets)
    step.backward()
    return step.parts, gradient(every)


EVERY = {
    **OBJECTIVES,
    "l2": lambda generator, **how: undrop.L2(0.1, **how),
    "r-drop": RDrop,
    "sam": lambda **how: SAM(0.5, **how),
}


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("name", EVERY)
def test_an_output_layer_in_the_loss_trains_like_one_in_the_model(name, tied):
    parts, found = gradients_with_head(EVERY[name], False, tied=tied)
    expected, gradients = gradients_with_head(EVERY[name], True, tied=tied)
    assert parts == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(found, gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_the_output_layer_may_be_all_that_is_trained(name):
    p, model, every, loss = with_head(False)
    model.requires_grad_(False)
    EVERY[name](loss=loss, generator=None)(model, p.inputs, p.targets).backward()
    assert gradient(every[1]).norm() > 0


# Batch norm


def silent_pass(p):
    """The net after one pass in train mode without dropout."""
    for module in p.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    p.model(p.inputs)
    return dict(p.model.named_buffers())


def test_a_step_updates_running_statistics_once(objective):
    p, step = called(objective)
    step.backward()
    assert p.model[1].num_batches_tracked.item() == 1
    assert p.model[6].num_batches_tracked.item() == 1


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if "drop" not in n and "resam" not in n])
def test_without_noise_running_statistics_are_those_of_a_pass_without_noise(name):
    p, step = called(lambda: OBJECTIVES[name](generator=new_generator(1)))
    step.backward()
    expected = silent_pass(problem("batch_norm"))
    close = {"rtol": 0.05, "atol": 0.01} if "antithetic" in name else {}  # a pass at ε₀
    for key, buffer in p.model.named_buffers():
        torch.testing.assert_close(buffer, expected[key], **close)


def test_with_dropout_running_statistics_are_those_of_the_first_pass():
    p = problem("batch_norm")
    torch.manual_seed(1)
    undrop.Dropout(3)(p.model, p.inputs, p.targets).backward()
    q = problem("batch_norm")
    torch.manual_seed(1)
    q.model(q.inputs)
    for (_, ours), (_, theirs) in zip(
        p.model.named_buffers(), q.model.named_buffers(), strict=True
    ):
        assert torch.equal(ours, theirs)


# What is around a step


LATER = [name for name in OBJECTIVES if "3" in name or name == "resampled"]
WAYS = {
    "backward": lambda step: step.backward(),
    "total": lambda step: step.total,
    "parts": lambda step: step.parts,
}


@pytest.fixture(params=LATER)
def several(request):
    """A new objective with several samples, and the same noise each time."""
    return lambda: OBJECTIVES[request.param](generator=new_generator(1))


def half(enabled=True):
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=enabled)


@pytest.mark.portable
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
def test_later_samples_have_the_autocast_of_the_first(several, enabled, way):
    p = problem("mlp")
    model, x, objective = p.model.float(), p.inputs.float(), several()
    with half(enabled):
        objective(model, x, p.targets).backward()  # what is done once per model
    seen = []
    model[-1].register_forward_hook(lambda module, x, output: seen.append(output.dtype))
    with half(enabled):
        step = objective(model, x, p.targets)
    first = len(seen)
    with half(not enabled):
        way(step)
        assert torch.is_autocast_enabled(DEVICE.type) is not enabled
    assert len(seen) > first
    assert set(seen) == {torch.bfloat16 if enabled else torch.float32}


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("read", [WAYS["total"], WAYS["parts"]], ids=["total", "parts"])
def test_reading_parts_without_gradients_keeps_the_gradient(several, read, off):
    p, step = called(several)
    step.backward()
    q, other = called(several)
    with off():
        read(other)
        assert not torch.is_grad_enabled()
    other.backward()
    torch.testing.assert_close(gradient(q.model), gradient(p.model))


# Memory


class Box:
    """Holds a saved tensor, and can be watched."""

    def __init__(self, tensor):
        self.tensor = tensor


def peak_of_saved(objective, p):
    """The most bytes that graphs held at any time of a step with ``backward()``."""
    held, peak = 0, 0

    def pack(tensor):
        nonlocal held, peak
        box, size = Box(tensor), tensor.numel() * tensor.element_size()
        held += size
        peak = max(peak, held)

        def free():
            nonlocal held
            held -= size

        weakref.finalize(box, free)
        return box

    objective(p.model, p.inputs, p.targets)  # what is done once per model
    held = peak = 0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        objective(p.model, p.inputs, p.targets).backward()
    return peak


@pytest.mark.parametrize(
    "make",
    [
        undrop.Dropout,
        lambda k, **how: undrop.Dropout(k, noise="resampled", **how),
        *(lambda n, e=e, **how: undrop.Analytic(samples=n, engine=e, **how) for e in ENGINES),
    ],
    ids=["drop-k", "resampled", *ENGINES],
)
@pytest.mark.parametrize("name", ["mlp", "lstm", "transformer"])
def test_memory_does_not_grow_with_samples(name, make):
    p = problem(name)
    one, many = (peak_of_saved(make(k, generator=torch.Generator(DEVICE)), p) for k in (1, 8))
    assert 0 < many <= 1.05 * one


def test_a_second_backward_of_a_step_is_refused(objective):
    _, step = called(objective)
    step.backward()
    with pytest.raises(StepError, match="already been differentiated: call the objective again"):
        step.backward()


@pytest.mark.parametrize("read", [lambda s: s.backward(), lambda s: s.total, lambda s: s.parts])
@pytest.mark.parametrize("fail", [lambda s: s.backward(), lambda s: s.total])
def test_a_step_that_an_error_interrupted_is_refused(monkeypatch, fail, read):
    p, objective = problem("mlp"), undrop.Dropout(3, generator=new_generator(0))
    step = objective(p.model, p.inputs, p.targets)

    def failing(*args):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(objective, "forward_and_loss", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            fail(step)
    with pytest.raises(StepError, match="interrupted this step, so its total is incomplete"):
        read(step)


def test_a_step_whose_backward_pass_failed_is_refused():
    p, objective = problem("mlp"), undrop.Analytic(generator=new_generator(0))
    step = objective(p.model, p.inputs, p.targets)

    def failing(gradient):
        raise RuntimeError("no memory")

    hook = next(p.model.parameters()).register_hook(failing)
    with pytest.raises(RuntimeError, match="no memory"):
        step.backward()
    hook.remove()
    with pytest.raises(StepError, match="interrupted this step"):
        step.backward()


def test_a_step_does_not_visit_every_module_to_ask_if_it_is_compiled(monkeypatch):
    from undrop.objectives import base

    asked = []
    monkeypatch.setattr(base, "chosen_backend", asked.append)
    p, objective = problem("mlp"), undrop.Analytic(generator=new_generator(0))
    for _ in range(33):
        objective(p.model, p.inputs, p.targets).backward()
    assert len(asked) == 7  # at the steps 0, 1, 2, 4, 8, 16 and 32


def test_parts_read_after_the_backward_pass_are_those_of_the_step():
    p = problem("mlp")
    first, second = (
        undrop.Analytic(generator=new_generator(0))(p.model, p.inputs, p.targets) for _ in range(2)
    )
    before = first.parts
    second.backward()
    assert second.parts == before
