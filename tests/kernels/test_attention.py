"""The attention kernel against torch's, and against jvp over attention written out."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import jvp

from undrop.errors import OptionError
from undrop.kernels.attention import attention

BATCH, HEADS, LENGTH, KEYS, WIDTH, VALUES = 2, 4, 3, 5, 6, 2


def problem(*, groups=HEADS, dtype=torch.float64):
    """q, k, v and their tangents; k and v have ``groups`` heads."""
    g = torch.Generator().manual_seed(0)

    def leaf(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    shapes = (
        (BATCH, HEADS, LENGTH, WIDTH),
        (BATCH, groups, KEYS, WIDTH),
        (BATCH, groups, KEYS, VALUES),
    )
    return [leaf(*s) for s in shapes], [leaf(*s) for s in shapes]


def a_noise():
    g = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, HEADS, LENGTH, KEYS, generator=g, dtype=torch.float64)


def a_mask(kind):
    g = torch.Generator().manual_seed(2)
    if kind == "boolean":
        return torch.rand(BATCH, 1, LENGTH, KEYS, generator=g) > 0.3
    if kind == "shared":
        return torch.rand(LENGTH, KEYS, generator=g) > 0.3
    if kind == "additive":
        return torch.randn(HEADS, LENGTH, KEYS, generator=g, dtype=torch.float64).requires_grad_()
    return None


def written_out(q, k, v, *, mask=None, is_causal=False, scale=None, noise=None, eps=0.0):
    times = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(times, -3), v.repeat_interleave(times, -3)
    s = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = torch.ones(s.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    e = (s - s.detach().amax(-1, keepdim=True)).exp()
    p = e / e.sum(-1, keepdim=True)
    return (p if noise is None else p * (1 + eps * noise)) @ v


def reference(primals, tangents, **options):
    eps = torch.zeros((), dtype=torch.float64)
    return jvp(
        lambda q, k, v, e: written_out(q, k, v, eps=e, **options),
        (*primals, eps),
        (*tangents, torch.ones_like(eps)),
    )


def gradients(outputs, inputs):
    g = torch.Generator().manual_seed(3)
    total = sum((torch.randn(o.shape, generator=g, dtype=torch.float64) * o).sum() for o in outputs)
    return torch.autograd.grad(total, inputs)


@pytest.mark.parametrize("kind", [None, "boolean", "shared", "additive", "causal"])
@pytest.mark.parametrize("noisy", [False, True])
def test_values_and_gradients_match_jvp(kind, noisy):
    primals, tangents = problem()
    noise = a_noise() if noisy else None
    mask = a_mask(kind)
    options = {"mask": mask, "is_causal": kind == "causal", "noise": noise}
    got = attention(*primals, *tangents, **options)
    want = reference(primals, tangents, **options)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    inputs = [*primals, *tangents] + ([mask] if kind == "additive" else [])
    torch.testing.assert_close(
        gradients(got, inputs), gradients(want, inputs), rtol=1e-10, atol=1e-11
    )


@pytest.mark.parametrize("missing", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_no_tangent_is_a_zero_one(missing):
    primals, tangents = problem()
    noise = a_noise()
    some = [None if n in missing else t for n, t in enumerate(tangents)]
    zeros = [torch.zeros_like(t) if n in missing else t for n, t in enumerate(tangents)]
    got = attention(*primals, *some, noise=noise)
    torch.testing.assert_close(got, reference(primals, zeros, noise=noise))
    inputs = [*primals, *(t for t in some if t is not None)]
    want = gradients(attention(*primals, *zeros, noise=noise), inputs)
    torch.testing.assert_close(gradients(got, inputs), want)


@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_queries_and_a_scale(groups):
    primals, tangents = problem(groups=groups)
    got = attention(*primals, *tangents, enable_gqa=True, scale=0.3)
    want = reference(primals, tangents, scale=0.3)
    torch.testing.assert_close(got, want)
    inputs = [*primals, *tangents]
    torch.testing.assert_close(gradients(got, inputs), gradients(want, inputs))


@pytest.mark.parametrize("kind", [None, "boolean", "causal"])
def test_gradcheck(kind):
    primals, tangents = problem(groups=2)
    noise, mask = a_noise(), a_mask(kind)

    def call(*tensors):
        return attention(
            *tensors, mask=mask, is_causal=kind == "causal", noise=noise, enable_gqa=True
        )

    assert torch.autograd.gradcheck(call, [*primals, *tangents], fast_mode=True)


@pytest.mark.parametrize("kind", [None, "boolean", "additive", "causal"])
def test_primal_is_that_of_torch(kind):
    primals, tangents = problem()
    mask, causal = a_mask(kind), kind == "causal"
    got, _ = attention(*primals, *tangents, mask=mask, is_causal=causal)
    want = F.scaled_dot_product_attention(*primals, attn_mask=mask, is_causal=causal)
    torch.testing.assert_close(got, want)


def test_a_row_that_may_attend_to_nothing_is_zero():
    primals, tangents = problem()
    mask = torch.ones(LENGTH, KEYS, dtype=torch.bool)
    mask[1] = False
    outputs = attention(*primals, *tangents, mask=mask, noise=a_noise())
    for out in outputs:
        assert torch.equal(out[:, :, 1], torch.zeros_like(out[:, :, 1]))
        assert (out[:, :, 0] != 0).all()
    grads = gradients(outputs, [*primals, *tangents])
    assert all(torch.isfinite(g).all() for g in grads)
    assert torch.equal(grads[0][:, :, 1], torch.zeros_like(grads[0][:, :, 1]))


def test_without_batch_or_heads():
    primals, tangents = problem()
    got = attention(*(x[0, 0] for x in (*primals, *tangents)))
    whole = attention(*primals, *tangents)
    torch.testing.assert_close(got, tuple(x[0, 0] for x in whole))


@pytest.mark.portable
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_lower_precision(dtype, tolerance):
    exact, rounded = (problem(dtype=d) for d in (torch.float64, dtype))
    results = []
    for primals, tangents in (exact, rounded):
        out = attention(*primals, *tangents, is_causal=True, noise=a_noise())
        assert all(o.dtype == primals[0].dtype for o in out)
        results.append((*out, *gradients(out, [*primals, *tangents])))
    for want, got in zip(*results, strict=True):
        assert (got.double() - want).norm() <= tolerance * want.norm()


@pytest.mark.portable
def test_autocast():
    primals, tangents = problem(dtype=torch.float32)
    want = attention(*primals, *tangents, noise=a_noise())
    with torch.autocast("cpu", torch.bfloat16):
        got = attention(*primals, *tangents, noise=a_noise())
        grads = gradients(got, [*primals, *tangents])
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).norm() <= 0.02 * b.norm()
    for a, b in zip(grads, gradients(want, [*primals, *tangents]), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 0.02 * b.norm()


def test_a_mask_and_is_causal_are_refused():
    primals, _ = problem()
    with pytest.raises(OptionError, match="a mask or is_causal, not both"):
        attention(*primals, mask=a_mask("shared"), is_causal=True)
