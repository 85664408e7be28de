"""Run a model unchanged, and decide what happens at every dropout.

A ``TorchFunctionMode`` receives the calls of the dropout *functions*, whatever code calls them. The
model does not change: it gets no hook, no patched function, no replaced module. The parts that
activation checkpointing runs again in the backward pass get the same noise. The interception ends with
its ``with`` block, and other threads never see it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import local
from typing import Any, TypeAlias, TypeVar

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from undrop.errors import RecomputationError
from undrop.intercept.branches import Blend
from undrop.intercept.checkpointing import Region, enclosing_function, regions
from undrop.intercept.hand_masks import NAME_ENDINGS, DrawOverride, HandMaskMixin, draw_findings
from undrop.intercept.mask_functions import apply_function
from undrop.intercept.random_values import Mask, Uniform
from undrop.intercept.running_statistics import keep_statistics
from undrop.intercept.site import Site
from undrop.intercept.wrappers import module_paths, running_module, running_path
from undrop.noise import mask_shape
from undrop.registry import Registry

H = TypeVar("H")


SiteAction: TypeAlias = Callable[[Site, Tensor], Tensor]
"""``action(site, h)`` returns what the model gets in place of dropout's output."""


def no_noise(site: Site, h: Tensor) -> Tensor:
    """The site action that switches every dropout off: ε = 0."""
    return h


Rule: TypeAlias = Callable[..., Any]
"""Runs in place of a torch function: ``rule(mode, *args, **kwargs)`` with its arguments."""

SITE_RULES: Registry[Callable[..., Any], Rule] = Registry("site rule")
"""The rule of each function that drops or draws random numbers."""


class _Depth(local):
    """How many ``outside_interception`` blocks this thread is in."""

    value = 0


outside_depth = _Depth()


class outside_interception:
    """Run a block without the interceptions that are active around it."""

    def __enter__(self) -> None:
        outside_depth.value += 1

    def __exit__(self, *_: object) -> None:
        outside_depth.value -= 1


_COND_FUNCTION = torch.ops.higher_order.cond
"""``torch.cond``. With this key in the table of rules, torch 2.8 could not compile the lookup."""


