"""Run a model unchanged, and decide what happens at every dropout.

A ``TorchFunctionMode`` sees the dropout *functions* themselves, so a dropout is found wherever it is
called from. The model does not change: it gets no hook, no patched function, no replaced module.
Activation checkpointing runs parts of a model again in the backward pass; they get the same noise
there. Leaving the ``with`` block ends the interception; other threads never see it.
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
from undrop.intercept.hand_masks import KINDS, ForcedDraws, HandMasks, known_draws
from undrop.intercept.mask_functions import evaluate
from undrop.intercept.random_values import Mask, Uniform
from undrop.intercept.running_statistics import keep_statistics
from undrop.intercept.site import Site
from undrop.intercept.wrappers import module_paths, running_module, running_path
from undrop.noise import mask_shape
from undrop.registry import Registry

H = TypeVar("H")


SiteAction: TypeAlias = Callable[[Site, Tensor], Tensor]
"""What happens to h at a site; its result is used in place of dropout's output."""


def no_noise(site: Site, h: Tensor) -> Tensor:
    """The site action that switches every dropout off: ε = 0."""
    return h


Rule: TypeAlias = Callable[..., Any]
"""Replaces a torch function: ``rule(mode, *args, **kwargs)`` with the function's own arguments."""

SITE_RULES: Registry[Callable[..., Any], Rule] = Registry("site rule")
"""The functions that drop, and the rule for each."""


class _Depth(local):
    """How many ``outside_interception`` blocks this thread is in."""

    value = 0


outside_depth = _Depth()


class outside_interception:
    """Hide a block from every interception that is active outside it."""

    def __enter__(self) -> None:
        outside_depth.value += 1

    def __exit__(self, *_: object) -> None:
        outside_depth.value -= 1


_COND_FUNCTION = torch.ops.higher_order.cond
"""``torch.cond``; it has no rule, because torch 2.8 can't compile a table of rules with this key."""


class Interception(HandMasks, TorchFunctionMode):
    """Within ``with Interception(model, action):`` every dropout of the model calls the action.

    Args:
        model: the model that runs; its module paths name the sites.
        action: called with each site and its h.
        rules: an engine's rules for further functions.
        forced_draws: returns the numbers that a random draw gets instead of random ones; the proof that
            a draw is a mask needs them.
    """

    def __init__(
        self,
        model: nn.Module,
        action: SiteAction,
        rules: Mapping[Callable[..., Any], Rule] | None = None,
        forced_draws: ForcedDraws | None = None,
    ) -> None:
        TorchFunctionMode.__init__(self)
        self.action = action
        self.sites = []
        self.has_idle_dropout = False
        """Whether the pass has used a dropout with p = 0."""
        self.trail = 0
        """A hash of all functions that the pass has called, in order."""
        self._rules = {**SITE_RULES, **(rules or {})}
        self._extra_rules = rules
        self._model = model
        self._module_paths = module_paths(model)
        self._calls = Counter()
        self.grad_enabled = torch.is_grad_enabled()
        self.mask_draws, self.mask_origins = {}, {}
        self.forced_draws = forced_draws
        self._known = known_draws(model)
        self._prepared_regions: weakref.WeakSet[Region] = weakref.WeakSet()

    def __enter__(self) -> Interception:
        """Start to intercept, except in ``outside_interception`` blocks."""
        self._depth = outside_depth.value
        self.open_blocks += 1
        if self._known.module_drops:
            self.track_modules()
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the rule of an intercepted function; call any other function as it is."""
        rule = self._rules.get(func)
        self.trail = hash((self.trail, func))
        self.functions += 1
        if types or self._filled_tensors:
            found = self.handle_random_values(func, types, args, kwargs or {})
            if found is not NotImplemented:
                return found
        if func is _COND_FUNCTION:
            raise NotImplementedError("torch.cond")  # ``model_call`` turns it into an error message
        if rule is None or outside_depth.value != self._depth:
            return func(*args, **(kwargs or {}))
        self.prepare_recomputation()
        return rule(self, *args, **(kwargs or {}))

    def handle_random_values(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Evaluate a function of random values; return NotImplemented if no argument is one."""
        if Mask in types or Uniform in types:
            return evaluate(self, func, args, kwargs)
        found = None if func in SITE_RULES else self.with_random_values(func, args, kwargs)
        return NotImplemented if found is None else evaluate(self, func, *found)

    def __exit__(self, *error: Any) -> None:
        """Stop intercepting."""
        super().__exit__(*error)
        self.open_blocks -= 1
        if self._tracker is not None and not self.open_blocks:
            self._tracker.remove()
            if error[0] is None:
                self._tracker.check(end=True)

    def dispatch(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of tensors as if the model had called it."""
        self.functions -= 1  # the model did not call it
        return self.__torch_function__(func, (), args, kwargs)

    def prepare_recomputation(self) -> None:
        """Give checkpointed regions the same noise in the backward pass, or raise an error."""
        if not torch.is_grad_enabled():
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
                self._bind(region)

    def _bind(self, region: Region) -> None:
        if forward._current_level >= 0:
            raise RecomputationError(
                f"{self._location()} is under activation checkpointing, whose second run has no forward "
                "mode: use engine='antithetic'."
            )
        again, run = self._continuation(), region.recompute_fn
        branch = None if self._tracker is None else self._tracker.pending()

        def run_again(*args: Any) -> None:
            with keep_statistics(self._model), again() as mode:
                if branch is not None:
                    mode.track_modules().blends.append(Blend(branch.mask, branch.factor))
                run(*args)

        region.recompute_fn = run_again
        self._prepared_regions.add(region)

    def _continuation(self) -> Callable[[], Interception]:
        """Return a function that creates an interception which continues from this point of the pass."""
        calls = Counter(self._calls)

        def make() -> Interception:
            again = Interception(self._model, self.action, self._extra_rules, self.forced_draws)
            again._calls = Counter(calls)
            return again

        return make

    def _location(self) -> str:
        path = running_path(self._module_paths)
        return repr(path) if path else "the model"

    def idle_dropout(self, h: H, training: bool | None) -> H:
        """Return h at a dropout that does not drop: in eval mode, or with p = 0."""
        self.has_idle_dropout = self.has_idle_dropout or training is not False
        return h

    def noisy(self, h: Tensor, p: float, **how: Any) -> Tensor:
        """Return the action's result for h at the site of the running module."""
        return self.action(self.site(h.shape, p, **how), h)

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
        """Record the site of the running module."""
        name, kind = self._name(kind, label)
        shape = tuple(shape)
        site = Site(name, kind, float(p), mask, shape, mask_shape(shape, shared))
        self.sites.append(site)
        return site

    def _name(self, kind: str, label: str | None) -> tuple[str, str]:
        """Return the name and kind of the running module's site; a dropout module needs no label."""
        module = running_module(self._module_paths)
        named = kind in KINDS and type(module).__name__.lower().endswith(KINDS[kind])
        if named or isinstance(module, nn.modules.dropout._DropoutNd):
            label = None
        elif isinstance(module, nn.MultiheadAttention) and kind == "dropout":
            label = kind = "attention"
        path = running_path(self._module_paths)
        return self.numbered(".".join(part for part in (path, label) if part) or kind), kind
