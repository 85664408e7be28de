"""Output layers with their softmax cross-entropy, along a tangent, one chunk of rows at a time.

A *sweep* goes through all chunks once, and memory never holds the logits of more than one. For each
chunk it computes the logits, then the gradients of the total in the logits by the closed forms of
``softmax.py``, and backpropagates these gradients to features and weights. This takes three matrix
products, each over the rows of the features f and of their tangent ḟ together. Plain rows, which have
no tangent, cost as much as the loss alone. Only a second derivative keeps all logits.
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
    dot_target,
    row_weights,
    sweep,
    sweep_with_gradients,
    tangent_gradients_,
    tangent_terms,
    working_dtype,
)

_CHUNK_ELEMENTS = 1 << 22  # logits in a chunk: enough rows for matrix products at full speed
_LEAST_ROWS = 64

Parameters = Sequence[Tensor | None]
Needs = Sequence[bool]
"""Which gradients to compute: in each tensor of ``OutputRows``, and in each parameter."""


class SweepResult(NamedTuple):
    """The result of a sweep over all rows."""

    means: Tensor  # the means of ℓ, uᵀHu and ∂ℓ/∂ε, (3,)
    gradients: Parameters  # of the total in each tensor of the rows, and in each parameter


def row_chunks(rows: int, classes: int, chunk: int | None) -> list[slice]:
    """Cut rows into chunks of about equal size, none longer than ``chunk``."""
    longest = chunk or max(_LEAST_ROWS, _CHUNK_ELEMENTS // max(classes, 1))
    count = -(-rows // longest)
    return [slice(rows * n // count, rows * (n + 1) // count) for n in range(count)]


class OutputLayer(ABC):
    """An output layer with its loss.

    A subclass computes the terms of some rows in plain operations, and ``sweep`` differentiates them
    chunk by chunk. A subclass that has the gradients in closed form overrides ``sweep``.
    """

    parameters: Parameters
    chunk: int | None = None  # rows at a time; None chooses by the number of classes
    softmax_size: int  # the number of classes of the layer's largest softmax
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
        """Return the means and the gradients that are needed; without coefficients, none is needed."""
        c = options.coefficients
        means = rows.features.new_zeros(3, dtype=working_dtype(rows.features.dtype))
        sums = _gradient_sums(rows, parameters, needs)
        parameters = [_leaf(x, need) for x, need in zip(parameters, needs[4:], strict=True)]
        for chunk in rows.cut(lambda n: row_chunks(n, self.softmax_size, self.chunk)):
            part = OutputRows(*map(_leaf, rows.select_rows(chunk), needs))  # type: ignore[arg-type]
            with torch.set_grad_enabled(any(needs)):
                terms = torch.stack(self.terms(part, parameters, options))
                total = terms if c is None else c.total(terms)
            means += terms.detach()
            slices: list[Any] = [chunk, rows.tangent_slice(chunk), *[...] * (len(sums) - 2)]
            leaves_and_sums = [
                (leaf, gradient_sum[rows_of_chunk])
                for leaf, gradient_sum, rows_of_chunk in zip(
                    (*part, *parameters), sums, slices, strict=True
                )
                if leaf is not None and gradient_sum is not None
            ]
            chunk_gradients = gradients(total, [leaf for leaf, _ in leaves_and_sums])
            for (_, gradient_sum), gradient in zip(leaves_and_sums, chunk_gradients, strict=True):
                gradient_sum += gradient
        return SweepResult(means, sums)

    def differentiable_means(
        self, rows: OutputRows, parameters: Parameters, options: SoftmaxOptions
    ) -> Tensor:
        """Return the three means in plain operations, with a graph that keeps all logits in memory."""
        slices = (slice(0, rows.num_plain), slice(rows.num_plain, len(rows.target)))
        parts = [rows.select_rows(part) for part in slices if part.stop > part.start]
        terms = [torch.stack(self.terms(part, parameters, options)) for part in parts]
        return torch.stack([rows.weight.new_zeros(3), *terms]).sum(0)

    def loss(self, features: Tensor, target: Tensor, options: SoftmaxOptions) -> Tensor:
        """Return the mean of ℓ over the targets that count, or 0 if none does; twice differentiable."""
        options = options._replace(coefficients=Coefficients(1.0, 0.0, 0.0))
        mean: Tensor = self._apply(_TotalFunction, features, None, target, options)[0]
        return mean

    def derivatives(
        self, features: Tensor, u: Tensor, target: Tensor, options: SoftmaxOptions
    ) -> Derivatives:
        """Return the means of ℓ, the quadratic form and ∂ℓ/∂ε along u, the tangent of the last rows."""
        return Derivatives(*self._apply(_DerivativesFunction, features, u, target, options))

    def combined(
        self, features: Tensor, u: Tensor, target: Tensor, options: SoftmaxOptions
    ) -> tuple[Tensor, Derivatives]:
        """Return the total, and its three means without coefficients or a graph.

        One sweep computes the values and the gradients. The backward pass only scales the gradients.
        """
        total, means = self._apply(_TotalFunction, features, u, target, options)
        return total, Derivatives(*means)

    def _apply(
        self, function: Any, features: Tensor, u: Tensor | None, target: Tensor, options: Any
    ) -> Any:
        """Call an autograd function of this module on rows, in the dtype of the matrix products."""
        dtype, width = self._dtype(features), features.shape[-1]
        target = target.reshape(-1).long()
        target_and_weight = row_weights(target, options.ignore_index, working_dtype(dtype))
        inputs = (None if x is None else x.reshape(-1, width).to(dtype) for x in (features, u))
        parameters = (None if p is None else p.to(dtype) for p in self.parameters)
        with torch.autocast(features.device.type, enabled=False):
            return function.apply(self, options, *inputs, *target_and_weight, *parameters)

    def _dtype(self, features: Tensor) -> torch.dtype:
        """Return the dtype of the matrix products: that of autocast, or of features and parameters."""
        device, dtype = features.device.type, features.dtype
        for parameter in self.parameters:
            dtype = dtype if parameter is None else torch.promote_types(dtype, parameter.dtype)
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype


def _leaf(x: Tensor | None, needs_gradient: bool) -> Tensor | None:
    return None if x is None else x.detach().requires_grad_(needs_gradient)


def _gradient_sums(rows: OutputRows, parameters: Parameters, needs: Needs) -> Parameters:
    """Return zeros to add gradients to, in the working dtype; None for a gradient not needed."""
    dtype = working_dtype(rows.features.dtype)
    return [
        torch.zeros_like(x, dtype=dtype) if need and x is not None else None
        for x, need in zip((*rows, *parameters), needs, strict=True)
    ]


def softmax_terms(
    z: Tensor, u: Tensor | None, target: Tensor, options: SoftmaxOptions
) -> Derivatives:
    """Return ℓ, uᵀHu and ∂ℓ/∂ε of each row of logits z along u; without u, ℓ and zeros.

    If the options have coefficients, the gradients come from the closed forms: the result can be
    differentiated once, and z and u are overwritten. Otherwise all operations are plain ones, which
    can be differentiated any number of times.
    """
    if u is not None and options.coefficients is not None:
        return Derivatives(*_SoftmaxTermsFunction.apply(z, u, target, options))
    log_p = z.log_softmax(-1)
    loss = -dot_target(log_p, target, options.smoothing)  # ℓ = -Σ t log p
    if u is None:
        return Derivatives(loss, torch.zeros_like(loss), torch.zeros_like(loss))
    p = log_p.exp()
    mean_u = torch.linalg.vecdot(p, u)
    directional = mean_u - dot_target(u, target, options.smoothing)  # ∂ℓ/∂ε = Σ p u - Σ t u
    if options.form == "identity":
        return Derivatives(loss, torch.linalg.vecdot(u, u), directional)
    v = u - mean_u.unsqueeze(-1)  # v = u - Σ p u
    return Derivatives(loss, torch.linalg.vecdot(p * v, v), directional)  # uᵀHu = Σ p v²


class _SoftmaxTermsFunction(torch.autograd.Function):
    """The terms of each row along a tangent, with gradients by the closed forms."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, u: Tensor, target: Tensor, options: SoftmaxOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = WorkBuffers(torch.empty_like(z), v=u, pv=z)
        terms = tangent_terms(z, u, target, options, work)
        ctx.save_for_backward(target, *work, *terms)
        ctx.options = options
        return terms.loss, terms.quadratic, terms.directional

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        target, p, v, pv, *terms = ctx.saved_tensors
        c = Coefficients(*(g.unsqueeze(-1) for g in grad_outputs))
        tangent_gradients_(WorkBuffers(p, v, pv), RowTerms(*terms), target, ctx.options, c)
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
        terms = softmax_terms(rows.features, rows.tangent, rows.target, options)
        return Derivatives(*(rows.weight @ x for x in terms))

    def sweep(
        self, rows: OutputRows, parameters: Parameters, options: SoftmaxOptions, needs: Needs
    ) -> SweepResult:
        """Compute the sweep by the closed forms."""
        if options.coefficients is None:
            return SweepResult(sweep(rows, options), [None] * 4)
        means, gradients = sweep_with_gradients(rows, options)
        return SweepResult(means, [*gradients, None, None])


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
        sums = _gradient_sums(rows, parameters, needs)
        dtype, buffer = working_dtype(weight.dtype), weight.new_empty(0)
        means = rows.features.new_zeros(3, dtype=dtype)
        for chunk in row_chunks(len(rows.target), len(weight), self.chunk):
            part = rows.select_rows(chunk)
            n, num_plain = len(part.target), part.num_plain
            stack = (
                part.features if part.tangent is None else torch.cat((part.features, part.tangent))
            )
            size = len(stack) * len(weight)
            if buffer.numel() < size:
                buffer = weight.new_empty(size)
            # Chunks share memory, because new memory costs as much as a pass over it.
            out = buffer[:size].view(len(stack), len(weight))
            z_and_u = torch.mm(stack, weight.t(), out=out).to(dtype)
            z, u = z_and_u[:n], z_and_u[n:]
            if bias is not None:
                z.add_(bias)
            logits = part._replace(features=z, tangent=u)
            if c is None:
                means += sweep(logits, options)
                continue
            # For plain rows, dz overwrites z. For the others, dz overwrites u, and du overwrites z.
            buffers = GradientBuffers(dz_plain=z[:num_plain], dz_tangent=u, du=z[num_plain:])
            means += sweep(logits, options, c.times(part.weight), buffers)
            slices = (chunk, rows.tangent_slice(chunk))
            _backpropagate(z_and_u, weight, part, sums, slices)
        return SweepResult(means, sums)