class Interception(HandMaskMixin, TorchFunctionMode):
    """Within ``with Interception(model, action):`` every dropout of the model calls the action.

    Args:
        model: the model that runs; its module paths name the sites.
        action: called with each site and its h.
        rules: an engine's rules for further functions.
        draw_override: returns numbers that replace those of a random draw. The proof that a draw is a
            mask needs it.
    """

    def __init__(
        self,
        model: nn.Module,
        action: SiteAction,
        rules: Mapping[Callable[..., Any], Rule] | None = None,
        draw_override: DrawOverride | None = None,
    ) -> None:
        TorchFunctionMode.__init__(self)
        self.action = action
        self.sites = []
        self.has_idle_dropout = False
        """Whether the pass has reached a dropout with p = 0 in train mode."""
        self.trail = 0
        """A hash of all functions that the pass has called, in order."""
        self._rules = {**SITE_RULES, **(rules or {})}
        self._extra_rules = rules
        self._model = model
        self._module_paths = module_paths(model)
        self._name_counts = Counter()
        self.grad_enabled = torch.is_grad_enabled()
        self.mask_draws, self.mask_origins = {}, {}
        self.draw_override = draw_override
        self._findings = draw_findings(model)
        self._prepared_regions: weakref.WeakSet[Region] = weakref.WeakSet()

    def __enter__(self) -> Interception:
        """Start to intercept, except in ``outside_interception`` blocks."""
        self._depth = outside_depth.value
        self.open_blocks += 1
        if self._findings.module_drops:
            self.track_modules()
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the rule of a function, or the function itself if it has none."""
        rule = self._rules.get(func)
        self.trail = hash((self.trail, func))
        self.call_count += 1
        if types or self._filled_tensors:
            out = self.handle_random_values(func, types, args, kwargs or {})
            if out is not NotImplemented:
                return out
        if func is _COND_FUNCTION:
            raise NotImplementedError("torch.cond")  # ``model_call`` turns it into an error message
        if rule is None or outside_depth.value != self._depth:
            return func(*args, **(kwargs or {}))
        self.prepare_recomputation()
        return rule(self, *args, **(kwargs or {}))

    def handle_random_values(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a function of random values; NotImplemented if no argument is one."""
        if Mask in types or Uniform in types:
            return apply_function(self, func, args, kwargs)
        if func in SITE_RULES:
            return NotImplemented
        replaced = self.replace_filled_tensors(func, args, kwargs)
        return NotImplemented if replaced is None else apply_function(self, func, *replaced)

    def __exit__(self, *error: Any) -> None:
        """Stop intercepting, and raise an error for a random branch that no module followed."""
        super().__exit__(*error)
        self.open_blocks -= 1
        if self._tracker is not None and not self.open_blocks:
            self._tracker.remove()
            if error[0] is None:
                self._tracker.check(at_end=True)

    def dispatch(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of tensors as if the model had called it."""
        self.call_count -= 1  # it counts the calls of the model alone
        return self.__torch_function__(func, (), args, kwargs)

    def prepare_recomputation(self) -> None:
        """Give checkpointed regions the same noise in the backward pass, or raise an error."""
        if not torch.is_grad_enabled():  # perhaps because an autograd function runs
            function = enclosing_function() if self.grad_enabled else None
            if function is not None:
                raise RecomputationError(
                    f"{self._location()} runs inside the autograd function {function}, whose backward "
                    "can't see the same noise: pass use_reentrant=False to activation checkpointing, or "
                    "use engine='antithetic' for a function of your own."
                )
            return
        for region in regions():
            if region not in self._prepared_regions:
                self._wrap_recomputation(region)

    def _wrap_recomputation(self, region: Region) -> None:
        """Make the second run of a region continue this pass, with the same names and noise."""
        if forward._current_level >= 0:
            raise RecomputationError(
                f"{self._location()} is under activation checkpointing, whose second run has no forward "
                "mode: use engine='antithetic'."
            )
        continuation, recompute = self._continuation(), region.recompute_fn
        blend = None if self._tracker is None else self._tracker.pending_blend()

        def recompute_with_noise(*args: Any) -> None:
            with keep_statistics(self._model), continuation() as mode:
                if blend is not None:
                    mode.track_modules().blends.append(Blend(blend.mask, blend.factor))
                recompute(*args)

        region.recompute_fn = recompute_with_noise
        self._prepared_regions.add(region)

    def _continuation(self) -> Callable[[], Interception]:
        """Return a function that makes an interception which continues from this point of the pass."""
        name_counts = self._name_counts.copy()

        def make() -> Interception:
            mode = Interception(self._model, self.action, self._extra_rules, self.draw_override)
            mode._name_counts = name_counts.copy()
            return mode

        return make

    def _location(self) -> str:
        """Return the running module for use in an error message."""
        path = running_path(self._module_paths)
        return repr(path) if path else "the model"

    def idle_dropout(self, h: H, training: bool | None) -> H:
        """Return h at a dropout that does not drop, because of eval mode or p = 0."""
        self.has_idle_dropout = self.has_idle_dropout or training is not False
        return h

    def noisy(self, h: Tensor, p: float, **options: Any) -> Tensor:
        """Return the action's result for h at a site of the running module; see :meth:`site`."""
        return self.action(self.site(h.shape, p, **options), h)

    def site(
        self,
        shape: Sequence[int],
        p: float,
        *,
        kind: str,
        mask: str = "independent",
        shared: Sequence[int] = (),
        label: str | None = None,
    ) -> Site:
        """Record a site of the running module, and return it.

        Args:
            shape: the shape of h.
            p: the drop probability.
            kind: the kind of the site.
            mask: the mask structure in words.
            shared: the dimensions of h along which one entry of the noise is shared.
            label: what the name of the site adds to the path of the module.
        """
        name, kind = self._name(kind, label)
        shape = tuple(shape)
        site = Site(name, kind, float(p), mask, shape, mask_shape(shape, shared))
        self.sites.append(site)
        return site

    def _name(self, kind: str, label: str | None) -> tuple[str, str]:
        """Return the name and kind of a site; the name of a dropout module needs no label."""
        module = running_module(self._module_paths)
        makes_mask = type(module).__name__.lower().endswith(NAME_ENDINGS.get(kind, ()))
        if makes_mask or isinstance(module, nn.modules.dropout._DropoutNd):
            label = None
        elif isinstance(module, nn.MultiheadAttention) and kind == "dropout":
            label = kind = "attention"
        path = "" if module is None else self._module_paths[id(module)]
        return self.unique_name(".".join(part for part in (path, label) if part) or kind), kind
