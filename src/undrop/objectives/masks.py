"""Dropout masks with another probability at each site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from undrop.engines import ScaledNoise
from undrop.intercept import Site

__all__ = ["SiteMasks"]


class SiteMasks:
    """The site action of dropout with another p than the model's own.

    Args:
        site_p: the probability by site; other sites keep the model's.
        noise: draws the masks; None lets torch draw them from its global generator.
    """

    def __init__(self, site_p: Mapping[str, float], noise: ScaledNoise | None) -> None:
        self.site_p = dict(site_p)
        self.noise = noise

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """Return h with a fresh mask, scaled by 1/(1-p)."""
        p = self.site_p.get(site.name, site.p)
        if self.noise is not None:
            return self.noise(replace(site, p=p), h)
        if site.mask_shape == site.shape:
            return F.dropout(h, p)
        return h * F.dropout(h.new_ones(site.mask_shape), p)
