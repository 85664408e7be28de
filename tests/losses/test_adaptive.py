"""The adaptive softmax against torch's module, and against ``CrossEntropy`` of its log-probabilities."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import jvp

from device import new_generator
from dispatch import LargestTensor
from undrop.errors import OptionError, OutputError, TargetError
from undrop.losses.base import FORMS
from undrop.losses.cross_entropy import CrossEntropy
from undrop.losses.softmax import AdaptiveSoftmax

WIDTH, CUTOFFS, CLASSES = 5, [3, 5], 9


def leaf(g, *shape, dtype):
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()


def problem(shape=(6, 4), *, ignored=2, dtype=torch.float64):
    """Features, their tangent, the layers (a tail without projection and bias first), targets."""
    g = new_generator(0)
    features, u = leaf(g, *shape, WIDTH, dtype=dtype), leaf(g, *shape, WIDTH, dtype=dtype)
    layers = [
        (None, leaf(g, CUTOFFS[0] + 2, WIDTH, dtype=dtype), leaf(g, CUTOFFS[0] + 2, dtype=dtype)),
        (None, leaf(g, 2, WIDTH, dtype=dtype), None),
        (leaf(g, 3, WIDTH, dtype=dtype), leaf(g, 4, 3, dtype=dtype), leaf(g, 4, dtype=dtype)),
    ]
    target = torch.randint(CLASSES, shape, generator=g)
    target.view(-1)[:ignored] = -100
    return features, u, layers, target


def adaptive(layers, **options):
    (_, weight, bias), *tails = layers
    options = {"chunk": 5, **options}
    return AdaptiveSoftmax(weight, bias, tails=tails, cutoffs=CUTOFFS, **options)


def parameters(layers):
    return [x for layer in layers for x in layer if x is not None]


def log_softmax(z):
    return z - z.exp().sum(-1, keepdim=True).log()


def logits(features, layer):
    projection, weight, bias = layer
    hidden = features if projection is None else F.linear(features, projection)
    return F.linear(hidden, weight, bias)


def log_probabilities(features, layers):
    head, *tails = (log_softmax(logits(features, layer)) for layer in layers)
    parts = [head[..., : CUTOFFS[0]]]
    parts += [tail + head[..., CUTOFFS[0] + c, None] for c, tail in enumerate(tails)]
    return torch.cat(parts, -1)


def reference(features, u, layers, target, form):
    """Cross-entropy of the log-probabilities (as logits) and of their tangent."""
    f, df = log_probabilities(features, layers), None
    _, df = jvp(lambda x: log_probabilities(x, layers), (features,), (u,))
    parts = CrossEntropy().derivatives(f, df, target, "hessian" if form == "identity" else form)
    if form == "identity":
        keep = target != -100
        moved = [logits(u, (p, w, None))[keep] for p, w, _ in layers]
        parts = parts._replace(quadratic=torch.cat(moved, -1).square().sum(-1).mean())
    return parts


def assert_same_gradients(got, want, inputs, weights):
    grads = [
        torch.autograd.grad(
            sum(c * x for c, x in zip(weights, parts, strict=True)),
            inputs,
            retain_graph=True,
            materialize_grads=True,
        )
        for parts in (got, want)
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ignored", [0, 2])
def test_the_adaptive_value_and_its_gradients_match_plain_operations(ignored):
    features, _, layers, target = problem(ignored=ignored)
    got = adaptive(layers).value(features, target)
    want = CrossEntropy().value(log_probabilities(features, layers), target)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    assert_same_gradients((got,), (want,), [features, *parameters(layers)], (1.0,))


def test_the_adaptive_softmax_has_the_value_of_torchs():
    module = torch.nn.AdaptiveLogSoftmaxWithLoss(
        WIDTH, CLASSES, CUTOFFS, div_value=2.0, head_bias=True, dtype=torch.float64
    )
    features, _, _, target = problem((20,), ignored=0)
    tails = [(down.weight, up.weight, None) for down, up in module.tail]
    loss = AdaptiveSoftmax(module.head.weight, module.head.bias, tails=tails, cutoffs=CUTOFFS)
    got, want = loss.value(features, target), module(features, target).loss
    inputs = [features, *module.parameters()]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs))


def test_the_adaptive_value_can_be_differentiated_twice():
    features, _, layers, target = problem()
    inputs = [features, *parameters(layers)]
    seconds = []
    for loss in (
        adaptive(layers).value(features, target),
        CrossEntropy().value(log_probabilities(features, layers), target),
    ):
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.pow(2).sum() for g in grads), inputs))
    torch.testing.assert_close(seconds[0], seconds[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_the_adaptive_derivatives_and_their_gradients_match_plain_operations(form):
    features, u, layers, target = problem()
    got = adaptive(layers).derivatives(features, u, target, form)
    want = reference(features, u, layers, target, form)
    torch.testing.assert_close(tuple(got), tuple(want), rtol=1e-12, atol=1e-14)
    inputs = [features, u, *parameters(layers)]
    for weights in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.3, -1.2, 0.7)):
        assert_same_gradients(got, want, inputs, weights)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_the_adaptive_combined_total_is_the_weighted_sum(form, scale):
    features, u, layers, target = problem()
    weights = (0.9, 0.8, -0.3)
    total, parts = adaptive(layers).combined(features, u, target, form, weights)
    want = reference(features, u, layers, target, form)
    torch.testing.assert_close(tuple(parts), tuple(x.detach() for x in want))
    scales = tuple(scale * c for c in weights)
    grads = torch.autograd.grad(scale * total, [features, u, *parameters(layers)])
    wanted = torch.autograd.grad(
        sum(c * x for c, x in zip(scales, want, strict=True)), [features, u, *parameters(layers)]
    )
    torch.testing.assert_close(grads, wanted, rtol=1e-10, atol=1e-12)


def test_the_adaptive_loss_passes_gradcheck():
    features, u, layers, target = problem((5,), ignored=1)
    inputs = [features, u, *parameters(layers)]

    def call(f, t, w, b, w1, p2, w2, b2):
        loss = adaptive([(None, w, b), (None, w1, None), (p2, w2, b2)])
        return tuple(loss.derivatives(f, t, target))

    assert torch.autograd.gradcheck(call, inputs)


def test_the_adaptive_loss_is_zero_if_all_targets_are_ignored():
    features, u, layers, target = problem()
    target.fill_(-100)
    loss = adaptive(layers)
    total, parts = loss.combined(features, u, target)
    scalars = (loss.value(features, target), total, *loss.derivatives(features, u, target))
    assert [x.item() for x in (*scalars, *parts)] == [0.0] * 8
    for scalar in scalars:
        for grad in torch.autograd.grad(scalar, [features, *parameters(layers)], retain_graph=True):
            assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("form", ["hessian", "identity"])
def test_sampled_gradients_of_the_adaptive_loss_have_the_form_as_covariance(form):
    """E[∇S ∇Sᵀ] is the form: 20,000 draws, all entries within 4 standard errors."""
    features, _, layers, _ = problem((1,), ignored=0)
    draws = 20_000
    rows = features.detach().expand(draws, -1).clone().requires_grad_()
    target = torch.zeros(draws, dtype=torch.long)
    generator = new_generator(5)
    loss = adaptive(layers, chunk=None)
    (grads,) = torch.autograd.grad(loss.sampled(rows, target, form, generator), rows)
    outer = grads.unsqueeze(2) * grads.unsqueeze(1)
    basis = torch.eye(WIDTH, dtype=torch.float64)
    pairs = [(a, b) for a in range(WIDTH) for b in range(WIDTH)]

    def quadratic(direction):
        return reference(features[:1], direction[None], layers, target[:1], form).quadratic

    want = torch.stack(
        [(quadratic(basis[a] + basis[b]) - quadratic(basis[a] - basis[b])) / 4 for a, b in pairs]
    ).view(WIDTH, WIDTH)
    error = outer.std(0) / draws**0.5
    assert ((outer.mean(0) - want).abs() <= 4 * error).all()


def test_a_sampled_word_is_of_the_tail_that_the_head_chose():
    features, _, layers, _ = problem((1,), ignored=0)
    head = layers[0]
    with torch.no_grad():
        head[2].fill_(-40.0)[CUTOFFS[0] + 1] = 40.0  # only the second tail is ever chosen
    labels = adaptive(layers)._sample_labels(features.expand(300, -1), new_generator(0))
    assert set(labels.tolist()) <= {5, 6, 7, 8}
    assert len(set(labels.tolist())) > 1


@pytest.mark.portable
def test_the_adaptive_loss_in_float32_and_bfloat16_is_close_to_float64():
    exact = problem()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        results = []
        for features, u, layers, target in (exact, problem(dtype=dtype)):
            total, _ = adaptive(layers).combined(features, u, target)
            grads = torch.autograd.grad(total, [features, u, *parameters(layers)])
            results.append([total, *grads])
        for want, got in zip(*results, strict=True):
            assert (got.double() - want).norm() <= tolerance * want.norm()


def test_the_adaptive_loss_never_makes_the_whole_matrix_of_logits():
    features, u, layers, target = problem((60, 10), dtype=torch.float32)
    loss = adaptive(layers, chunk=8)
    with LargestTensor() as largest:
        total, _ = loss.combined(features, u, target)
        total.backward()
    assert largest.elements == features.numel()  # of the gradient: less than the rows' logits
    assert features.numel() < len(target.view(-1)) * CLASSES


def test_the_adaptive_loss_refuses_targets_and_features_that_do_not_fit():
    features, _, layers, target = problem()
    loss = adaptive(layers)
    loss.check(features, target)
    for wrong in (9, -1):
        beyond = target.masked_fill(target == -100, wrong)
        for call in (loss.check_values, loss.value):
            with pytest.raises(TargetError, match=f"must lie in 0 … 8.*got {wrong}"):
                call(features, beyond)
    with pytest.raises(OutputError, match="features of width 5"):
        loss.check(log_probabilities(features, layers), target)


def test_the_adaptive_softmax_refuses_layers_that_do_not_fit():
    _, _, layers, _ = problem()
    (_, weight, bias), *tails = layers
    with pytest.raises(
        OptionError, match=r"first word of each of the 2 tails, increasing, got \[5, 3\]"
    ):
        AdaptiveSoftmax(weight, bias, tails=tails, cutoffs=[5, 3])
    with pytest.raises(OptionError, match=r"need a head of 6 classes and tails of \[1\] words"):
        AdaptiveSoftmax(weight, bias, tails=tails, cutoffs=[4, 5])
