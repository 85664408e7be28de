"""The proof that a hand-made mask is what it was taken for.

A pass in which the model makes its masks itself, from numbers that are given to it, must return what a
pass returns in which the sites take the values of these masks. If it does not, the draws are no sites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from undrop.intercept.hand_masks import MaskDraw
from undrop.intercept.interception import Interception, no_noise
from undrop.intercept.model_call import call
from undrop.intercept.pytrees import tensors_in
from undrop.intercept.site import Site
from undrop.rng_snapshot import RngSnapshot


def disproven(model: nn.Module, inputs: Any, masks: Mapping[str, MaskDraw]) -> set[str]:
    """Return the draws, by key, that are not the masks they were taken for.

    Args:
        model: the model, in train mode.
        inputs: its inputs.
        masks: how each draw became a mask, from a pass without noise.
    """
    if not masks or _agree(model, inputs, masks):
        return set()
    return {key for key, draw in masks.items() if not _agree(model, inputs, {key: draw})}


def _agree(model: nn.Module, inputs: Any, masks: Mapping[str, MaskDraw]) -> bool:
    numbers = _Numbers(masks)
    rng = RngSnapshot(model)
    outputs = []
    try:
        for given, action in ((numbers, no_noise), (None, numbers)):
            rng.restart()
            with torch.no_grad(), Interception(model, action, given=given):
                outputs.append(call(model, inputs))
    finally:
        rng.restart()
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
    """Masks of zeros and ones in about equal parts: the numbers they are made of, and the masks."""

    def __init__(self, masks: Mapping[str, MaskDraw]) -> None:
        self._masks = masks
        self._keys = {draw.site: key for key, draw in masks.items()}
        self._drawn: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)

    def _ones(self, key: str, shape: torch.Size) -> Tensor:
        """Return the mask of a draw; a single value is the less probable one."""
        if key not in self._drawn:
            single = shape.numel() == 1
            fresh = torch.rand(shape, generator=self._generator) < 0.5
            rare = torch.full(shape, not self._masks[key].likely)
            self._drawn[key] = rare if single else fresh
        return self._drawn[key]

    def real(self, key: str, fill: Callable[[float], Tensor]) -> Tensor | None:
        """Return the numbers of a draw that make its mask."""
        if key not in self._masks:
            return None
        like, draw = fill(0.0), self._masks[key]
        ones = self._ones(key, like.shape).to(like.device)
        return torch.where(ones, draw.number(True), draw.number(False)).to(like.dtype)

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """Return the mask at its site, and h at any other."""
        key = self._keys.get(site.name)
        if key is None:
            return h
        ones = self._ones(key, h.shape).to(h.device)
        return (ones != self._masks[key].flipped).to(h.dtype)