def _backpropagate(
    g: Tensor, weight: Tensor, rows: OutputRows, sums: Parameters, slices: tuple[slice, slice]
) -> None:
    """Add the gradients in features, tangent, W and b of a chunk of rows to ``sums``.

    The rows of g are, in this order, dz of the plain rows, du, and dz of the rows with a tangent.
    ``slices`` are the positions of the chunk in the features and in the tangent.
    """
    n, num_plain = len(rows.target), rows.num_plain
    d_features, d_tangent, _, _, d_weight, d_bias = sums
    if d_bias is not None:
        d_bias.add_(g[:num_plain].sum(0)).add_(g[n:].sum(0))
    g = g.to(weight.dtype)
    if d_weight is not None:
        x = rows.features
        if rows.tangent is not None:
            x = torch.cat((x[:num_plain], rows.tangent, x[num_plain:]))
        if d_weight.dtype == g.dtype:
            d_weight.addmm_(g.t(), x)
        else:
            d_weight.add_(g.t() @ x)
    if d_features is None and d_tangent is None:
        return
    dx = g @ weight
    if d_features is not None:
        d_features[slices[0]] = torch.cat((dx[:num_plain], dx[n:])) if n < len(dx) else dx
    if d_tangent is not None and rows.tangent is not None:
        d_tangent[slices[1]] = dx[num_plain:n]


