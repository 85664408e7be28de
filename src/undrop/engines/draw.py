"""One draw of σ·η for all sites of a model, and the fields that put it to use."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from undrop.errors import OptionError
from undrop.noise import draw as draw_noise
from undrop.sites import Selection, Site

__all__ = ["MASKS", "Draw", "Leaves", "Perturbed"]

MASKS = ("as-declared", "independent")
"""Entries share η as the site declares, or each has its own (as the paper's regularizers do)."""


class Draw:
    """σ·η by site: drawn where a site is first asked for, the same ever after.

    Args:
        noise: the distribution of η: "sign", "dropout" or "gaussian".
        mask: "as-declared" or "independent".
        selection: which sites carry noise, and how much.
        generator: gives the random generator for a device.
    """

    def __init__(
        self,
        noise: str,
        mask: str,
        selection: Selection,
        generator: Callable[[torch.device], torch.Generator],
    ) -> None:
        if mask not in MASKS:
            raise OptionError(
                f"there is no mask structure {mask!r}: use one of {', '.join(MASKS)}."
            )
        self.noise = noise
        self.mask = mask
        self.selection = selection
        self.generator = generator
        self.asked = False
        """Whether any site has been met."""
        self._drawn: dict[str, Tensor] = {}

    def scale(self, site: Site) -> float:
        """The site's σ, times the root of its weight; 0 where it is not chosen."""
        self.asked = True
        return site.sigma * math.sqrt(self.selection.weight(site.name))

    def shape(self, site: Site) -> tuple[int, ...]:
        """The shape of η at the site."""
        return site.shape if self.mask == "independent" else site.mask_shape

    def scaled(self, site: Site, h: Tensor) -> Tensor | None:
        """σ·η for the site, or None where it carries no noise."""
        scale = self.scale(site)
        if scale == 0.0:
            return None
        if site.name not in self._drawn:
            eta = draw_noise(
                self.noise,
                self.shape(site),
                site.p,
                like=h.detach(),
                generator=self.generator(h.device),
            )
            self._drawn[site.name] = eta.mul_(scale)
        return self._drawn[site.name]


class Perturbed:
    """The field h ⊙ (1 + ε·σ·η) for a fixed ε. Dropout itself is ε = 1 with dropout's own noise."""

    def __init__(self, draw: Draw, epsilon: float) -> None:
        self.draw = draw
        self.epsilon = epsilon

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """H ⊙ (1 + ε·σ·η)."""
        noise = self.draw.scaled(site, h)
        return h if noise is None else torch.addcmul(h, h, noise, value=self.epsilon)


class Leaves:
    """The field h ⊙ (1 + z) with a zero leaf z in the shape of η, to be differentiated in.

    ∂ℓ/∂z sums J ⊙ h over all entries that share one η, which is what mask sharing means.
    """

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.leaves: list[Tensor] = []
        self.sites: list[Site] = []

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """H ⊙ (1 + z)."""
        if self.draw.scale(site) == 0.0:
            return h
        z = torch.zeros(self.draw.shape(site), dtype=h.dtype, device=h.device, requires_grad=True)
        self.leaves.append(z)
        self.sites.append(site)
        return torch.addcmul(h, h, z)
