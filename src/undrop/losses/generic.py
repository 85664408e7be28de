"""A loss given as a function: its derivatives come from autograd, or from finite differences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from undrop.autodiff import gradients
from undrop.errors import OptionError, TargetError, UndropError
from undrop.intercept import SITE_RULES
from undrop.intercept.model_call import map_tensors, tensors_in
from undrop.intercept.running_statistics import keep_buffers
from undrop.kernels.softmax import Coefficients, Derivatives
from undrop.losses.base import Loss, count_tensor, pad_tangent, to_working_dtype
from undrop.rng_snapshot import RngSnapshot

_log = logging.getLogger("undrop")

STEP, STEP_DOUBLE = 0.1, 0.01
"""The step s in ℓ(F ± s·u), for float32 and float64. The truncation error of uᵀHu is O(s²), and its
rounding error O(1/s²)."""


class _FlatOutput(NamedTuple):
    """The floating-point tensors of an output F, and their tangents."""

    tensors: list[Tensor]
    u: list[Tensor]
    rebuild: Callable[[Sequence[Tensor]], Any]  # returns F with other tensors in it

    @classmethod
    def of(cls, output: Any, u: Any) -> _FlatOutput:
        """Flatten an output and its tangent."""
        pairs: list[tuple[Tensor, Tensor]] = []

        def collect(x: Tensor, tangent: Any) -> None:
            if x.is_floating_point():
                pairs.append((x, tangent))

        map_tensors(collect, output, u)

        def rebuild(tensors: Sequence[Tensor]) -> Any:
            replacements = iter(tensors)
            return map_tensors(lambda x: next(replacements) if x.is_floating_point() else x, output)

        return cls([x for x, _ in pairs], [t for _, t in pairs], rebuild)

    def dot_u(self, vectors: Sequence[Tensor]) -> Tensor:
        """Return ⟨vectors, u⟩."""
        products = [(v * u).sum() for v, u in zip(vectors, self.u, strict=True)]
        return torch.stack(products).sum()


class Generic(Loss):
    """A loss ``function(output, target) -> scalar``, a mean over the rows of the output.

    uᵀHu is the second derivative of s ↦ ℓ(F + s·u) at 0, by reverse mode applied twice. If torch can't
    compute uᵀHu or its gradient, both derivatives along u are computed by finite differences: uᵀHu is
    (ℓ(F + su) - 2ℓ(F) + ℓ(F - su))/s², and ∂ℓ/∂ε is (ℓ(F + su) - ℓ(F - su))/2s. For a piecewise linear
    loss (hinge, margin ranking, pinball), uᵀHu is 0, so there is no explicit regularizer.

    Args:
        function: the loss.
        whole_output: whether the function takes everything that the model returns. The default is the
            function's attribute ``whole_output``, or False.
    """

    def __init__(
        self, function: Callable[[Any, Any], Tensor], *, whole_output: bool | None = None
    ) -> None:
        self.function = function
        if whole_output is None:
            whole_output = bool(getattr(function, "whole_output", False))
        self.whole_output = whole_output
        self._method = ""  # of second derivatives: "reverse mode", "differences" or "zero"
        self._checked_curvature = False
        # The values of `function.training` with which the function has run without dropout.
        self._modes_without_dropout: set[bool] = set()

    def parameters(self) -> Sequence[Tensor]:
        """Return the parameters of the function, if it is a module."""
        return list(self.function.parameters()) if isinstance(self.function, nn.Module) else []

    @contextmanager
    def keep_state(self) -> Iterator[None]:
        """Restore the random state and the function's buffers at the end of the block."""
        module = self.function if isinstance(self.function, nn.Module) else nn.Module()
        with RngSnapshot(module), keep_buffers(module):
            yield

    def check(self, output: Any, target: Any) -> None:
        """Accept everything: only the function knows which targets fit."""

    def count(self, output: Any, target: Any) -> Tensor:
        """Return the number of terms of the mean: the rows of the first tensor, (…, features)."""
        first = next(x for x in tensors_in(output) if x.is_floating_point())
        rows = first.numel() // first.shape[-1] if first.dim() > 1 else first.numel()
        return count_tensor(rows, first)

    def value(self, output: Any, target: Any) -> Tensor:
        """Return the value of the function, which must be one number; refuse dropout in the function."""
        training = getattr(self.function, "training", True)
        checked = training in self._modes_without_dropout
        try:
            with nullcontext() if checked else RefuseDropout(_function_name(self.function)):
                value = self.function(output, target)
        except (torch.OutOfMemoryError, UndropError):
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise self._call_error(output, target, error) from error
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise TargetError(
                f"the loss {_function_name(self.function)} must return one number (a mean), got "
                f"{_describe(value)}."
            )
        self._modes_without_dropout.add(training)
        return value.reshape(())

    def _call_error(self, output: Any, target: Any, error: Exception) -> TargetError:
        """Return an error that says what the function received, and what it raised."""
        receives = (
            "the function receives all that the model returns"
            if self.whole_output
            else "the function receives the `logits` or the first tensor that the model returns; set "
            "whole_output = True on it to receive everything"
        )
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        return TargetError(
            f"the loss {_function_name(self.function)} raised {type(error).__name__} ({reason}) for "
            f"{_describe(output)} and a target that is {_describe(target)}: {receives}."
        )

    def _derivatives_of_part(
        self, output: Any, u: Any, target: Any, form: str, dim: int
    ) -> Derivatives:
        def pad(x: Tensor, tangent: Any) -> Any:
            return pad_tangent(tangent, x, dim) if x.is_floating_point() else tangent

        return self._derivatives(output, map_tensors(pad, output, u), target, form)

    def _combined(
        self, output: Any, u: Any, target: Any, form: str, c: Coefficients, dim: int
    ) -> tuple[Tensor, Derivatives]:
        """Return the total and its parts; a quadratic part with coefficient 0 is reported as 0."""
        if isinstance(c.quadratic, Tensor) or c.quadratic != 0:
            return super()._combined(output, u, target, form, c, dim)
        # The form "identity" needs no second derivative.
        total, parts = super()._combined(output, u, target, "identity", c, dim)
        return total, parts._replace(quadratic=torch.zeros_like(parts.quadratic))

    def _derivatives(self, output: Any, u: Any, target: Any, form: str) -> Derivatives:
        if not any(x.requires_grad for x in tensors_in(output)):
            leaves = map_tensors(_as_leaf, output)
            with torch.enable_grad():
                parts = self._derivatives(leaves, u, target, form)
            return Derivatives(*(part.detach() for part in parts))
        flat = _FlatOutput.of(output, u)
        if not self._method:
            self._method = self._choose_method(flat, target)
        if self._method == "differences":
            parts = self._by_differences(flat, target)
        else:
            parts = self._by_reverse_mode(flat, target, form)
        if form == "identity":
            return parts._replace(quadratic=flat.dot_u(flat.u) / self.count(output, target))
        if not self._checked_curvature:
            self._checked_curvature = True
            self._warn_of_no_curvature(parts.quadratic, flat.u)
        return parts

    def _gradient(
        self, flat: _FlatOutput, target: Any
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return ℓ at a copy of F, the tensors of the copy, and ∂ℓ/∂F.

        The gradient has a graph if torch can differentiate it again. F and u may share ancestors, so
        only a copy of F gives the derivative in F alone.
        """
        copies = [x.clone() if x.requires_grad else _as_leaf(x) for x in flat.tensors]
        loss = self.value(flat.rebuild(copies), target)
        return loss, copies, gradients(loss, copies, create_graph=True)

    def _by_reverse_mode(self, flat: _FlatOutput, target: Any, form: str) -> Derivatives:
        loss, copies, gradient = self._gradient(flat, target)
        if self._method == "zero":
            gradient = [g.detach() for g in gradient]
        directional = flat.dot_u(gradient)
        if form == "identity" or not any(g.requires_grad for g in gradient):
            return Derivatives(loss, torch.zeros_like(loss), directional)
        hessian_u = gradients(flat.dot_u(gradient), copies, create_graph=True)
        return Derivatives(loss, flat.dot_u(hessian_u), directional)

    def _by_differences(self, flat: _FlatOutput, target: Any) -> Derivatives:
        step = STEP_DOUBLE if all(x.dtype == torch.float64 for x in flat.tensors) else STEP
        tensors, tangents = ([to_working_dtype(x) for x in xs] for xs in (flat.tensors, flat.u))

        def loss_at(s: float) -> Tensor:
            shifted = [x + s * u for x, u in zip(tensors, tangents, strict=True)]
            return self.value(flat.rebuild(shifted), target)

        with self.keep_state():
            plus = loss_at(step)
        with self.keep_state():
            minus = loss_at(-step)
        loss = loss_at(0.0)  # may change buffers and the random state, like a user's own call
        quadratic = (plus - 2.0 * loss + minus) / step**2
        return Derivatives(loss, quadratic, (plus - minus) / (2.0 * step))

    def _choose_method(self, flat: _FlatOutput, target: Any) -> str:
        """Choose "reverse mode" if torch has all derivatives, and "zero" for a linear loss.

        Choose "differences" otherwise. Unless "reverse mode" is chosen, the function must return the
        same value for the same arguments.
        """
        with self.keep_state():
            loss, copies, gradient = self._gradient(flat, target)
        if any(g.requires_grad for g in gradient) and _has_third_derivative(flat, gradient, copies):
            return "reverse mode"
        with self.keep_state():
            repeated = self.value(flat.rebuild(flat.tensors), target)
        if not torch.allclose(loss, repeated, rtol=1e-5, atol=0.0, equal_nan=True):
            raise OptionError(
                f"the loss {_function_name(self.function)} must be differentiated by finite "
                "differences, since torch can't differentiate it three times, but it returns different "
                "values for the same output: draw its random numbers from torch's, NumPy's or Python's "
                "global generators."
            )
        if not self._has_curvature(flat, gradient, target):
            return "zero"
        _log.info(
            "torch can't differentiate the loss %s three times: its derivatives along u come from "
            "differences of its value.",
            _function_name(self.function),
        )
        return "differences"

    def _has_curvature(self, flat: _FlatOutput, gradient: Sequence[Tensor], target: Any) -> bool:
        """Return whether the gradient changes with F in most entries, and not only across a kink."""
        generator = torch.Generator().manual_seed(0)
        nearby = []
        for tensor in flat.tensors:
            x = to_working_dtype(tensor.detach())
            noise = torch.randn(x.shape, generator=generator).to(x)
            nearby.append((x + 1e-3 * (1.0 + x.abs()) * noise).requires_grad_())
        with self.keep_state():
            value = self.value(flat.rebuild(nearby), target)
        changed = active = 0
        for new, old in zip(gradients(value, nearby), gradient, strict=True):
            size = new.abs() + old.abs()
            changed += int(((new - old).abs() > 1e-5 * size).sum())
            active += int((size > 0).sum())
        return 2 * changed > active

    def _warn_of_no_curvature(self, quadratic: Tensor, u: Sequence[Tensor]) -> None:
        if any(bool(x.any()) for x in u) and not bool(quadratic):
            _log.warning(
                "the loss %s is linear around the model's output, so uᵀHu = 0 and there is no "
                "explicit regularizer: if the output is log-probabilities, let the model return logits "
                "and use undrop.CrossEntropy().",
                _function_name(self.function),
            )


def _has_third_derivative(
    flat: _FlatOutput, gradient: Sequence[Tensor], copies: Sequence[Tensor]
) -> bool:
    """Return whether torch can compute the gradient of uᵀHu.

    Return True also if Hu is not finite: the check of a step (``objectives/checks.py``) then raises a
    ``NonFiniteError``, which differences would hide.
    """
    try:
        second = gradients(flat.dot_u(gradient), copies, create_graph=True)
        third = gradients(flat.dot_u(second), copies)
    except (RuntimeError, NotImplementedError):
        return False
    return _all_finite(third) or not _all_finite(second)


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors)


def _as_leaf(x: Tensor) -> Tensor:
    """Return a floating-point tensor without its graph, as a leaf; return other tensors unchanged."""
    return x.detach().requires_grad_() if x.is_floating_point() else x


def _describe(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)} ({str(x.dtype).removeprefix('torch.')})"
    return f"a {type(x).__name__}"


def _function_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


_DROPOUTS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
}


class RefuseDropout(TorchFunctionMode):
    """A context in which an active dropout raises an error that names the loss.

    The rules in ``SITE_RULES`` call ``idle_dropout``, ``noisy`` and ``site``.
    """

    def __init__(self, loss: str) -> None:
        super().__init__()
        self._loss = loss

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the function, or the rule in ``SITE_RULES`` if it is a dropout."""
        if func in _DROPOUTS:
            return SITE_RULES[func](self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def idle_dropout(self, h: Tensor, training: bool | None) -> Tensor:
        """Return h at a dropout that does not drop."""
        return h

    def noisy(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an ``OptionError`` at a dropout that drops."""
        raise OptionError(
            f"the loss {self._loss} contains dropout, which undrop can't replace there: move that "
            "part into the model, or call eval() on the loss."
        )

    site = noisy  # what the rule of alpha dropout calls
