"""The loss of one batch along the noise, to second order in ε, for as many η as are wanted.

With z the relative noise at every site (h becomes h ⊙ (1 + z)), v = σ·η, u = ∂F/∂z·v and y = Dℓ[F],

    ℓ(F(ε)) = ℓ + ε·yᵀu + ε²·(½uᵀHu + ½ vᵀ∇²_z(yᵀF)v) + …

The scalar c(y, z) = vᵀ∇_z(yᵀF) holds all of it: c itself is ∂ℓ/∂ε, its gradient in y is u, and its
gradient in z, times v, is the part that the model's own curvature makes. So a batch needs one
gradient with a graph, and every η one more backward pass through that. The loss is never
differentiated twice by torch: its curvature is its own to tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from undrop.diagnosis.measure.model import Batch, Given, Noise, Subject
from undrop.engines import Draw, ZeroLeaves
from undrop.engines.double_backward import TWICE_DIFFERENTIABLE
from undrop.errors import NoDropoutError, NonFiniteError
from undrop.intercept import Selection, Site

__all__ = ["Differences", "Expanded", "Expander", "Expansion", "Order", "Terms"]

_EPSILON = 0.02  # of the differences; truncation is O(ε²), rounding of the second one O(1/ε²)
_TOLERANCE = 0.1  # between u and its difference; an op that is not differentiated twice is far off


class Order(NamedTuple):
    """What a noise adds to the loss, order by order; means over the loss's terms."""

    first: float
    """∂ℓ/∂ε = Dℓ·u, which has zero mean."""
    psd: float
    """½uᵀHu."""
    non_psd: float
    """½Dℓ·∂²F/∂ε²."""


class Terms(NamedTuple):
    """The expansion along one η."""

    total: Order
    sites: Mapping[str, Order]
    """Each site's part. The sum of them is the total, or is so in expectation."""
    u: Tensor
    """The output tangent ∂F/∂ε."""


class Expanded(Protocol):
    """A batch expanded at ε = 0."""

    found: list[tuple[Site, Tensor]]
    """The sites that the batch meets, each with a tensor in the shape of its η."""
    output: Tensor
    count: float

    def first(self, noise: Noise) -> float:
        """∂ℓ/∂ε along a noise."""
        ...

    def along(self, noise: Noise) -> Terms:
        """All terms along a noise."""
        ...


class _AtZero:
    """What both ways have in common: the batch at ε = 0, with leaves z in the shape of every η."""

    def __init__(self, subject: Subject, batch: Batch, field: ZeroLeaves) -> None:
        self.subject, self.batch = subject, batch
        self.logits = subject.run(batch, field, TWICE_DIFFERENTIABLE)
        if not field.leaves:
            raise NoDropoutError(f"no active dropout was met in batch {batch.number}.")
        self.found = list(zip(field.sites, field.leaves, strict=True))
        self.output = self.logits.detach().requires_grad_()
        self.count = float(subject.loss.count(self.output, batch.targets))

    def quadratic(self, u: Tensor) -> Tensor:
        """The mean of uᵀHu."""
        return self.subject.loss.derivatives(self.output, u, self.batch.targets).quadratic


