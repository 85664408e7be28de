"""Dropout with a p for each site in place of the model's own p.

Most modules store the p of their site in an attribute. If a test pass proves that, p is set there, which
is as fast as the model's own dropout. Otherwise an interception draws the masks.
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
    """The site action of dropout with a given p at some sites, and the model's p at the others.

    Args:
        site_p: p by site name.
        noise: draws the masks; None draws them from torch's global generator.
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


class PAttribute(NamedTuple):
    """The attribute of a module that stores the p of a site."""

    path: str
    """The path of the module."""
    module_type: type
    name: str
    """The name of the attribute."""

    def module(self, model: nn.Module) -> nn.Module | None:
        """Return the module; None if the model has no module of this type there any more."""
        try:
            module = model.get_submodule(self.path)
        except AttributeError:
            return None
        return module if type(module) is self.module_type else None


PAttributes: TypeAlias = dict[str, PAttribute]
"""The attribute of each site, by site name; empty if the p of some site is in no attribute."""
_attributes: weakref.WeakKeyDictionary[nn.Module, PAttributes] = weakref.WeakKeyDictionary()


def find_p_attributes(batch: Batch, names: list[str]) -> PAttributes:
    """Return the proven attributes of these sites; none while hooks on saved tensors are active."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return {}
    attributes = _attributes.get(batch.model)
    if (
        attributes is None
        or (attributes and list(attributes) != names)
        or any(a.module(batch.model) is None for a in attributes.values())
    ):
        attributes = _attributes[batch.model] = _prove(batch, names)
    return attributes


@contextmanager
def set_p(model: nn.Module, attributes: PAttributes, site_p: Mapping[str, float]) -> Iterator[None]:
    """Set p of each site in its attribute within a block; a declared p of 0 stays 0.

    Raises:
        RecomputationError: if activation checkpointing was switched on after the search for attributes.
            It would run parts of the pass again with the model's own p.
    """
    targets = [(a.module(model), a.name, site_p[site]) for site, a in attributes.items()]
    declared = [getattr(module, name) for module, name, _ in targets]
    try:
        for (module, name, p), declared_p in zip(targets, declared, strict=True):
            setattr(module, name, p if declared_p else declared_p)
        with torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTING_TOO_LATE):
            yield
    except RuntimeError as error:
        if str(error) != _CHECKPOINTING_TOO_LATE:
            raise
        raise RecomputationError(_CHECKPOINTING_TOO_LATE) from None
    finally:
        for (module, name, _), declared_p in zip(targets, declared, strict=True):
            setattr(module, name, declared_p)


_CHECKPOINTING_TOO_LATE = (
    "activation checkpointing, or other hooks on saved tensors, was switched on during training, "
    "while a tuner sets p: switch it on before the first step."
)


def _prove(batch: Batch, names: list[str]) -> PAttributes:
    """Set a different p in every candidate, run the model, and see which site has which p.

    The attributes are proven if each of these sites has the p of another candidate, all other sites have
    the same p as before, and the output without noise does not change. Otherwise there are none.
    """
    try:
        p_before, output_before = _without_noise(batch)
        candidates = _candidates(batch.model, {name: p_before[name] for name in names})
        n = len(candidates)
        test_p = [0.05 + 0.9 * (k + 1) / (n + 1) for k in range(n)]
        numbered = {str(k): candidate for k, candidate in enumerate(candidates)}
        with set_p(batch.model, numbered, dict(zip(numbered, test_p, strict=True))):
            p_after, output_after = _without_noise(batch)
    except Exception:  # an interception works with any model
        return {}
    by_p = dict(zip(test_p, candidates, strict=True))
    attributes = {name: by_p[p_after[name]] for name in names if p_after.get(name) in by_p}
    one_each = len(set(attributes.values())) == len(names)
    others_same = all(p_after.get(n) == p for n, p in p_before.items() if n not in attributes)
    same_number = len(output_before) == len(output_after)
    same_output = same_number and all(map(torch.equal, output_before, output_after))
    return attributes if one_each and others_same and same_output else {}


def _candidates(model: nn.Module, site_p: Mapping[str, float]) -> list[PAttribute]:
    """Return, for each site, the attributes equal to its p in the module that it is named after."""
    modules = dict(model.named_modules(remove_duplicate=False))
    candidates = []
    for name, p in site_p.items():
        path = name.partition("#")[0]
        path = path if path in modules else path.rpartition(".")[0]
        module = modules.get(path)
        candidates += [
            PAttribute(path, type(module), attribute)
            for attribute, value in getattr(module, "__dict__", {}).items()
            if isinstance(value, float) and value == p
        ]
    return list(dict.fromkeys(candidates))


def _without_noise(batch: Batch) -> tuple[dict[str, float], list[Tensor]]:
    """Run a pass without noise; return p of every site, and the tensors of the output."""
    p_of_sites: dict[str, float] = {}

    def record_p(site: Site, h: Tensor) -> Tensor:
        p_of_sites[site.name] = site.p
        return h

    with preserve_model(batch.model), Interception(batch.model, record_p):
        seed_current(0)
        output = batch.forward()
    return p_of_sites, [x.detach() for x in tensors_in(output)]
