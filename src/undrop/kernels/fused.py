"""Losses on features that contain the output layer, and never hold more than a chunk of logits.

A chunk of rows computes its logits, overwrites them with their gradients (``softmax.py``), and
multiplies these back: three GEMMs, over the rows of the features f and of their tangent ḟ together.
Rows without a tangent cost what the loss alone costs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undrop.kernels.softmax import Coefficients, Rule, row_weights, working_dtype

_CHUNK_ELEMENTS = 1 << 22  # of a chunk's logits: rows enough for GEMMs at full speed
_LEAST_ROWS = 64

Parameters = Sequence[Tensor | None]


class Rows(NamedTuple):
    """The input of an output layer."""

    features: Tensor  # (rows, features)
    tangent: Tensor | None  # of all rows, or of the last ones; None for none
    target: Tensor  # (rows,)
    weight: Tensor  # of each row in the mean: 1/N, or 0 for an ignored target

    def of_tangent(self, which: slice) -> slice:
        """Where the tangent has those of some rows that have one."""
        plain = len(self.target) - (0 if self.tangent is None else len(self.tangent))
        return slice(max(which.start - plain, 0), max(which.stop - plain, 0))

    def part(self, which: slice | Tensor) -> Rows:
        """Some of the rows; any of them only where all have a tangent or none has."""
        tangent = self.tangent
        if tangent is not None:
            tangent = tangent[self.of_tangent(which) if isinstance(which, slice) else which]
            tangent = tangent if len(tangent) else None
        return Rows(self.features[which], tangent, self.target[which], self.weight[which])


class Gradients(NamedTuple):
    """Where gradients are added; None for those that are not needed."""

    features: Tensor | None
    tangent: Tensor | None
    parameters: Parameters

    def part(self, features: slice, tangent: slice) -> Gradients:
        """Those of some rows."""
        return Gradients(
            None if self.features is None else self.features[features],
            None if self.tangent is None else self.tangent[tangent],
            self.parameters,
        )


def row_chunks(rows: int, classes: int, chunk: int | None) -> list[slice]:
    """Cut rows into chunks of about equal size, none longer than ``chunk``."""
    most = chunk or max(_LEAST_ROWS, _CHUNK_ELEMENTS // max(classes, 1))
    pieces = -(-rows // most)
    return [slice(rows * n // pieces, rows * (n + 1) // pieces) for n in range(pieces)]


class Output(ABC):
    """An output layer with its loss."""

    parameters: Parameters

    @abstractmethod
    def sweep(self, rows: Rows, parameters: Parameters, rule: Rule, to: Gradients) -> Tensor:
        """The means of ℓ, uᵀHu and ∂ℓ/∂ε, (3,).

        With coefficients in the rule the gradients of the total are added to ``to``.
        """

    @abstractmethod
    def plain(self, rows: Rows, parameters: Parameters, smoothing: float) -> Tensor:
        """The mean of ℓ in plain operations, which are twice differentiable and hold all logits."""

    def loss(self, features: Tensor, target: Tensor, rule: Rule, ignore_index: int) -> Tensor:
        """The mean of ℓ over targets that are not ignored (0 if all are); twice differentiable.

        Args:
            features: (..., features).
            target: classes (...).
            rule: how to treat rows.
            ignore_index: the target that marks an ignored row.
        """
        rows, parameters = _prepared(features, None, target, self.parameters, ignore_index)
        with torch.autocast(features.device.type, enabled=False):
            mean: Tensor = _Loss.apply(
                self, rule, rows.target, rows.weight, rows.features, *parameters
            )
        return mean

    def derivatives(
        self, features: Tensor, u: Tensor, target: Tensor, rule: Rule, ignore_index: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Means of ℓ, the quadratic form and ∂ℓ/∂ε along the tangent u of the last features."""
        rows, parameters = _prepared(features, u, target, self.parameters, ignore_index)
        arguments = (rows.target, rows.weight, rows.features, rows.tangent, *parameters)
        with torch.autocast(features.device.type, enabled=False):
            loss, quadratic, directional = _Derivatives.apply(self, rule, *arguments)
        return loss, quadratic, directional

    def combined(
        self, features: Tensor, u: Tensor, target: Tensor, rule: Rule, ignore_index: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The total with the rule's coefficients, and its three means without them or a graph.

        The gradients are formed in the same sweep as the values; the backward pass scales them.
        """
        rows, parameters = _prepared(features, u, target, self.parameters, ignore_index)
        arguments = (rows.target, rows.weight, rows.features, rows.tangent, *parameters)
        with torch.autocast(features.device.type, enabled=False):
            total, (loss, quadratic, directional) = _Combined.apply(self, rule, *arguments)
        return total, (loss, quadratic, directional)


def _prepared(
    features: Tensor,
    tangent: Tensor | None,
    target: Tensor,
    parameters: Parameters,
    ignore_index: int,
) -> tuple[Rows, Parameters]:
    """The rows, and all in the type of the matrix products."""
    device, dtype = features.device.type, features.dtype
    for parameter in parameters:
        dtype = dtype if parameter is None else torch.promote_types(dtype, parameter.dtype)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    width = features.shape[-1]
    rows = Rows(
        features.reshape(-1, width).to(dtype),
        None if tangent is None else tangent.reshape(-1, width).to(dtype),
        *row_weights(target.reshape(-1).long(), ignore_index, working_dtype(dtype)),
    )
    return rows, [None if parameter is None else parameter.to(dtype) for parameter in parameters]


def _gradients(rows: Rows, parameters: Parameters, wanted: Sequence[bool]) -> Gradients:
    """Zeros for those that are wanted, in the working type since they are sums."""
    dtype = working_dtype(rows.features.dtype)
    features, tangent, *rest = (
        torch.zeros_like(x, dtype=dtype) if want and x is not None else None
        for x, want in zip((rows.features, rows.tangent, *parameters), wanted, strict=True)
    )
    return Gradients(features, tangent, rest)


def _scaled(to: Parameters, factor: Tensor, dtype: torch.dtype) -> list[Tensor | None]:
    """The gradients times a number, in the type of the inputs."""
    return [None if g is None else (g * factor).to(dtype) for g in to]


class _Loss(torch.autograd.Function):
    """The mean ℓ, with its gradients formed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Output,
        rule: Rule,
        target: Tensor,
        weight: Tensor,
        features: Tensor,
        *parameters: Tensor | None,
    ) -> Tensor:
        rows, needs = Rows(features, None, target, weight), ctx.needs_input_grad[4:]
        to = _gradients(rows, parameters, (needs[0], False, *needs[1:]))
        c = Coefficients(1.0, 0.0, 0.0) if any(needs) else None
        means = output.sweep(rows, parameters, rule._replace(coefficients=c), to)
        ctx.save_for_backward(target, weight, features, *parameters, to.features, *to.parameters)
        ctx.output, ctx.smoothing = output, rule.smoothing
        return means[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        target, weight, *saved = ctx.saved_tensors
        inputs, formed = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        if not torch.is_grad_enabled():
            return None, None, None, None, *_scaled(formed, g, inputs[0].dtype)
        # A second derivative is wanted.
        rows, needs = Rows(inputs[0], None, target, weight), ctx.needs_input_grad[4:]
        mean = ctx.output.plain(rows, inputs[1:], ctx.smoothing)
        wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
        found = iter(torch.autograd.grad(mean, wanted, g, create_graph=True))
        return None, None, None, None, *(next(found) if need else None for need in needs)


class _Derivatives(torch.autograd.Function):
    """Means of ℓ, uᵀHu and ∂ℓ/∂ε; the backward pass computes the logits again, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Output,
        rule: Rule,
        target: Tensor,
        weight: Tensor,
        features: Tensor,
        tangent: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(target, weight, features, tangent, *parameters)
        ctx.output, ctx.rule = output, rule
        rows, nowhere = Rows(features, tangent, target, weight), [None] * len(parameters)
        means = output.sweep(rows, parameters, rule, Gradients(None, None, nowhere))
        loss, quadratic, directional = means
        return loss, quadratic, directional

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        target, weight, features, tangent, *parameters = ctx.saved_tensors
        rows = Rows(features, tangent, target, weight)
        to = _gradients(rows, parameters, ctx.needs_input_grad[4:])
        rule = ctx.rule._replace(coefficients=Coefficients(*incoming))
        with torch.autocast(features.device.type, enabled=False):
            ctx.output.sweep(rows, parameters, rule, to)
        gradients = (to.features, to.tangent, *to.parameters)
        cast = (None if g is None else g.to(features.dtype) for g in gradients)
        return None, None, None, None, *cast


class _Combined(torch.autograd.Function):
    """The weighted total, with its gradients formed in the forward pass, and the three means."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Output,
        rule: Rule,
        target: Tensor,
        weight: Tensor,
        features: Tensor,
        tangent: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rows, c = Rows(features, tangent, target, weight), rule.coefficients
        assert c is not None
        to = _gradients(rows, parameters, ctx.needs_input_grad[4:])
        with_gradients = c if any(ctx.needs_input_grad) else None
        means = output.sweep(rows, parameters, rule._replace(coefficients=with_gradients), to)
        ctx.mark_non_differentiable(means)
        ctx.save_for_backward(to.features, to.tangent, *to.parameters)
        ctx.dtype = features.dtype
        return c.total(means), means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *_scaled(ctx.saved_tensors, g, ctx.dtype)
