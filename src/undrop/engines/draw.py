"""One draw of the noise σ·η for all sites of a model, and the site actions that use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from undrop.errors import OptionError
from undrop.intercept import Selection, Site
from undrop.noise import draw_noise

if TYPE_CHECKING:
    from undrop.engines.layout import Rows
    from undrop.engines.plan import SitePlan

MASKS = ("as-declared", "independent")
"""Entries share η as the site declares, or each entry has its own, as in the paper's regularizers."""


HALF = (torch.float16, torch.bfloat16)


class Draw:
    """σ·η of every site, the same in every pass that uses this draw.

    A site's noise is drawn when a pass first reaches the site. The draw keeps a weak reference to this
    noise, and the generator's state before: if the noise is needed again after its graph is freed, as
    under activation checkpointing, the same noise is drawn again.

    Args:
        noise: the distribution of η: "sign" or "dropout".
        mask: "as-declared" or "independent".
        selection: which sites carry noise, and how much.
        generator: returns the random generator for a device.
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
        self.reached_site = False
        """Whether the pass has reached any site."""
        self.half_precision = False
        """Whether a pass has reached an activation in half precision."""
        self.largest_sigma = 0.0
        """The largest σ of the sites reached so far."""
        self._noise: dict[str, TensorWeakRef] = {}
        self._generator_states: dict[str, Tensor] = {}  # before the draw of each site

    def scale(self, site: Site) -> float:
        """Note that a pass has reached the site, and return its σ; 0 if the site is not chosen."""
        self.reached_site = True
        scale = self.selection.sigma(site)
        self.largest_sigma = max(self.largest_sigma, scale)
        return scale

    def shape(self, site: Site) -> tuple[int, ...]:
        """Return the shape of η at the site."""
        return site.shape if self.mask == "independent" else site.mask_shape

    def sigma_eta(self, site: Site, h: Tensor) -> Tensor | None:
        """Return σ·η for the site, or None if it carries no noise."""
        self.half_precision |= h.dtype in HALF
        scale = self.scale(site)
        if scale == 0.0:
            return None
        reference = self._noise.get(site.name)
        noise = reference() if reference is not None else None
        if noise is None:
            noise = self._draw(site, h, scale)
            self._noise[site.name] = TensorWeakRef(noise)
        return noise

    def _draw(self, site: Site, h: Tensor, scale: float) -> Tensor:
        if site.name in self._generator_states:
            generator = torch.Generator(h.device)
            generator.set_state(self._generator_states[site.name])
        else:
            generator = self.generator(h.device)
            self._generator_states[site.name] = generator.get_state()
        shape, like = self.shape(site), h.detach()
        return draw_noise(self.noise, shape, site.p, like=like, scale=scale, generator=generator)

    def eta(self, s: SitePlan, scale: float, shape: tuple[int, ...] | None = None) -> Tensor:
        """Draw scale·η for a site in a stacked pass; ``shape`` replaces the shape of the site's η."""
        shape, generator = shape or self.shape(s.site), self.generator(s.device)
        dtype = torch.promote_types(s.dtype, torch.float32)
        like = torch.empty((), dtype=dtype, device=s.device)
        return draw_noise(self.noise, shape, s.site.p, like=like, scale=scale, generator=generator)

    def eta_of_rows(
        self, sites: Sequence[SitePlan], widths: Sequence[int], rows: Rows, scale: float
    ) -> Tensor:
        """Draw scale·η for several sites in one call: a tensor of r rows and Σ widths columns."""
        widest = max(sites, key=lambda s: s.dtype.itemsize)
        return self.eta(widest, scale, (rows.layout.noisy, sum(widths)))


class ScaledNoise:
    """The site action h ⊙ (1 + ε·σ·η) for a fixed ε. Dropout is ε = 1 with dropout's own noise."""

    def __init__(self, draw: Draw, epsilon: float) -> None:
        self.draw = draw
        self.epsilon = epsilon

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """h ⊙ (1 + ε·σ·η)."""
        noise = self.draw.sigma_eta(site, h)
        return h if noise is None else torch.addcmul(h, h, noise, value=self.epsilon)


def dropout_masks(
    generator: Callable[[torch.device], torch.Generator], selection: Selection | None = None
) -> ScaledNoise:
    """Return dropout as a site action: every pass that uses it has the same masks."""
    return ScaledNoise(Draw("dropout", "as-declared", selection or Selection(), generator), 1.0)


class ZeroLeaves:
    """The site action h ⊙ (1 + z), where z is a leaf of zeros in the shape of η.

    If several entries of h share one η, ∂ℓ/∂z sums over them.
    """

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self._leaves: dict[Site, Tensor] = {}

    @property
    def leaves(self) -> list[Tensor]:
        """The leaves, in the order in which a pass reached their sites."""
        return list(self._leaves.values())

    @property
    def sites(self) -> list[Site]:
        """The sites that have a leaf."""
        return list(self._leaves)

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """h ⊙ (1 + z)."""
        if self.draw.scale(site) == 0.0:
            return h
        if site not in self._leaves:
            self._leaves[site] = torch.zeros(
                self.draw.shape(site), dtype=h.dtype, device=h.device, requires_grad=True
            )
        return torch.addcmul(h, h, self._leaves[site])
