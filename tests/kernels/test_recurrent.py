"""LSTM and GRU kernels against torch's layers and against jvp over an explicit loop."""

from itertools import product

import pytest
import torch
from torch.func import jvp

import undrop.kernels.recurrent as recurrent
from undrop.errors import OptionError
from undrop.kernels.cells import CELLS, run_direction
from undrop.kernels.gru import gru
from undrop.kernels.lstm import lstm

T, B, D, H = 7, 4, 3, 5  # steps, batch, inputs, hidden units
GATES = {"lstm": 4, "gru": 3}
STATES = {"lstm": 2, "gru": 1}


def leaf(g, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()


def problem(kind, rows, *, steps=T, dtype=torch.float64):
    """x, the weights, the states, and tangents of all of these (the batch's cut to ``rows``)."""
    g, n = torch.Generator().manual_seed(3), GATES[kind] * H
    make = lambda *shape: leaf(g, *shape, dtype=dtype)  # noqa: E731
    x, w = make(steps, B, D), [make(n, D), make(n, H), make(n), make(n)]
    state = [make(B, H) for _ in range(STATES[kind])]
    dx, dw = make(steps, rows, D), [make(n, D), make(n, H)]
    dstate = [make(rows, H) for _ in range(STATES[kind])]
    return x, w, state, dx, dw, dstate


def kernel(kind, x, w, state, dx, dw, dstate, **options):
    """All outputs of the kernel, flat; the tangents last."""
    if kind == "lstm":
        first, dfirst = tuple(state), tuple(dstate) if dstate else None
        y, dy, last, dlast = lstm(x, dx, first, dfirst, *w, *(dw or (None, None)), **options)
    else:
        dfirst = dstate[0] if dstate else None
        y, dy, last, dlast = gru(x, dx, state[0], dfirst, *w, *(dw or (None, None)), **options)
        last, dlast = (last,), (dlast,)
    return (y, *last) if dy is None else (y, *last, dy, *dlast)


def loop(kind, x, w_ih, w_hh, b_ih, b_hh, *state):
    """The layer in plain operations."""
    cell = CELLS[getattr(torch, kind)]
    weights = (w_ih, w_hh, b_ih, b_hh)
    sizes = [x.shape[1]] * len(x)
    y, last = run_direction(
        cell, x.flatten(0, 1), sizes, state, weights, has_bias=True, reverse=False
    )
    return y.unflatten(0, x.shape[:2]), *last


def reference(kind, x, w, state, dx, dw, dstate):
    rows = dx.shape[1]
    primal = loop(kind, x, *w, *state)
    if rows == 0:
        return primal
    dw = dw or [torch.zeros_like(v) for v in w[:2]]
    tangents = (dx, *dw, torch.zeros_like(w[2]), torch.zeros_like(w[3]), *dstate)
    _, tangent = jvp(
        lambda *args: loop(kind, *args),
        (x[:, :rows], *w, *(s[:rows] for s in state)),
        tangents,
    )
    return (*primal, *tangent)


def gradients(outputs, inputs, seed=1):
    """Of a random weighting of all outputs."""
    g = torch.Generator().manual_seed(seed)
    weights = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.dtype) for o in outputs]
    total = sum((w * o).sum() for w, o in zip(weights, outputs, strict=True))
    return torch.autograd.grad(total, inputs)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize(("rows", "weights"), product([0, 1, B], [False, True]))
