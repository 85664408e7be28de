"""Output layers with their softmax cross-entropy, along a tangent, for a chunk of rows at a time.

Memory never holds more than one chunk of logits. A *sweep* goes through all chunks once. For each chunk
it computes the logits, forms the gradients of the total in them by the closed forms of ``softmax.py``,
and backpropagates them to features and weights: three matrix products, over the rows of the features f
and of their tangent ḟ together. Rows without a tangent cost as much as the loss alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from undrop.autodiff import gradients
from undrop.kernels.softmax import (
    Coefficients,
    Derivatives,
    GradientBuffers,
    OutputRows,
    RowTerms,
    SoftmaxOptions,
    WorkBuffers,
    expected,
    row_weights,
    sweep,
    sweep_with_gradients,
    tangent_gradients_,
    tangent_rows,
    working_dtype,
)

_CHUNK_ELEMENTS = 1 << 22  # logits in a chunk: enough rows for matrix products at full speed
_LEAST_ROWS = 64

Parameters = Sequence[Tensor | None]
Needs = Sequence[bool]
"""Which gradients to compute: in the features, in the tangent, and in each parameter."""


class SweepResult(NamedTuple):
    """The result of a sweep over all rows."""

    means: Tensor  # of ℓ, uᵀHu and ∂ℓ/∂ε, (3,)
    gradients: Parameters  # of the total, in the features, the tangent and each parameter


def row_chunks(rows: int, classes: int, chunk: int | None) -> list[slice]:
    """Cut rows into chunks of about equal size, none longer than ``chunk``."""
    most = chunk or max(_LEAST_ROWS, _CHUNK_ELEMENTS // max(classes, 1))
    pieces = -(-rows // most)
    return [slice(rows * n // pieces, rows * (n + 1) // pieces) for n in range(pieces)]


class OutputLayer(ABC):
    """An output layer with its loss.

    A subclass computes the terms of some rows in plain operations, and ``sweep`` differentiates them
    chunk by chunk. A subclass with closed forms of the gradients overrides ``sweep``.
    """

    parameters: Parameters
    chunk: int | None = None  # rows at a time; None chooses by the number of classes
    softmax_size: int  # the number of classes of its largest softmax
    num_classes: int  # the number of classes that a target can have
    width: int  # the number of features

    @abstractmethod
    def terms(
        self, rows: OutputRows, parameters: Parameters, options: SoftmaxOptions
    ) -> Derivatives:
        """Return the sums over rows of weight times ℓ, uᵀHu and ∂ℓ/∂ε, in plain operations.

        Either all rows have a tangent or none; without tangents the last two sums are 0.
        """

    def sweep(
        self, rows: OutputRows, parameters: Parameters, options: SoftmaxOptions, needs: Needs
    ) -> SweepResult:
        """Return the means and, if the options have coefficients, the gradients that are needed."""
        c = options.coefficients
        needs = needs if c is not None else [False] * len(needs)
        means = rows.features.new_zeros(3, dtype=working_dtype(rows.features.dtype))
        to = _zeros(rows, parameters, needs)
        held = [_leaf(x, need) for x, need in zip(parameters, needs[2:], strict=True)]
        for part in self._chunks(rows):
            some = rows.part(part)
            inputs: list[Any] = [*map(_leaf, some[:2], needs), *held]
            here = OutputRows(inputs[0], inputs[1], some.target, some.weight)
            with torch.set_grad_enabled(any(needs)):
                terms = torch.stack(self.terms(here, held, options))
                total = terms if c is None else c.total(terms)
            means += terms.detach()
            places = [part, rows.of_tangent(part), *(slice(None) for _ in held)]
            used = [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]
            if used:
                leaves = [inputs[i] for i in used]
                for i, gradient in zip(used, gradients(total, leaves), strict=True):
                    to[i][places[i]] += gradient  # type: ignore[index]
        return SweepResult(means, to)

    def _chunks(self, rows: OutputRows) -> list[slice]:
        """Return chunks of the rows without a tangent, then of the rows with one."""
        plain = row_chunks(rows.plain, self.softmax_size, self.chunk)
        with_tangent = row_chunks(len(rows.target) - rows.plain, self.softmax_size, self.chunk)
        return [*plain, *(slice(rows.plain + m.start, rows.plain + m.stop) for m in with_tangent)]

    def plain_means(
        self, rows: OutputRows, parameters: Parameters, options: SoftmaxOptions
    ) -> Tensor:
        """Return the three means in plain operations, which keep all logits in memory."""
        parts = (slice(0, rows.plain), slice(rows.plain, len(rows.target)))
        some = [rows.part(part) for part in parts if part.stop > part.start]
        terms = [torch.stack(self.terms(part, parameters, options)) for part in some]
        return torch.stack([rows.weight.new_zeros(3), *terms]).sum(0)

    def loss(self, features: Tensor, target: Tensor, options: SoftmaxOptions) -> Tensor:
        """Return the mean of ℓ over the targets that count, 0 if none does; twice differentiable."""
        options = options._replace(coefficients=Coefficients(1.0, 0.0, 0.0))
        mean: Tensor = self._apply(_Combined, features, None, target, options)[0]
        return mean

    def derivatives(
        self, features: Tensor, u: Tensor, target: Tensor, options: SoftmaxOptions
    ) -> Derivatives:
        """Return the means of ℓ, the quadratic form and ∂ℓ/∂ε, along u, the tangent of the last rows."""
        return Derivatives(*self._apply(_Derivatives, features, u, target, options))

    def combined(
        self, features: Tensor, u: Tensor, target: Tensor, options: SoftmaxOptions
    ) -> tuple[Tensor, Derivatives]:
        """Return the total, and its three means without coefficients or a graph.

        The same sweep computes the values and the gradients; the backward pass only scales them.
        """
        total, means = self._apply(_Combined, features, u, target, options)
        return total, Derivatives(*means)

    def _apply(
        self, function: Any, features: Tensor, u: Tensor | None, target: Tensor, options: Any
    ) -> Any:
        """Call an autograd function of this module, with all tensors in the type of matrix products."""
        dtype, width = self._dtype(features), features.shape[-1]
        flat = target.reshape(-1).long()
        weights = row_weights(flat, options.ignore_index, working_dtype(dtype))
        rows = (None if x is None else x.reshape(-1, width).to(dtype) for x in (features, u))
        parameters = (None if p is None else p.to(dtype) for p in self.parameters)
        with torch.autocast(features.device.type, enabled=False):
            return function.apply(self, options, *weights, *rows, *parameters)

    def _dtype(self, features: Tensor) -> torch.dtype:
        device, dtype = features.device.type, features.dtype
        for parameter in self.parameters:
            dtype = dtype if parameter is None else torch.promote_types(dtype, parameter.dtype)
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype


def _leaf(x: Tensor | None, needed: bool) -> Tensor | None:
    return None if x is None else x.detach().requires_grad_(needed)


def _zeros(rows: OutputRows, parameters: Parameters, needs: Needs) -> Parameters:
    """Return buffers for sums of gradients, in the working type; None if a gradient is not needed."""
    dtype = working_dtype(rows.features.dtype)
    return [
        torch.zeros_like(x, dtype=dtype) if need and x is not None else None
        for x, need in zip((rows.features, rows.tangent, *parameters), needs, strict=True)
    ]


def softmax_terms(
    z: Tensor, u: Tensor | None, target: Tensor, options: SoftmaxOptions
) -> Derivatives:
    """Return ℓ, uᵀHu and ∂ℓ/∂ε of each row of logits z along u; without u, ℓ and zeros.

    If the options have coefficients, the closed forms compute the gradient: the result can be
    differentiated once, and z and u are overwritten. Otherwise it uses plain operations.
    """
    if u is not None and options.coefficients is not None:
        return Derivatives(*_RowTerms.apply(z, u, target, options))
    log_p = z.log_softmax(-1)
    loss = -expected(log_p, target, options.smoothing)
    if u is None:
        return Derivatives(loss, torch.zeros_like(loss), torch.zeros_like(loss))
    p = log_p.exp()
    mean = torch.linalg.vecdot(p, u)
    directional = mean - expected(u, target, options.smoothing)
    if options.form == "identity":
        return Derivatives(loss, torch.linalg.vecdot(u, u), directional)
    v = u - mean.unsqueeze(-1)
    return Derivatives(loss, torch.linalg.vecdot(p * v, v), directional)


class _RowTerms(torch.autograd.Function):
    """The terms of each row along a tangent, with gradients by the closed forms."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, u: Tensor, target: Tensor, options: SoftmaxOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = WorkBuffers(u, z, torch.empty_like(z))
        terms = tangent_rows(z, u, target, options, work)
        ctx.save_for_backward(target, *work, *terms)
        ctx.options = options
        return terms.loss, terms.quadratic, terms.directional

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, Tensor, None, None]:
        target, v, pv, p, *terms = ctx.saved_tensors
        c = Coefficients(*(g.unsqueeze(-1) for g in incoming))
        tangent_gradients_(WorkBuffers(v, pv, p), RowTerms(*terms), target, ctx.options, c)
        return v, pv, None, None