class _DerivativesFunction(torch.autograd.Function):
    """The means of ℓ, uᵀHu and ∂ℓ/∂ε; the backward pass computes the logits again, chunk by chunk.

    The tensors are those of the rows, then the parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: OutputLayer, options: SoftmaxOptions, *tensors: Any
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.layer, ctx.options = layer, options
        no_gradients = [False] * len(tensors)
        rows, parameters = _rows_and_parameters(tensors)
        return layer.sweep(rows, parameters, options, no_gradients).means.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows, parameters = _rows_and_parameters(ctx.saved_tensors)
        options = ctx.options._replace(coefficients=Coefficients(*grad_outputs))
        with torch.autocast(rows.target.device.type, enabled=False):
            result = ctx.layer.sweep(rows, parameters, options, ctx.needs_input_grad[2:])
        rounded = (None if g is None else g.to(rows.features.dtype) for g in result.gradients)
        return None, None, *rounded


class _TotalFunction(torch.autograd.Function):
    """The total and the three means; the forward pass also computes the gradients of the total."""

    @staticmethod
    def forward(
        ctx: Any, layer: OutputLayer, options: SoftmaxOptions, *tensors: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.layer, ctx.options, c = layer, options, options.coefficients
        assert c is not None
        needs = ctx.needs_input_grad[2:]
        if not any(needs):
            options = options._replace(coefficients=None)
        means, gradients = layer.sweep(*_rows_and_parameters(tensors), options, needs)
        ctx.mark_non_differentiable(means)
        ctx.save_for_backward(*tensors, *gradients)
        return c.total(means), means

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        tensors, gradients = ctx.saved_tensors[: len(needs)], ctx.saved_tensors[len(needs) :]
        if not torch.is_grad_enabled():
            scaled = (None if x is None else (x * g).to(tensors[0].dtype) for x in gradients)
            return None, None, *scaled
        # A second derivative needs a graph of this backward pass: compute the total in plain operations.
        without_closed_forms = ctx.options._replace(coefficients=None)
        rows, parameters = _rows_and_parameters(tensors)
        means = ctx.layer.differentiable_means(rows, parameters, without_closed_forms)
        total = ctx.options.coefficients.total(means)
        leaves = [x for x, need in zip(tensors, needs, strict=True) if need]
        gradient = iter(torch.autograd.grad(total, leaves, g, create_graph=True))
        return None, None, *(next(gradient) if need else None for need in needs)


def _rows_and_parameters(tensors: Sequence[Any]) -> tuple[OutputRows, Parameters]:
    return OutputRows(*tensors[:4]), tensors[4:]
