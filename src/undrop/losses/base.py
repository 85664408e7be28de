"""What a loss must tell: ℓ, its quadratic form in the output tangent u, and ∂ℓ/∂ε.

All are *means over the same terms* (tokens, examples, elements: whatever the loss itself averages),
so that the parts of an objective add up to its total.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undrop.errors import EngineError, OptionError
from undrop.kernels.softmax import working_dtype
from undrop.losses.by_class import ByClass

__all__ = ["FORMS", "Derivatives", "Loss", "number", "precise"]

FORMS = ("hessian", "identity", "loss-jacobian")
"""What stands between u and u in the explicit regularizer: H (the paper's R_approx), the identity,
or the outer product of the loss gradient at the true label with itself (R̃_approx)."""


def precise(x: Tensor) -> Tensor:
    """In float32 where it is in half precision, which is not enough for sums and means over terms."""
    return x.to(working_dtype(x.dtype))


def number(n: int, like: Tensor) -> Tensor:
    """A count of terms as a 0-d tensor, at least 1, of a type that holds it."""
    return torch.tensor(float(max(n, 1)), dtype=working_dtype(like.dtype), device=like.device)


class Derivatives(NamedTuple):
    """A loss along the output tangent u = ∂F/∂ε; each a mean over the loss's terms."""

    loss: Tensor  # ℓ(F)
    quadratic: Tensor  # uᵀHu, or the form asked for
    directional: Tensor  # ∂ℓ/∂ε = Dℓ[F]·u


class Loss(ABC):
    """A mean of per-term losses ℓ of a model output F, with its derivatives in F.

    A new loss is one subclass; every engine and objective works with it. ``derivatives`` must be
    differentiable (once) in ``output`` and ``u`` by plain reverse mode.
    """

    def parameters(self) -> Sequence[Tensor]:
        """The weights within the loss, such as an output layer's; the model may have them as well."""
        return ()

    @abstractmethod
    def check(self, output: Tensor, target: Tensor) -> None:
        """Raise ``TargetError`` where the target's shape, type or range does not fit."""

    @abstractmethod
    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """N, the number of terms that the mean is over (at least 1), as a 0-d float tensor.

        In float32 at least: half precision can't count beyond 256.
        """

    @abstractmethod
    def value(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean ℓ."""

    def twice_differentiable_value(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean ℓ again, in ops that have a double backward. A loss that fuses overrides it."""
        return self.value(output, target)

    @abstractmethod
    def _derivatives(self, output: Tensor, u: Tensor, target: Tensor, form: str) -> Derivatives:
        """``derivatives`` for the forms "hessian" and "identity"."""

    def derivatives(
        self, output: Tensor, u: Tensor, target: Tensor, form: str = "hessian"
    ) -> Derivatives:
        """ℓ, the quadratic form in u, and ∂ℓ/∂ε, as means over the terms.

        For the form "loss-jacobian" the square is of the sum over terms, N·(mean ∂ℓ/∂ε)², whose
        expectation over η is Σ_i σ_i² ‖D(ℓ∘F_i)[h_i] ⊙ h_i‖² for whatever η is shared.
        """
        if form not in FORMS:
            raise OptionError(f"there is no quadratic form {form!r}: use {', '.join(FORMS)}.")
        if form != "loss-jacobian":
            return self._derivatives(output, u, target, form)
        parts = self._derivatives(output, u, target, "hessian")
        n = self.count(output, target)
        return parts._replace(quadratic=n * parts.directional.square())

    def combined(
        self,
        output: Tensor,
        u: Tensor,
        target: Tensor,
        form: str = "hessian",
        weights: tuple[float, float, float] = (1.0, 1.0, 1.0),
    ) -> tuple[Tensor, Derivatives]:
        """The weighted total c₀·ℓ + c₁·uᵀHu + c₂·∂ℓ/∂ε, and its three parts without weights or graph.

        Losses that form their gradient in the forward pass need the weights then: they override this.
        """
        parts = self.derivatives(output, u, target, form)
        total = sum(
            (c * part for c, part in zip(weights, parts, strict=True)), output.new_zeros(())
        )
        return total, Derivatives(*(part.detach() for part in parts))

    def by_class(self, output: Tensor, u: Tensor, target: Tensor) -> ByClass | None:
        """How uᵀHu splits over classes, for a diagnosis; None for an output without classes."""
        return None

    def sampled(
        self, output: Tensor, target: Tensor, form: str, generator: torch.Generator | None
    ) -> Tensor:
        """A scalar S, random where it must be, with E[∇S ∇Sᵀ] = Σ_terms H (or the form asked for).

        For "hessian" S = Σ ℓ_ŷ with labels drawn from the model, ŷ ~ p (the paper's Algorithm 3;
        the sampling probabilities are not differentiated); for "identity" S = ⟨v, F⟩ with random
        signs v; for "loss-jacobian" the total loss itself.
        """
        if form == "loss-jacobian":
            return self.twice_differentiable_value(output, target) * self.count(output, target)
        if form == "identity":
            return self._probe(output, target, generator)
        return self._sampled(output, target, generator)

    def _probe(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        signs = torch.empty_like(output).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        return (signs * output).sum()

    def _sampled(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        raise EngineError(
            f"{type(self).__name__} has no distribution to sample labels from, which the reverse "
            "engine needs: use engine='tangent', 'antithetic' or 'exact'."
        )
