"""Dropout with a p for each site, instead of the model's own p.

Most modules keep the p of their site in an attribute. If that is proven, a pass sets the new p there,
which is as fast as the model's own dropout. Otherwise an interception draws the masks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrop.engines import ScaledNoise
from undrop.errors import RecomputationError
from undrop.intercept import Batch, Interception, Site, preserve_model, tensors_in
from undrop.rng_snapshot import seed_current


class SiteMasks:
    """The site action of dropout, with a different p at some sites.

    Other sites keep the model's p. ``noise`` draws the masks; None is torch's global generator.
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


class Slot(NamedTuple):
    """The attribute of a module that holds the p of a site."""

    path: str
    kind: type
    attribute: str

    def holder(self, model: nn.Module) -> nn.Module | None:
        """Return the module; None if the model has another module there now."""
        try:
            found = model.get_submodule(self.path)
        except AttributeError:
            return None
        return found if type(found) is self.kind else None


Slots: TypeAlias = dict[str, Slot]
"""The slot of each site; empty if any site has no slot."""
_slots: weakref.WeakKeyDictionary[nn.Module, Slots] = weakref.WeakKeyDictionary()


def slots(batch: Batch, names: list[str]) -> Slots:
    """Return the proven slots of these sites; no slots while hooks on saved tensors are active."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return {}
    known = _slots.get(batch.model)
    if known is None or (known and list(known) != names):
        known = _slots[batch.model] = _proven(batch, names)
    if any(slot.holder(batch.model) is None for slot in known.values()):
        known = _slots[batch.model] = _proven(batch, names)
    return known


@contextmanager
def with_p(model: nn.Module, found: Slots, site_p: Mapping[str, float]) -> Iterator[None]:
    """Set p of each site in its slot for one pass; a p of 0 stays 0, because it makes no site.

    Raises:
        RecomputationError: if activation checkpointing was switched on after the search for slots. It
            would run parts of the pass again with the model's own p.
    """
    places = [(slot.holder(model), slot.attribute, site_p[name]) for name, slot in found.items()]
    declared = [getattr(module, attribute) for module, attribute, _ in places]
    try:
        for (module, attribute, p), own in zip(places, declared, strict=True):
            setattr(module, attribute, p if own else own)
        with torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTING_TOO_LATE):
            yield
    except RuntimeError as error:
        raise (
            RecomputationError(_CHECKPOINTING_TOO_LATE)
            if str(error) == _CHECKPOINTING_TOO_LATE
            else error
        ) from None
    finally:
        for (module, attribute, _), own in zip(places, declared, strict=True):
            setattr(module, attribute, own)


_CHECKPOINTING_TOO_LATE = (
    "activation checkpointing, or other hooks on saved tensors, was switched on during training, "
    "while a tuner sets p: switch it on before the first step."
)


def _proven(batch: Batch, names: list[str]) -> Slots:
    """Set a different p in every attribute that may be a slot, and find which site then has it.

    The output without noise must not change.
    """
    try:
        before, output = _without_noise(batch)
        every = _candidates(batch.model, {name: before[name] for name in names})
        tried = [0.05 + 0.9 * (k + 1) / (len(every) + 1) for k in range(len(every))]
        numbered = {str(k): slot for k, slot in enumerate(every)}
        with with_p(batch.model, numbered, dict(zip(numbered, tried, strict=True))):
            after, again = _without_noise(batch)
    except Exception:  # an interception works with any model
        return {}
    by_p = dict(zip(tried, every, strict=True))
    found = {name: by_p[after[name]] for name in names if after.get(name) in by_p}
    same = len(output) == len(again) and all(map(torch.equal, output, again))
    others = all(after.get(name) == p for name, p in before.items() if name not in found)
    return found if same and others and len(set(found.values())) == len(names) else {}


def _candidates(model: nn.Module, site_p: Mapping[str, float]) -> list[Slot]:
    """Return the attributes equal to p of a site, in the module that the site is named after."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = []
    for name, p in site_p.items():
        path = name.partition("#")[0]
        path = path if path in modules else path.rpartition(".")[0]
        kept = vars(modules[path]).items() if path in modules else ()
        found += [
            Slot(path, type(modules[path]), attribute)
            for attribute, value in kept
            if isinstance(value, float) and value == p
        ]
    return list(dict.fromkeys(found))


def _without_noise(batch: Batch) -> tuple[dict[str, float], list[Tensor]]:
    """Return p of every site, and the output, of a pass without noise."""
    found: dict[str, float] = {}

    def note(site: Site, h: Tensor) -> Tensor:
        found[site.name] = site.p
        return h

    with preserve_model(batch.model), Interception(batch.model, note):
        seed_current(0)
        output = batch.forward()
    return found, [x.detach() for x in tensors_in(output)]