class Logits(OutputLayer):
    """Cross-entropy on logits: an output layer without parameters."""

    parameters = ()

    def _dtype(self, features: Tensor) -> torch.dtype:
        return working_dtype(features.dtype)

    def terms(
        self, rows: OutputRows, parameters: Parameters, options: SoftmaxOptions
    ) -> Derivatives:
        """Return the terms of the softmax."""
        found = softmax_terms(rows.features, rows.tangent, rows.target, options)
        return Derivatives(*(rows.weight @ x for x in found))

    def sweep(
        self, rows: OutputRows, parameters: Parameters, options: SoftmaxOptions, needs: Needs
    ) -> SweepResult:
        """Compute the sweep by the closed forms."""
        if options.coefficients is None or not any(needs):
            return SweepResult(sweep(rows, options, None, None), [None, None])
        return SweepResult(*sweep_with_gradients(rows, options))


class LinearOutput(OutputLayer):
    """Cross-entropy on ``W f + b``; the parameters are W (classes, features) and b (classes,)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, chunk: int | None) -> None:
        self.parameters = (weight, bias)
        self.chunk, self.width = chunk, weight.shape[1]
        self.softmax_size = self.num_classes = len(weight)

    def terms(
        self, rows: OutputRows, parameters: Parameters, options: SoftmaxOptions
    ) -> Derivatives:
        """Return the terms of the softmax of all logits."""
        weight, bias = parameters
        assert weight is not None
        z = F.linear(rows.features, weight, bias)
        u = None if rows.tangent is None else F.linear(rows.tangent, weight)
        return Logits().terms(rows._replace(features=z, tangent=u), (), options)

    def sweep(
        self, rows: OutputRows, parameters: Parameters, options: SoftmaxOptions, needs: Needs
    ) -> SweepResult:
        """Sweep chunk by chunk; the gradients overwrite the logits."""
        weight, bias = parameters
        assert weight is not None
        c = options.coefficients
        to = _zeros(rows, parameters, needs if c is not None else [False] * len(needs))
        dtype, buffer = working_dtype(weight.dtype), weight.new_empty(0)
        means = rows.features.new_zeros(3, dtype=dtype)
        for part in row_chunks(len(rows.target), len(weight), self.chunk):
            some = rows.part(part)
            n, plain = len(some.target), some.plain
            stack = some.features
            if some.tangent is not None:
                stack = torch.cat((stack, some.tangent))
            size = len(stack) * len(weight)
            if (
                buffer.numel() < size
            ):  # chunks share memory: new memory costs as much as a pass over it
                buffer = weight.new_empty(size)
            out = buffer[:size].view(len(stack), len(weight))
            z = torch.mm(stack, weight.t(), out=out).to(dtype)
            if bias is not None:
                z[:n].add_(bias)
            # The gradients of z and u are written over u and z.
            places = None if c is None else GradientBuffers(z[:plain], z[n:], z[plain:n])
            times = None if c is None else c.times(some.weight)
            logits = some._replace(features=z[:n], tangent=z[n:])
            means += sweep(logits, options, times, places)
            if c is not None:
                _backpropagate(z, weight, some, to, (part, rows.of_tangent(part)))
        return SweepResult(means, to)


def _backpropagate(
    g: Tensor, weight: Tensor, rows: OutputRows, to: Parameters, places: tuple[slice, slice]
) -> None:
    """Add the gradients in features, tangent, W and b that follow from those in the logits.

    The rows of g are, in order: z without a tangent, u, z with a tangent. ``places`` are the rows of the
    chunk in the features and in the tangent.
    """
    n, plain = len(rows.target), rows.plain
    features, tangent, to_weight, to_bias = to
    if to_bias is not None:
        to_bias.add_(g[:plain].sum(0)).add_(g[n:].sum(0))
    g = g.to(weight.dtype)
    if to_weight is not None:
        source = rows.features
        if rows.tangent is not None:
            source = torch.cat((source[:plain], rows.tangent, source[plain:]))
        if to_weight.dtype == g.dtype:
            to_weight.addmm_(g.t(), source)
        else:
            to_weight.add_(g.t() @ source)
    if features is None and tangent is None:
        return
    back = g @ weight
    if features is not None:
        features[places[0]] = torch.cat((back[:plain], back[n:])) if n < len(back) else back
    if tangent is not None and rows.tangent is not None:
        tangent[places[1]] = back[plain:n]


class _Derivatives(torch.autograd.Function):
    """Means of ℓ, uᵀHu and ∂ℓ/∂ε; the backward pass computes the logits again, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        output: OutputLayer,
        options: SoftmaxOptions,
        target: Tensor,
        weight: Tensor,
        *inputs: Any,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(target, weight, *inputs)
        ctx.output, ctx.options = output, options
        rows, parameters = OutputRows(inputs[0], inputs[1], target, weight), inputs[2:]
        return output.sweep(rows, parameters, options, [False] * len(inputs)).means.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        target, weight, *inputs = ctx.saved_tensors
        rows, parameters = OutputRows(inputs[0], inputs[1], target, weight), inputs[2:]
        options = ctx.options._replace(coefficients=Coefficients(*incoming))
        with torch.autocast(target.device.type, enabled=False):
            found = ctx.output.sweep(rows, parameters, options, ctx.needs_input_grad[4:])
        cast = (None if g is None else g.to(inputs[0].dtype) for g in found.gradients)
        return None, None, None, None, *cast