@pytest.mark.parametrize("lag", [1, 3])
def test_values_and_gradients_match_jvp_over_a_loop(kind, rows, weights, lag, monkeypatch):
    monkeypatch.setattr(recurrent, "_LAG", lag)
    x, w, state, dx, dw, dstate = problem(kind, rows)
    dw = dw if weights else None
    got = kernel(kind, x, w, state, dx, dw, dstate)
    want = reference(kind, x, w, state, dx, dw, dstate)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    inputs = [x, *w, *state]
    if rows:
        inputs += [dx, *dstate, *(dw or [])]
    torch.testing.assert_close(
        gradients(got, inputs), gradients(want, inputs), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("weights", [False, True])
def test_long_sequences(kind, weights):
    x, w, state, dx, dw, dstate = problem(kind, 2, steps=21)
    small = [v.detach().mul(0.5).requires_grad_() for v in w]
    dw = dw if weights else None
    got = kernel(kind, x, small, state, dx, dw, dstate)
    want = reference(kind, x, small, state, dx, dw, dstate)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    inputs = [x, *small, *state, dx, *dstate, *(dw or [])]
    torch.testing.assert_close(
        gradients(got, inputs), gradients(want, inputs), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_gradcheck(kind):
    x, w, state, dx, dw, dstate = problem(kind, 2, steps=3)
    flat = [x, *w, *state, dx, *dw, *dstate]
    n = len(state)

    def call(x, w_ih, w_hh, b_ih, b_hh, *rest):
        state, dx, dw, dstate = rest[:n], rest[n], rest[n + 1 : n + 3], rest[n + 3 :]
        return kernel(kind, x, (w_ih, w_hh, b_ih, b_hh), state, dx, dw, dstate)

    assert torch.autograd.gradcheck(call, flat)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_plain_layer_matches_torch(kind):
    layer = getattr(torch.nn, kind.upper())(D, H)
    x, *_ = problem(kind, 0, dtype=torch.float32)
    y, last = layer(x)
    call = lstm if kind == "lstm" else gru
    got, tangent, state, dstate = call(x, None, None, None, *layer.parameters())
    assert tangent is None
    assert dstate is None
    torch.testing.assert_close(got, y, rtol=1e-5, atol=1e-6)
    want = [s.squeeze(0) for s in last] if kind == "lstm" else [last.squeeze(0)]
    torch.testing.assert_close(list(state) if kind == "lstm" else [state], want)
    inputs = [x, *layer.parameters()]
    torch.testing.assert_close(
        gradients([got], inputs), gradients([y], inputs), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_no_bias_and_no_states_are_zeros(kind):
    x, w, state, dx, dw, dstate = problem(kind, 2)
    zero = [torch.zeros_like(s) for s in state], [torch.zeros_like(s) for s in dstate]
    flat = [w[0], w[1], torch.zeros_like(w[2]), torch.zeros_like(w[3])]
    want = kernel(kind, x, flat, zero[0], dx, dw, zero[1])
    call = lstm if kind == "lstm" else gru
    y, dy, *_ = call(x, dx, None, None, w[0], w[1], dw_ih=dw[0], dw_hh=dw[1])
    torch.testing.assert_close(y, want[0])
    torch.testing.assert_close(dy, want[1 + len(state)])


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_only_weights_move(kind):
    x, w, state, dx, dw, dstate = problem(kind, B)
    zero = torch.zeros_like(dx), [torch.zeros_like(s) for s in dstate]
    want = kernel(kind, x, w, state, zero[0], dw, zero[1])
    torch.testing.assert_close(kernel(kind, x, w, state, None, dw, None), want)
    fewer = kernel(kind, x, w, state, None, dw, None, rows=2)
    torch.testing.assert_close(fewer[-1], want[-1][:2])


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_only_a_first_state_moves(kind):
    x, w, state, dx, _, dstate = problem(kind, 2)
    want = kernel(kind, x, w, state, torch.zeros_like(dx), None, dstate)
    torch.testing.assert_close(kernel(kind, x, w, state, None, None, dstate), want)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_gradients_that_nobody_asks_for_are_not_formed(kind):
    x, w, state, dx, dw, dstate = problem(kind, 2)
    want = gradients(kernel(kind, x, w, state, dx, dw, dstate), [w[1]])
    frozen = [v.detach() for v in (x, *w, *state, dx, *dw, *dstate)]
    n = len(state)
    weights = [frozen[1], w[1], *frozen[3:5]]
    got = kernel(
        kind,
        frozen[0],
        weights,
        frozen[5 : 5 + n],
        frozen[5 + n],
        frozen[6 + n : 8 + n],
        frozen[8 + n :],
    )
    torch.testing.assert_close(gradients(got, [w[1]]), want)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_backward_twice_and_a_touched_output(kind):
    args = problem(kind, 2)
    y, *_ = kernel(kind, *args)
    first = torch.autograd.grad(y.sum(), args[0], retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), args[0], retain_graph=True), first)
    with pytest.raises(RuntimeError, match=r"inplace"):
        y.mul_(2.0).sum().backward()


@pytest.mark.portable
@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_lower_precision(kind, dtype, tolerance):
    exact, rounded = problem(kind, 2), problem(kind, 2, dtype=dtype)
    want, got = kernel(kind, *exact), kernel(kind, *rounded)
    assert all(o.dtype == dtype for o in got)
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()
    for a, b in zip(
        gradients(got, [rounded[0], *rounded[1]]),
        gradients(want, [exact[0], *exact[1]]),
        strict=True,
    ):
        assert (a.double() - b).norm() <= tolerance * b.norm()


@pytest.mark.portable
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_autocast_leaves_the_recurrence_in_the_weights_precision(kind):
    args = problem(kind, 2, dtype=torch.float32)
    want = kernel(kind, *args)
    with torch.autocast("cpu", torch.bfloat16):
        got = kernel(kind, *args)
        grads = gradients(got, args[1])
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grads, gradients(want, args[1]))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_rows_that_do_not_fit_are_refused(kind):
    x, w, state, dx, dw, dstate = problem(kind, 2)
    with pytest.raises(OptionError, match=r"carried for 3 of 4 .* came with \[2\] rows"):
        kernel(kind, x, w, state, dx, dw, dstate, rows=3)
    with pytest.raises(OptionError, match="carried for 5 of 4 entries"):
        kernel(kind, x, w, state, None, dw, None, rows=5)
    with pytest.raises(OptionError, match="over 0 steps"):
        kernel(kind, x[:0], w, state, dx[:0], dw, dstate)
