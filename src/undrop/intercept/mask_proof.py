"""Prove that a mask made by hand does what undrop assumes.

Two passes must agree. In one pass the model makes its masks from given random numbers, and in the other
pass the sites return the values of these masks. If the outputs differ, the draws are not masks.
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


def disproven_masks(model: nn.Module, inputs: Any, origins: Mapping[str, MaskOrigin]) -> set[str]:
    """Return the keys of the draws that are not masks after all.

    The model must be in train mode. ``origins`` are the masks of a pass without noise, by key.
    """
    single = [key for key, origin in origins.items() if origin.single_value]
    for dropped in _rounds(single) if origins else ():
        masks = _TestMasks(origins, dropped)
        if not _agree(model, inputs, masks, set(origins)):
            bad = {key for key in origins if not _agree(model, inputs, masks, {key})}
            return bad or set(origins)
    return set()


def _rounds(keys: list[str]) -> Iterator[set[str]]:
    """Yield for each round the masks that drop in it; the keys are those of masks with a single value.

    For every two masks, the first drops and the second keeps in some round, and the reverse happens in
    another. So an error that a skipped layer or a factor of 0 hides in one round appears in another one.
    """
    for bit in range(max(1, (len(keys) - 1).bit_length())):
        ones = {key for i, key in enumerate(keys) if i >> bit & 1}
        yield ones
        if keys:
            yield set(keys) - ones


def _agree(model: nn.Module, inputs: Any, masks: _TestMasks, keys: set[str]) -> bool:
    """Return whether the output stays the same if the masks of these draws come from their sites."""
    rng = RngSnapshot(model)
    outputs = []
    try:
        for at_sites in (set[str](), keys):
            masks.at_sites = at_sites
            rng.restore()
            with torch.no_grad(), Interception(model, masks, draw_override=masks.numbers):
                outputs.append(call(model, inputs))
    finally:
        rng.restore()
    a, b = (list(tensors_in(output)) for output in outputs)
    return len(a) == len(b) and all(map(_close, a, b))


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(a.dtype, 5e-2)
    scale = float(b.detach().nan_to_num().abs().amax()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


class _TestMasks:
    """Masks with about as many zeros as ones, and the random numbers that make them.

    Of the masks with a single value, those in ``dropped`` drop, and the others keep.
    """

    def __init__(self, origins: Mapping[str, MaskOrigin], dropped: set[str]) -> None:
        self._origins, self._dropped = origins, dropped
        self._keys = {origin.site_name: key for key, origin in origins.items()}
        self._masks: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)
        self.at_sites: set[str] = set()
        """The draws whose masks come from their sites; the model makes the other masks itself."""

    def _mask(self, key: str, shape: torch.Size) -> Tensor:
        """Return the mask of a draw."""
        if key not in self._masks:
            origin = self._origins[key]
            self._masks[key] = (
                torch.full(shape, origin.drops_at_one == (key in self._dropped))
                if origin.single_value
                else torch.rand(shape, generator=self._generator) < 0.5
            )
        return self._masks[key]

    def numbers(self, key: str, full: Callable[[float], Tensor]) -> Tensor | None:
        """Return the numbers from which the model makes a mask; None if the mask comes from its site."""
        if key not in self._origins or key in self.at_sites:
            return None
        like, origin = full(0.0), self._origins[key]
        mask = self._mask(key, like.shape).to(like.device)
        return torch.where(mask, origin.number_for(True), origin.number_for(False)).to(like.dtype)

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """The site action: return the mask at its site, and h times constants at any other site.

        The constants make the output depend on every site.
        """
        key = self._keys.get(site.name)
        if key is None:
            return h * torch.linspace(0.5, 1.5, h.shape[-1] if h.dim() else 1).to(h)
        if key not in self.at_sites:
            return h
        mask = self._mask(key, h.shape).to(h.device)
        return (mask != self._origins[key].drops_at_one).to(h.dtype)
