"""Losses on features that have the output layer inside, and never hold more than a chunk of logits.

A chunk of rows makes its logits, turns them into gradients where they stand (``softmax.py``), and
multiplies these back: three GEMMs, over the rows of the features f and of their tangent ḟ together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undrop.kernels.softmax import Coefficients, Rule, working_dtype

__all__ = ["Gradients", "Output", "Parameters", "Rows", "row_chunks"]

_CHUNK_ELEMENTS = 1 << 22  # of a chunk's logits: rows enough for GEMMs at full speed
_LEAST_ROWS = 64

Parameters = Sequence[Tensor | None]


class Rows(NamedTuple):
    """What an output layer is applied to: only rows that count."""

    features: Tensor  # (rows, features)
    tangent: Tensor | None  # of the same shape
    target: Tensor  # (rows,)

    def part(self, which: slice | Tensor) -> Rows:
        """Some of the rows."""
        tangent = None if self.tangent is None else self.tangent[which]
        return Rows(self.features[which], tangent, self.target[which])


class Gradients(NamedTuple):
    """Where gradients are added up; None where they are not wanted."""

    features: Tensor | None
    tangent: Tensor | None
    parameters: Parameters


def row_chunks(rows: int, classes: int, chunk: int | None) -> list[slice]:
    """Cut rows into chunks of about equal size, none longer than told."""
    most = chunk or max(_LEAST_ROWS, _CHUNK_ELEMENTS // max(classes, 1))
    pieces = -(-rows // most)
    return [slice(rows * n // pieces, rows * (n + 1) // pieces) for n in range(pieces)]


class Output(ABC):
    """An output layer with the loss on it."""

    parameters: Parameters

    @abstractmethod
    def sweep(self, rows: Rows, parameters: Parameters, rule: Rule, to: Gradients) -> Tensor:
        """Sums of ℓ, uᵀHu and ∂ℓ/∂ε over all rows, (3,); without a tangent all but ℓ are zero.

        With coefficients in the rule the gradients of the total are added to ``to``.
        """

    @abstractmethod
    def plain(self, rows: Rows, parameters: Parameters, smoothing: float) -> Tensor:
        """The sum of ℓ in plain operations, which can be differentiated twice and hold all logits."""

    def loss(self, features: Tensor, target: Tensor, rule: Rule, ignore_index: int) -> Tensor:
        """The mean of ℓ over targets that are not ignored (0 where all are); twice differentiable.

        Args:
            features: (..., features).
            target: classes (...).
            rule: how rows are to be treated.
            ignore_index: the target that marks a row as not to be counted.
        """
        rows, parameters = _prepared(features, None, target, self.parameters, ignore_index)
        with torch.autocast(features.device.type, enabled=False):
            mean: Tensor = _Loss.apply(self, rule, rows.target, rows.features, *parameters)
        return mean

    def derivatives(
        self, features: Tensor, u: Tensor, target: Tensor, rule: Rule, ignore_index: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Means of ℓ, the quadratic form and ∂ℓ/∂ε along the tangent u of the features."""
        rows, parameters = _prepared(features, u, target, self.parameters, ignore_index)
        arguments = (rows.target, rows.features, rows.tangent, *parameters)
        with torch.autocast(features.device.type, enabled=False):
            loss, quadratic, directional = _Derivatives.apply(self, rule, *arguments)
        return loss, quadratic, directional

    def combined(
        self, features: Tensor, u: Tensor, target: Tensor, rule: Rule, ignore_index: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The total with the rule's coefficients, and its three means without weights or graph.

        The gradients are formed in the one sweep that makes the values; the backward scales them.
        """
        rows, parameters = _prepared(features, u, target, self.parameters, ignore_index)
        arguments = (rows.target, rows.features, rows.tangent, *parameters)
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
    """Rows that count, and all in the type that matrix products are to be taken in."""
    device, dtype = features.device.type, features.dtype
    for parameter in parameters:
        dtype = dtype if parameter is None else torch.promote_types(dtype, parameter.dtype)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    target = target.reshape(-1).long()
    shape = (len(target), features.shape[-1])
    rows = Rows(
        features.reshape(shape).to(dtype),
        None if tangent is None else tangent.reshape(shape).to(dtype),
        target,
    )
    keep = target != ignore_index
    if not bool(keep.all()):
        rows = rows.part(keep)
    return rows, [None if parameter is None else parameter.to(dtype) for parameter in parameters]


def _gradients(rows: Rows, parameters: Parameters, wanted: Sequence[bool]) -> Gradients:
    """Zeros for those that are wanted, in the working type since they are sums."""
    dtype = working_dtype(rows.features.dtype)
    features, tangent, *rest = (
        torch.zeros_like(x, dtype=dtype) if want and x is not None else None
        for x, want in zip((rows.features, rows.tangent, *parameters), wanted, strict=True)
    )
    return Gradients(features, tangent, rest)


def _scaled(to: Parameters, factor: float, dtype: torch.dtype) -> list[Tensor | None]:
    """The gradients times a number, in the type of the inputs."""
    return [None if g is None else (g if factor == 1.0 else g * factor).to(dtype) for g in to]


class _Loss(torch.autograd.Function):
    """The mean ℓ, with its gradients formed in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Output,
        rule: Rule,
        target: Tensor,
        features: Tensor,
        *parameters: Tensor | None,
    ) -> Tensor:
        rows, needs = Rows(features, None, target), ctx.needs_input_grad[3:]
        to = _gradients(rows, parameters, (needs[0], False, *needs[1:]))
        c = Coefficients(1.0, 0.0, 0.0).over(len(target)) if any(needs) else None
        sums = output.sweep(rows, parameters, rule._replace(coefficients=c), to)
        ctx.save_for_backward(target, features, *parameters, to.features, *to.parameters)
        ctx.output, ctx.smoothing = output, rule.smoothing
        return sums[0] / max(len(target), 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        target, *saved = ctx.saved_tensors
        inputs, formed = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        if not torch.is_grad_enabled():
            return None, None, None, *_scaled(formed, g.item(), inputs[0].dtype)
        # The gradient is itself to be differentiated.
        rows, needs = Rows(inputs[0], None, target), ctx.needs_input_grad[3:]
        mean = ctx.output.plain(rows, inputs[1:], ctx.smoothing) / max(len(target), 1)
        wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
        found = iter(torch.autograd.grad(mean, wanted, g, create_graph=True))
        return None, None, None, *(next(found) if need else None for need in needs)


class _Derivatives(torch.autograd.Function):
    """Means of ℓ, uᵀHu and ∂ℓ/∂ε; the backward makes the logits once more, a chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Output,
        rule: Rule,
        target: Tensor,
        features: Tensor,
        tangent: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(target, features, tangent, *parameters)
        ctx.output, ctx.rule = output, rule
        rows, nowhere = Rows(features, tangent, target), [None] * len(parameters)
        sums = output.sweep(rows, parameters, rule, Gradients(None, None, nowhere))
        loss, quadratic, directional = sums / max(len(target), 1)
        return loss, quadratic, directional

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        target, features, tangent, *parameters = ctx.saved_tensors
        rows = Rows(features, tangent, target)
        c = Coefficients(*torch.stack(incoming).tolist()).over(len(target))
        to = _gradients(rows, parameters, ctx.needs_input_grad[3:])
        with torch.autocast(features.device.type, enabled=False):
            ctx.output.sweep(rows, parameters, ctx.rule._replace(coefficients=c), to)
        gradients = to.features, to.tangent, *to.parameters
        return None, None, None, *_scaled(gradients, 1.0, features.dtype)


class _Combined(torch.autograd.Function):
    """The weighted total, with its gradients formed in the forward, and the three means."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Output,
        rule: Rule,
        target: Tensor,
        features: Tensor,
        tangent: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rows, c = Rows(features, tangent, target), rule.coefficients
        assert c is not None
        to = _gradients(rows, parameters, ctx.needs_input_grad[3:])
        scaled = c.over(len(target)) if any(ctx.needs_input_grad) else None
        sums = output.sweep(rows, parameters, rule._replace(coefficients=scaled), to)
        means = sums / max(len(target), 1)
        ctx.mark_non_differentiable(means)
        ctx.save_for_backward(to.features, to.tangent, *to.parameters)
        ctx.dtype = features.dtype
        return means @ means.new_tensor(c), means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_scaled(ctx.saved_tensors, g.item(), ctx.dtype)