class _Combined(torch.autograd.Function):
    """The weighted total, with its gradients formed in the forward pass, and the three means."""

    @staticmethod
    def forward(
        ctx: Any,
        output: OutputLayer,
        options: SoftmaxOptions,
        target: Tensor,
        weight: Tensor,
        *inputs: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.output, ctx.options, c = output, options, options.coefficients
        assert c is not None
        rows, needs = OutputRows(inputs[0], inputs[1], target, weight), ctx.needs_input_grad[4:]
        used = options if any(needs) else options._replace(coefficients=None)
        means, gradients = output.sweep(rows, inputs[2:], used, needs)
        ctx.mark_non_differentiable(means)
        ctx.save_for_backward(target, weight, *inputs, *gradients)
        return c.total(means), means

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        target, weight, *saved = ctx.saved_tensors
        inputs, formed = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        if not torch.is_grad_enabled():
            scaled = (None if x is None else (x * g).to(inputs[0].dtype) for x in formed)
            return None, None, None, None, *scaled
        # The graph of this backward pass is needed, for a second derivative.
        rows, needs = OutputRows(inputs[0], inputs[1], target, weight), ctx.needs_input_grad[4:]
        plain = ctx.options._replace(coefficients=None)
        means = ctx.output.plain_means(rows, inputs[2:], plain)
        total = ctx.options.coefficients.total(means)
        leaves = [x for x, need in zip(inputs, needs, strict=True) if need]
        found = iter(torch.autograd.grad(total, leaves, g, create_graph=True))
        return None, None, None, None, *(next(found) if need else None for need in needs)
