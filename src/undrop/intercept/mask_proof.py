"""Prove that a hand-made mask does what undrop assumes.

Two passes must agree: one in which the model makes its masks from given numbers, and one in which the
sites take the values of these masks. If they differ, the draws are not sites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from undrop.intercept.interception import Interception
from undrop.intercept.model_call import call, tensors_in
from undrop.intercept.random_values import MaskOrigin
from undrop.intercept.site import Site
from undrop.rng_snapshot import RngSnapshot


def disproven(model: nn.Module, inputs: Any, masks: Mapping[str, MaskOrigin]) -> set[str]:
    """Return the draws, by key, that are not masks after all.

    The model is in train mode, and ``masks`` says how each draw became a mask in a pass without noise.
    """
    single = [key for key, draw in masks.items() if draw.single]
    for dropped in _rounds(single) if masks else ():
        numbers = _Numbers(masks, dropped)
        if not _agree(model, inputs, numbers, set(masks)):
            bad = {key for key in masks if not _agree(model, inputs, numbers, {key})}
            return bad or set(masks)
    return set()


def _rounds(keys: list[str]) -> Iterator[set[str]]:
    """Yield for each round the single-value masks that drop in it; the others keep.

    For any two of them there is a round in which the first drops and the second keeps, and one the
    other way around. So what a skipped layer or a factor of 0 hides in one round shows up in another.
    """
    for bit in range(max(1, (len(keys) - 1).bit_length())):
        ones = {key for i, key in enumerate(keys) if i >> bit & 1}
        yield ones
        if keys:
            yield set(keys) - ones


def _agree(model: nn.Module, inputs: Any, numbers: _Numbers, soft: set[str]) -> bool:
    """Return whether the model computes the same with its own masks and with masks at ``soft``."""
    rng = RngSnapshot(model)
    outputs = []
    try:
        for at_sites in (set[str](), soft):
            numbers.at_sites = at_sites
            rng.restore()
            with torch.no_grad(), Interception(model, numbers, forced_draws=numbers.real):
                outputs.append(call(model, inputs))
    finally:
        rng.restore()
    pairs = list(zip(*(list(tensors_in(out)) for out in outputs), strict=False))
    return all(_close(a, b) for a, b in pairs)


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(a.dtype, 5e-2)
    scale = float(b.detach().nan_to_num().abs().amax()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


class _Numbers:
    """Masks with about as many zeros as ones, and the random numbers that make them.

    Of the masks with a single value, those in ``dropped`` drop and the others keep.
    """

    def __init__(self, masks: Mapping[str, MaskOrigin], dropped: set[str]) -> None:
        self._masks, self._dropped = masks, dropped
        self._keys = {draw.site: key for key, draw in masks.items()}
        self._drawn: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)
        self.at_sites: set[str] = set()
        """The draws that are followed to their sites; the others get real numbers."""

    def _ones(self, key: str, shape: torch.Size) -> Tensor:
        """Return the mask of a draw."""
        if key not in self._drawn:
            draw = self._masks[key]
            self._drawn[key] = (
                torch.full(shape, draw.drops_at_one == (key in self._dropped))
                if draw.single
                else torch.rand(shape, generator=self._generator) < 0.5
            )
        return self._drawn[key]

    def real(self, key: str, fill: Callable[[float], Tensor]) -> Tensor | None:
        """Return the random numbers from which the model makes the mask of a draw."""
        if key not in self._masks or key in self.at_sites:
            return None
        like, draw = fill(0.0), self._masks[key]
        ones = self._ones(key, like.shape).to(like.device)
        return torch.where(ones, draw.number(True), draw.number(False)).to(like.dtype)

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """Return the mask at its own site, and h times a factor elsewhere, so that every site counts."""
        key = self._keys.get(site.name)
        if key is None:
            return h * torch.linspace(0.5, 1.5, h.shape[-1] if h.dim() else 1).to(h)
        if key not in self.at_sites:
            return h
        ones = self._ones(key, h.shape).to(h.device)
        return (ones != self._masks[key].drops_at_one).to(h.dtype)
