"""A linear layer and the softmax cross-entropy on it, as one function that goes by chunks of rows.

With features f and their tangent ḟ the logits are ``z = W f + b`` and ``u = W ḟ``. A chunk of rows
makes its logits, turns them into gradients where they stand (``softmax.py``), and multiplies these
back: three GEMMs over both kinds of rows, and never more than a chunk of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from undrop.kernels.softmax import Coefficients, Rule, loss_rows, tangent_rows, working_dtype

__all__ = ["Head", "Rows", "head_combined", "head_derivatives", "head_loss", "row_chunks"]

_CHUNK_ELEMENTS = 1 << 21  # of a chunk's logits: rows enough for a GEMM, and still within a cache
_LEAST_ROWS = 64


class Head(NamedTuple):
    """A linear layer whose outputs are the logits of classes."""

    weight: Tensor  # (classes, features)
    bias: Tensor | None  # (classes,)
    chunk: int | None = None  # rows at a time; None for a number that suits the classes


class Rows(NamedTuple):
    """What the head is applied to: only rows that count."""

    features: Tensor  # (rows, features)
    tangent: Tensor | None  # of the same shape
    target: Tensor  # (rows,)


class _Gradients(NamedTuple):
    features: Tensor | None
    tangent: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def row_chunks(rows: int, classes: int, chunk: int | None) -> list[slice]:
    """Cut rows into chunks of about equal size, none longer than told."""
    most = chunk or max(_LEAST_ROWS, _CHUNK_ELEMENTS // max(classes, 1))
    pieces = -(-rows // most)
    return [slice(rows * n // pieces, rows * (n + 1) // pieces) for n in range(pieces)]


def _gradients(rows: Rows, head: Head, wanted: Sequence[bool]) -> _Gradients:
    """Where the gradients that are wanted will go; sums over rows in the working type."""
    inputs = (rows.features, rows.tangent, head.weight, head.bias)
    dtype = working_dtype(rows.features.dtype)
    return _Gradients(
        *(
            torch.zeros_like(x, dtype=x.dtype if n < 2 else dtype)
            if want and x is not None
            else None
            for n, (x, want) in enumerate(zip(inputs, wanted, strict=True))
        )
    )


def _sweep(rows: Rows, head: Head, rule: Rule, gradients: _Gradients) -> Tensor:
    """Sums of ℓ, uᵀHu and ∂ℓ/∂ε over all rows; the gradients are filled if there are coefficients.

    Without a tangent all but ℓ are zero.
    """
    features, tangent, target = rows
    weight, bias, chunk = head
    kinds, dtype = 1 if tangent is None else 2, working_dtype(features.dtype)
    chunks = row_chunks(len(target), len(weight), chunk)
    most = max((part.stop - part.start for part in chunks), default=0)
    logits = features.new_empty(kinds * most, len(weight))
    scratch = features.new_empty(most if kinds == 2 else 0, len(weight), dtype=dtype)
    sums = features.new_zeros(3, dtype=dtype)
    for part in chunks:
        n, stack = part.stop - part.start, features[part]
        if tangent is not None:
            # Logits are made of the first two; where they stood their gradients will stand the
            # other way round, as the last two.
            stack = torch.cat((stack, tangent[part], stack))
        z = torch.mm(stack[: kinds * n], weight.t(), out=logits[: kinds * n])
        if bias is not None:
            z[:n].add_(bias)
        exact = z.to(dtype)
        sums += _differentiate(exact, target[part], rule, scratch[:n])
        if rule.coefficients is not None:
            _multiply_back(exact.to(z.dtype), stack, part, weight, gradients)
    return sums


def _differentiate(z: Tensor, target: Tensor, rule: Rule, scratch: Tensor) -> Tensor:
    """The sums of a chunk; its logits become their gradients."""
    n = len(target)
    if len(z) > n:
        return tangent_rows(z[:n], z[n:], target, rule, dz=z[n:], du=z[:n], p=scratch)
    c = None if rule.coefficients is None else rule.coefficients.loss
    loss = loss_rows(z, target, rule.smoothing, c, out=z)
    return F.pad(loss.view(1), (0, 2))


def _multiply_back(g: Tensor, stack: Tensor, part: slice, weight: Tensor, to: _Gradients) -> None:
    n = part.stop - part.start
    if to.features is not None or to.tangent is not None:
        back = g @ weight
        if to.features is not None:
            to.features[part] = back[-n:]
        if to.tangent is not None:
            to.tangent[part] = back[:n]
    if to.weight is not None:
        source = stack[-len(g) :]
        if to.weight.dtype == g.dtype:
            to.weight.addmm_(g.t(), source)
        else:
            to.weight.add_(g.t() @ source)
    if to.bias is not None:
        to.bias.add_(g[-n:].sum(0, dtype=to.bias.dtype))


def _scaled(
    gradients: Sequence[Tensor | None], factor: float, dtype: torch.dtype
) -> list[Tensor | None]:
    """The gradients times a number, in the type of the inputs."""
    return [
        None if g is None else (g if factor == 1.0 else g * factor).to(dtype) for g in gradients
    ]


class _Loss(torch.autograd.Function):
    """The mean ℓ, with its gradients formed in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        smoothing: float,
        chunk: int | None,
    ) -> Tensor:
        rows, head = Rows(features, None, target), Head(weight, bias, chunk)
        f, w, b = ctx.needs_input_grad[:3]
        gradients = _gradients(rows, head, (f, False, w, b))
        coefficients = Coefficients(1.0, 0.0, 0.0).over(len(target)) if f or w or b else None
        sums = _sweep(rows, head, Rule(smoothing, coefficients=coefficients), gradients)
        formed = (gradients.features, gradients.weight, gradients.bias)
        ctx.save_for_backward(features, weight, bias, target, *formed)
        ctx.smoothing = smoothing
        return sums[0] / max(len(target), 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, target, *formed = ctx.saved_tensors
        inputs = (features, weight, bias)
        if torch.is_grad_enabled():  # the gradient is itself to be differentiated
            again = _differentiable_gradients(*inputs, target, ctx.smoothing, g)
            needed = ctx.needs_input_grad[:3]
            gradients = [x if need else None for x, need in zip(again, needed, strict=True)]
        else:
            gradients = _scaled(formed, g.item(), features.dtype)
        return *gradients, None, None, None


def _differentiable_gradients(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    smoothing: float,
    g: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """d/df = (p - t) W and so on in plain operations, which hold the logits of all rows."""
    p = torch.softmax(F.linear(features, weight, bias), -1) - smoothing / len(weight)
    at_target = p.new_full((1, 1), smoothing - 1.0).expand(len(target), 1)
    delta = p.scatter_add(-1, target.unsqueeze(-1), at_target) * (g / max(len(target), 1))
    return delta @ weight, delta.t() @ features, delta.sum(0)


class _Derivatives(torch.autograd.Function):
    """Means of ℓ, uᵀHu and ∂ℓ/∂ε; the backward makes the logits once more, a chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        tangent: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        rule: Rule,
        chunk: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(features, tangent, weight, bias, target)
        ctx.rule, ctx.chunk = rule, chunk
        rows = Rows(features, tangent, target)
        sums = _sweep(rows, Head(weight, bias, chunk), rule, _Gradients(None, None, None, None))
        loss, quadratic, directional = sums / max(len(target), 1)
        return loss, quadratic, directional

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        features, tangent, weight, bias, target = ctx.saved_tensors
        rows, head = Rows(features, tangent, target), Head(weight, bias, ctx.chunk)
        c = Coefficients(*torch.stack(incoming).tolist()).over(len(target))
        gradients = _gradients(rows, head, ctx.needs_input_grad[:4])
        with torch.autocast(features.device.type, enabled=False):
            _sweep(rows, head, ctx.rule._replace(coefficients=c), gradients)
        return *_scaled(gradients, 1.0, features.dtype), None, None, None


class _Combined(torch.autograd.Function):
    """The weighted total, with its gradients formed in the forward, and the three means."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        tangent: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        rule: Rule,
        chunk: int | None,
    ) -> tuple[Tensor, Tensor]:
        rows, head = Rows(features, tangent, target), Head(weight, bias, chunk)
        gradients = _gradients(rows, head, ctx.needs_input_grad[:4])
        coefficients = rule.coefficients
        assert coefficients is not None
        n, needed = len(target), any(ctx.needs_input_grad)
        how = rule._replace(coefficients=coefficients.over(n) if needed else None)
        means = _sweep(rows, head, how, gradients) / max(n, 1)
        ctx.mark_non_differentiable(means)
        ctx.save_for_backward(*gradients)
        ctx.dtype = features.dtype
        return means @ means.new_tensor(coefficients), means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *_scaled(ctx.saved_tensors, g.item(), ctx.dtype), None, None, None


def _prepared(
    features: Tensor, tangent: Tensor | None, head: Head, target: Tensor, ignore_index: int
) -> tuple[Rows, Head]:
    """Rows that count, and all in the type that matrix products are to be taken in."""
    device = features.device.type
    dtype = torch.promote_types(features.dtype, head.weight.dtype)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    target = target.reshape(-1).long()
    keep = target != ignore_index
    everything = bool(keep.all())

    def rows(x: Tensor) -> Tensor:
        x = x.reshape(len(target), -1).to(dtype)
        return x if everything else x[keep]

    bias = None if head.bias is None else head.bias.to(dtype)
    return (
        Rows(
            rows(features),
            None if tangent is None else rows(tangent),
            target if everything else target[keep],
        ),
        head._replace(weight=head.weight.to(dtype), bias=bias),
    )


def head_loss(
    features: Tensor,
    head: Head,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The mean of ℓ over targets that are not ignored (0 where all are); twice differentiable.

    Args:
        features: (..., features).
        head: the linear layer that makes them logits.
        target: classes (...).
        ignore_index: the target that marks a row as not to be counted.
        label_smoothing: the share of the target's distribution that is spread over all classes.
    """
    rows, (weight, bias, chunk) = _prepared(features, None, head, target, ignore_index)
    with torch.autocast(features.device.type, enabled=False):
        loss: Tensor = _Loss.apply(rows.features, weight, bias, rows.target, label_smoothing, chunk)
    return loss


def head_derivatives(
    features: Tensor,
    u: Tensor,
    head: Head,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    form: str = "hessian",
) -> tuple[Tensor, Tensor, Tensor]:
    """Means of ℓ, uᵀHu (or ‖u‖², for the form "identity") and ∂ℓ/∂ε, all three differentiable.

    ``u`` is the tangent of the features; the quadratic forms are in that of the logits. The other
    arguments are those of ``head_loss``.
    """
    rows, (weight, bias, chunk) = _prepared(features, u, head, target, ignore_index)
    rule = Rule(label_smoothing, form)
    with torch.autocast(features.device.type, enabled=False):
        loss, quadratic, directional = _Derivatives.apply(
            rows.features, rows.tangent, weight, bias, rows.target, rule, chunk
        )
    return loss, quadratic, directional


def head_combined(
    features: Tensor,
    u: Tensor,
    head: Head,
    target: Tensor,
    weights: tuple[float, float, float],
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    form: str = "hessian",
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The weighted total c₀·ℓ + c₁·uᵀHu + c₂·∂ℓ/∂ε, and its three means without weights or graph.

    The gradients are formed in the one sweep that makes the values; the backward only scales them.
    ``weights`` are c₀, c₁, c₂; the other arguments are those of ``head_derivatives``.
    """
    rows, (weight, bias, chunk) = _prepared(features, u, head, target, ignore_index)
    rule = Rule(label_smoothing, form, Coefficients(*weights))
    with torch.autocast(features.device.type, enabled=False):
        total, (loss, quadratic, directional) = _Combined.apply(
            rows.features, rows.tangent, weight, bias, rows.target, rule, chunk
        )
    return total, (loss, quadratic, directional)