class Expansion(_AtZero):
    """The expansion by reverse mode applied twice: exact, for every op that has a double backward."""

    def __init__(self, subject: Subject, batch: Batch) -> None:
        draw = Draw("dropout", "as-declared", Selection(), subject.randomness)
        super().__init__(subject, batch, ZeroLeaves(draw))
        self._names = [site.name for site, _ in self.found]
        self._leaves = [leaf for _, leaf in self.found]
        loss = subject.loss.value(self.output, batch.targets)
        if not bool(torch.isfinite(loss)):
            raise NonFiniteError(subject.not_finite(batch, _number(loss), "without"))
        self._y = torch.autograd.grad(loss, self.output)[0].detach().requires_grad_()
        self._gradients = self._pulled_back(self._y, create_graph=True)

    def _pulled_back(self, y: Tensor, *, create_graph: bool) -> tuple[Tensor, ...]:
        """Jᵀy at every leaf."""
        return torch.autograd.grad(
            self.logits,
            self._leaves,
            y.to(self.logits.dtype),
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=True,
        )

    def _products(self, gradients: tuple[Tensor, ...], noise: Noise) -> dict[str, Tensor]:
        """⟨gradient, v⟩ of every site that the noise has."""
        pairs = zip(self._names, gradients, strict=True)
        return {name: (g * noise[name]).sum() for name, g in pairs if name in noise}

    @torch.no_grad()
    def first(self, noise: Noise) -> float:
        """∂ℓ/∂ε = ⟨∇_z ℓ, v⟩."""
        return float(sum(self._products(self._gradients, noise).values()))

    def along(self, noise: Noise) -> Terms:
        """All terms along a noise: a backward pass for u and ∂²F/∂ε², another for uᵀHu by site."""
        firsts = self._products(self._gradients, noise)
        c = torch.stack(list(firsts.values())).sum()
        u, *curved = torch.autograd.grad(
            c,
            [self._y, *self._leaves],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        u = u.detach().requires_grad_()
        quadratic = self.quadratic(u)
        pushed = torch.zeros_like(u)
        if quadratic.requires_grad:  # as for all but a loss that is linear in F
            (pushed,) = torch.autograd.grad(quadratic, u)  # 2Hu over the number of terms
        psd = self._products(self._pulled_back(pushed, create_graph=False), noise)
        non_psd = self._products(tuple(curved), noise)
        sites = {
            name: Order(_number(first), 0.25 * _number(psd[name]), 0.5 * _number(non_psd[name]))
            for name, first in firsts.items()
        }
        curvature = sum(order.non_psd for order in sites.values())
        total = Order(_number(c), 0.5 * _number(quadratic), curvature)
        return Terms(total, sites, u.detach())


class Differences(_AtZero):
    """The expansion by differences in ε, for models whose ops have no double backward."""

    def __init__(self, subject: Subject, batch: Batch) -> None:
        draw = Draw("dropout", "as-declared", Selection(), subject.randomness)
        with torch.no_grad():
            super().__init__(subject, batch, ZeroLeaves(draw))
        self._base = subject.value(batch, {})

    def first(self, noise: Noise) -> float:
        """(ℓ₊ - ℓ₋)/2ε."""
        up, down = (self.subject.value(self.batch, _scaled(noise, s)) for s in (1.0, -1.0))
        return (up - down) / (2.0 * _EPSILON)

    @torch.no_grad()
    def tangent(self, noise: Noise) -> Tensor:
        """U ≈ (F₊ - F₋)/2ε."""
        plus, minus = self._both(noise)
        return (plus - minus) / (2.0 * _EPSILON)

    def _both(self, noise: Noise) -> tuple[Tensor, Tensor]:
        up, down = (Given(_scaled(noise, sign)) for sign in (1.0, -1.0))
        return self.subject.run(self.batch, up), self.subject.run(self.batch, down)

    @torch.no_grad()
    def _order(self, noise: Noise) -> tuple[Order, Tensor]:
        targets, loss = self.batch.targets, self.subject.loss
        plus, minus = self._both(noise)
        up, down = (float(loss.value(x, targets).double()) for x in (plus, minus))
        u = (plus - minus) / (2.0 * _EPSILON)
        with torch.enable_grad():
            psd = 0.5 * _number(self.quadratic(u))
        second = 0.5 * (up - 2.0 * self._base + down) / _EPSILON**2
        return Order((up - down) / (2.0 * _EPSILON), psd, second - psd), u

    def along(self, noise: Noise) -> Terms:
        """All terms along a noise, by two passes for it and two for each site alone."""
        total, u = self._order(noise)
        sites = {name: self._order({name: noise[name]})[0] for name in noise}
        return Terms(total, sites, u)


def _number(x: Tensor) -> float:
    return float(x.detach())


def _scaled(noise: Noise, sign: float) -> dict[str, Tensor]:
    return {name: value * (sign * _EPSILON) for name, value in noise.items()}


class Expander:
    """Expands batches, by differences where an op of the model has no double backward.

    Args:
        subject: the model under study.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._tried = False
        self.blocked: str | None = None
        """Why differences are taken; None where they are not."""

    def __call__(self, batch: Batch) -> Expanded:
        """The batch expanded."""
        if not self._tried:
            self._tried = True
            try:
                expansion = Expansion(self._subject, batch)
                if self._agrees(expansion, batch):
                    return expansion
                self.blocked = "what torch says of it is not the tangent"
            except RuntimeError as error:
                self.blocked = str(error).partition("\n")[0]
        if self.blocked is not None:
            return Differences(self._subject, batch)
        return Expansion(self._subject, batch)

    def _agrees(self, expansion: Expansion, batch: Batch) -> bool:
        """Whether u is what a difference says: some ops give zeros for a second derivative, silently."""
        if expansion.output.dtype not in (torch.float32, torch.float64):
            return True  # differences are worth nothing in half precision
        noise = self._subject.masks(expansion.found)
        u = expansion.along(noise).u
        error = Differences(self._subject, batch).tangent(noise) - u
        return float(error.norm()) <= _TOLERANCE * float(u.norm()) + 1e-6
