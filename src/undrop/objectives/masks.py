"""Dropout masks with another probability at each site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from undrop.engines import ScaledNoise
from undrop.intercept import Site


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


def dropout_modules(
    model: nn.Module, site_p: Mapping[str, float]
) -> dict[nn.Dropout, float] | None:
    """Return the modules that the sites are, with the p to set; None if a site is anything else."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[nn.Dropout, float] = {}
    for name, p in site_p.items():
        module = modules.get(name)
        if type(module) is not nn.Dropout or module in found:
            return None
        found[module] = p
    return found


@contextmanager
def with_p(modules: Mapping[nn.Dropout, float]) -> Iterator[None]:
    """Give each module its p for one pass: as fast as the model's own dropout."""
    declared = {module: module.p for module in modules}
    try:
        for module, p in modules.items():
            module.p = p
        yield
    finally:
        for module, p in declared.items():
            module.p = p
