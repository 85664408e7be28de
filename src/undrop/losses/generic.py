"""Any other loss, by differentiating it twice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from undrop.errors import EngineError, TargetError
from undrop.losses.base import Derivatives, Loss, number

__all__ = ["Generic"]

_log = logging.getLogger("undrop")


class Generic(Loss):
    """Wraps ``function(output, target) -> scalar``, a mean over the rows of the output.

    uᵀHu is the second derivative of s ↦ ℓ(F + s·u) at 0, by reverse mode applied twice, so the
    function must be twice differentiable in torch.

    Args:
        function: the loss.
    """

    def __init__(self, function: Callable[[Tensor, Any], Tensor]) -> None:
        self.function = function
        self._looked = False

    def parameters(self) -> Sequence[Tensor]:
        """Those of the function, if it is a module."""
        return list(self.function.parameters()) if isinstance(self.function, nn.Module) else []

    def check(self, output: Tensor, target: Tensor) -> None:
        """Nothing: only the function can say which targets fit."""

    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """The rows of the output (…, features), over which the function is taken to average."""
        rows = output.numel() // output.shape[-1] if output.dim() > 1 else output.numel()
        return number(rows, output)

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        """The value of the function.

        Raises:
            TargetError: if that is not one number.
        """
        value = self.function(output, target)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise TargetError(
                f"the loss {_name(self.function)} must return one number (a mean), got "
                f"{tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__}."
            )
        return value.reshape(())

    def _derivatives(self, output: Tensor, u: Tensor, target: Tensor, form: str) -> Derivatives:
        if not output.requires_grad:  # nothing behind it is trained: the numbers alone
            parts = self._derivatives(output.detach().requires_grad_(), u, target, form)
            return Derivatives(*(part.detach() for part in parts))
        # In the graph, F and u may share ancestors but neither is an ancestor of the other; taking
        # the inner derivative at a copy of F makes sure that it is of ℓ alone.
        at = output.clone()
        loss = self.value(at, target)
        (gradient,) = torch.autograd.grad(loss, at, create_graph=True)
        directional = (gradient * u).sum()
        if form == "identity":
            quadratic = u.square().sum() / self.count(output, target)
        elif gradient.requires_grad:
            quadratic = (self._derivative(directional, at) * u).sum()
        else:
            self._check_linear(at, u, gradient, target)
            quadratic = torch.zeros_like(loss)
        if not self._looked:
            self._looked = True
            self._warn_of_no_curvature(quadratic, u)
        return Derivatives(loss, quadratic, directional)

    def _derivative(self, directional: Tensor, at: Tensor) -> Tensor:
        """H·u."""
        try:
            (hessian_u,) = torch.autograd.grad(
                directional, at, create_graph=True, allow_unused=True, materialize_grads=True
            )
        except (RuntimeError, NotImplementedError) as error:
            raise self._once(str(error).splitlines()[0]) from error
        return hessian_u

    def _check_linear(self, at: Tensor, u: Tensor, gradient: Tensor, target: Any) -> None:
        """A gradient without a graph is that of a loss linear in F, or of one torch can't go on from."""
        elsewhere = (at + u).detach().requires_grad_()
        (other,) = torch.autograd.grad(self.value(elsewhere, target), elsewhere)
        if not torch.allclose(other, gradient):
            raise self._once("its gradient has no graph")

    def _warn_of_no_curvature(self, quadratic: Tensor, u: Tensor) -> None:
        if bool(u.any()) and not bool(quadratic):
            _log.warning(
                "the loss %s has no curvature in the model's output, so that uᵀHu = 0 and there is no "
                "explicit regularizer: if the output is log-probabilities, let the model return logits "
                "and use undrop.CrossEntropy().",
                _name(self.function),
            )

    def _once(self, why: str) -> EngineError:
        return EngineError(
            f"the loss {_name(self.function)} can't be differentiated twice ({why}): write it in "
            "operations that torch differentiates twice."
        )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
