"""Running a model unchanged, with undrop deciding what happens at every dropout it meets.

A ``TorchFunctionMode`` sees the dropout *functions* themselves, so that a dropout is found wherever
it is called from. Nothing in the model is touched: no hook, no patched function, no replaced module.
What activation checkpointing runs again in the backward pass is given the same answers there.
Leaving the ``with`` block, in whatever way, ends it; other threads never see it.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import local
from types import FrameType
from typing import Any, Protocol

import torch
import torch.autograd.forward_ad as forward
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from undrop.errors import RecomputationError, UnsupportedDropoutError
from undrop.intercept.checkpointing import Region, enclosing_function, regions
from undrop.intercept.running_statistics import keep_statistics
from undrop.intercept.site import Site
from undrop.intercept.wrappers import paths
from undrop.noise import mask_shape

__all__ = ["Field", "Handler", "Interception", "apart", "intercepts"]


class Field(Protocol):
    """What happens to h at a site; the answer takes the place of the dropped h."""

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """The new h."""
        ...


class Handler(Protocol):
    """Stands in for an intercepted torch function while an interception runs."""

    def __call__(
        self,
        mode: Interception,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute what ``func(*args, **kwargs)`` would, with the field's say at its sites."""
        ...


SITE_HANDLERS: dict[Callable[..., Any], Handler] = {}
"""The functions that drop, and what stands in for each; filled by ``@intercepts``."""


def intercepts(*functions: Callable[..., Any]) -> Callable[[Handler], Handler]:
    """Register a handler for dropping functions. Registering one twice is an error."""

    def register(handler: Handler) -> Handler:
        for function in functions:
            if function in SITE_HANDLERS:
                raise ValueError(f"{function} has a handler already.")
            SITE_HANDLERS[function] = handler
        return handler

    return register


RANDOM = frozenset(
    [
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.poisson),
        *(torch.rand_like, torch.randn_like, torch.randint_like),
        *(torch.bernoulli, torch.multinomial, torch.binomial, torch.rrelu, torch.rrelu_),
        *(Tensor.bernoulli, Tensor.bernoulli_, Tensor.multinomial, Tensor.normal_),
        *(Tensor.uniform_, Tensor.exponential_, Tensor.geometric_, Tensor.cauchy_),
        *(Tensor.log_normal_, Tensor.random_),
        *(F.gumbel_softmax, F.rrelu),
    ]
)
"""Torch's functions that draw from a global generator, unless they are given one."""


class _Depth(local):
    """How many pieces of work within the pass of a model, each no part of it, this thread is in."""

    value = 0


_depth = _Depth()


@contextmanager
def apart() -> Iterator[None]:
    """What is run within is no part of the models that are intercepted outside of it."""
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1


class Interception(TorchFunctionMode):
    """Within ``with Interception(model, field):`` every dropout of the model asks the field.

    Args:
        model: the model that will be run; its module paths name the sites.
        field: called with each site and its h.
        rules: further functions to stand in for, an engine's own.
    """

    def __init__(
        self,
        model: nn.Module,
        field: Field,
        rules: Mapping[Callable[..., Any], Handler] | None = None,
    ) -> None:
        super().__init__()
        self.field = field
        self.sites: list[Site] = []
        self.drew = False
        """Whether the pass has drawn random numbers from torch's global generators."""
        self._handlers = {**SITE_HANDLERS, **(rules or {})}
        self._model = model
        self._rules = rules
        self._names = paths(model)
        self._calls: Counter[str] = Counter()
        self._gradients = torch.is_grad_enabled()
        self._bound: weakref.WeakSet[Region] = weakref.WeakSet()

    def __enter__(self) -> Interception:
        """Begin; work that is set ``apart`` from here on is left alone."""
        self._depth = _depth.value
        super().__enter__()
        return self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Hand an intercepted function to its handler, and let all others pass."""
        handler = self._handlers.get(func)
        if handler is None or _depth.value != self._depth:
            if func in RANDOM and (kwargs or {}).get("generator") is None:
                self.drew = True
            return func(*args, **(kwargs or {}))
        self._prepare_recomputation()
        return handler(self, func, args, kwargs or {})

    def _prepare_recomputation(self) -> None:
        """See to it that a checkpointed region that is being run is run again as it is now.

        Raises:
            RecomputationError: if that can't be.
        """
        if not torch.is_grad_enabled():
            function = enclosing_function() if self._gradients else None
            if function is not None:
                raise RecomputationError(
                    f"{self._where()} runs inside of the autograd function {function}, whose backward "
                    "undrop can't give the same noise: with activation checkpointing pass "
                    "use_reentrant=False."
                )
            return
        for region in regions():
            if region not in self._bound:
                self._bind(region)

    def _bind(self, region: Region) -> None:
        if forward._current_level >= 0:
            raise RecomputationError(
                f"{self._where()} is under activation checkpointing, whose second run has no forward "
                "mode: use engine='antithetic'."
            )
        calls, run = Counter(self._calls), region.recompute_fn

        def run_again(*args: Any) -> None:
            again = Interception(self._model, self.field, self._rules)
            again._calls = Counter(calls)
            with keep_statistics(self._model), again:
                run(*args)

        region.recompute_fn = run_again
        self._bound.add(region)

    def _where(self) -> str:
        module = self.running_module()
        return "the model" if module is None else f"{self._names[id(module)] or 'the model'!r}"

    def noisy(
        self,
        h: Tensor,
        p: float,
        *,
        kind: str,
        mask: str = "independent",
        shared: Sequence[int] = (),
        per_example: bool = True,
        label: str | None = None,
    ) -> Tensor:
        """What the field makes of h at the site that the running module is now at."""
        site = self.site(
            h.shape, p, kind=kind, mask=mask, shared=shared, per_example=per_example, label=label
        )
        return self.field(site, h)

    def site(
        self,
        shape: Sequence[int],
        p: float,
        *,
        kind: str,
        mask: str = "independent",
        shared: Sequence[int] = (),
        per_example: bool = True,
        label: str | None = None,
    ) -> Site:
        """Record the site that the running module is now at.

        Raises:
            UnsupportedDropoutError: if p = 1, which drops everything and has no finite σ.
        """
        name = self._name(kind, label)
        if not 0.0 < p < 1.0:
            raise UnsupportedDropoutError(
                f"the dropout at {name!r} has p = {p:g}: undrop needs 0 < p < 1, since σ = "
                "sqrt(p / (1 - p)) must be finite."
            )
        shape = tuple(shape)
        site = Site(name, kind, float(p), mask, shape, mask_shape(shape, shared), per_example)
        self.sites.append(site)
        return site

    def _name(self, kind: str, label: str | None) -> str:
        module = self.running_module()
        path = "" if module is None else self._names[id(module)]
        base = ".".join(part for part in (path, label) if part) or kind
        self._calls[base] += 1
        count = self._calls[base]
        return base if count == 1 else f"{base}#{count}"

    def running_module(self) -> nn.Module | None:
        """The innermost module of the model whose method is on the Python stack.

        Reading the stack needs no hooks on the model, hence nothing to put back, and is right in
        every thread and under every function transform.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self._names:
                return owner
            frame = frame.f_back
        return None
