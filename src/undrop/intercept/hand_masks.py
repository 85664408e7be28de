"""The part of an interception that follows masks made by hand."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from undrop.intercept.branches import Blend, EnclosingBlend, ModuleTracker
from undrop.intercept.mask_functions import META
from undrop.intercept.random_values import (
    Mask,
    MaskOrigin,
    RandomValue,
    Uniform,
    leaves_of,
    map_leaves,
)
from undrop.intercept.site import Site
from undrop.intercept.wrappers import bare, frames, running_path

H = TypeVar("H")


@dataclass
class DrawFindings:
    """What earlier passes showed about the random draws of a model. Each draw has a key."""

    not_masks: set[str] = field(default_factory=set)
    drops_at_one: dict[str, bool] = field(default_factory=dict)
    """Whether a mask drops where it is 1, for masks whose uses show it."""
    module_drops: set[str] = field(default_factory=set)
    """Draws whose branch skips no layer, so the enclosing module is blended; see ``branches.py``."""
    tried_reversed: set[str] = field(default_factory=set)
    """Draws whose branch has already taken its less probable side in a pass."""

    def learn(self, mask_uses: Mapping[str, set[bool]], origins: Mapping[str, MaskOrigin]) -> bool:
        """Store which value of each mask drops; return whether the pass assumed a wrong one."""
        wrong = False
        for key, uses in mask_uses.items():
            if len(uses) == 1 and key not in self.drops_at_one:
                (self.drops_at_one[key],) = uses
                wrong = wrong or self.drops_at_one[key] != origins[key].drops_at_one
        return wrong

    def rule_out(self, key: str, origin: MaskOrigin | None = None) -> None:
        """Store that a draw did not work as a mask.

        If it decides a branch, the next pass gives the condition its other value, and the pass after
        that blends the enclosing module. If this fails too, the draw is not a mask.
        """
        if origin is None or not origin.decides_branch or key in self.module_drops:
            self.not_masks.add(key)
        elif key not in self.tried_reversed:
            self.tried_reversed.add(key)
            self.drops_at_one[key] = not origin.drops_at_one
        else:
            self.drops_at_one.pop(key)
            self.module_drops.add(key)


_FINDINGS: weakref.WeakKeyDictionary[nn.Module, DrawFindings] = weakref.WeakKeyDictionary()


def draw_findings(model: nn.Module) -> DrawFindings:
    """Return the findings about the random draws of a model."""
    return _FINDINGS.setdefault(bare(model), DrawFindings())


DrawOverride: TypeAlias = Callable[[str, Callable[[float], Tensor]], Tensor | None]
"""Returns the numbers of a random draw; None if the pass draws them. The arguments are the key of the
draw, and the function ``full`` of :class:`Uniform`."""


@dataclass
class Replay:
    """A second run of a part of the pass, in which one condition has its other value."""

    key: str
    """The key of the draw that decides the condition."""
    reached_draw: bool = False
    """Whether the second run has reached this draw."""


NAME_ENDINGS = {
    "dropout": ("nativedropout",),
    "drop-path": ("droppath", "stochasticdepth"),
    "drop-block": ("dropblock", "dropblock2d", "dropblockfast2d"),
    "zoneout": ("zoneout",),
}
"""For each kind of mask made by hand, the endings of the names of functions and classes that make it."""


class HandMaskMixin:
    """The part of :class:`Interception` that follows random values from the draw to their use."""

    grad_enabled: bool
    """Whether gradients are enabled for the pass."""
    draw_override: DrawOverride | None = None
    reads_filled_tensor = False
    """Whether the model read a mask through the tensor that it filled in place, rather than through the
    return value."""
    mask_uses: dict[str, set[bool]] | None = None
    """For each mask, whether it drops where it is 1, according to each use; None if the pass does not
    record uses."""
    open_blocks = 0
    """How many ``with`` blocks of this interception are open: some rules open another one."""
    call_count = 0
    """How many functions the model has called."""
    _filled_tensors: dict[int, tuple[TensorWeakRef, RandomValue]] | None = None
    """The tensors that the model filled in place, by id, and the random value in place of each."""
    _decided_branches: frozenset[str] = frozenset()
    _replay: Replay | None = None
    _tracker: ModuleTracker | None = None

    sites: list[Site]
    mask_draws: dict[str, bool | None]
    """For each random draw, whether its mask drops where it is 1; None if the draw is no mask."""
    mask_origins: dict[str, MaskOrigin]
    """How a draw became a mask, by key; other draws are not listed."""
    batch_size: int | None = None
    """None if it is not known; :func:`mask_structure` uses it."""
    _module_paths: dict[int, str]
    _name_counts: Counter[str]
    _findings: DrawFindings
    dispatch: Callable[..., Any]
    """Calls a function of tensors as if the model had called it."""
    noisy: Callable[..., Tensor]
    """Returns the action's result for h."""

    def unique_name(self, name: str) -> str:
        """Return the name; add a number if this pass has used the name before."""
        self._name_counts[name] += 1
        count = self._name_counts[name]
        return name if count == 1 else f"{name}#{count}"

    def next_draw_key(self) -> str | None:
        """Return the key of the current random draw; None if it is known not to be a mask."""
        key = self.unique_name(f"{running_path(self._module_paths)}.random".lstrip("."))
        may_be_mask = key not in self._findings.not_masks
        self.mask_draws[key] = False if may_be_mask else None
        return key if may_be_mask else None

    def rule_out(self, key: str, origin: MaskOrigin | None = None) -> None:
        """Store that a draw did not work as a mask; see :meth:`DrawFindings.rule_out`."""
        self._findings.rule_out(key, origin)

    def drops_at_one(self, key: str, default: bool) -> bool:
        """Return whether a mask drops where it is 1: ``default`` unless earlier uses have shown it."""
        self.mask_draws[key] = self._findings.drops_at_one.get(key, default)
        return bool(self.mask_draws[key])

    def is_module_drop(self, key: str) -> bool:
        """Return whether two outputs of the module around a random branch are blended."""
        return key in self._findings.module_drops

    def progress(self) -> tuple[int, int]:
        """Return how many sites and draws the pass has reached."""
        return len(self.sites), len(self.mask_draws)

    def record_mask(self, key: str, origin: MaskOrigin) -> None:
        """Record how a draw became the mask of the latest site."""
        self.mask_origins[key] = origin._replace(site_name=self.sites[-1].name)

    def as_probability(self, p: Any) -> float | None:
        """Return p as a number; None if it is a tensor with several values."""
        if not isinstance(p, Tensor):
            return float(p)
        if p.requires_grad or not p.numel():
            return None
        low, high = (float(x) for x in p.aminmax())
        return low if low == high else None

    def site_options(self, shape: Sequence[int], kind: str | None) -> dict[str, Any]:
        """Return the kind, mask structure and label of a mask's site."""
        kind = kind or self._kind_by_name()
        return {"kind": kind, "mask": mask_structure(shape, self.batch_size), "label": kind}

    def _kind_by_name(self) -> str:
        """Return the kind of a mask from the names of the functions and modules that make it."""
        for frame in frames():
            owner = frame.f_locals.get("self")
            for name in (frame.f_code.co_name, type(owner).__name__):
                plain = name.replace("_", "").lower()
                kind = next((k for k, ends in NAME_ENDINGS.items() if plain.endswith(ends)), None)
                if kind is not None:
                    return kind
            if isinstance(owner, nn.Module) and id(owner) in self._module_paths:
                break
        return "mask"

    def uniform(
        self,
        full: Callable[[float], Tensor],
        draw_numbers: Callable[[], Tensor],
        *,
        target: Tensor | None = None,
        low: float = 0.0,
        high: float = 1.0,
    ) -> Any:
        """Return uniform numbers that may become a mask.

        ``target`` is the tensor that the model fills in place, if it fills one. :class:`Uniform`
        describes ``full`` and ``draw_numbers``.
        """
        key, numbers = self._next_draw(full)
        if numbers is not None:
            numbers = numbers * (high - low) + low
            return numbers if target is None else target.copy_(numbers)
        if key is None or not high > low:
            return draw_numbers()
        if target is None:
            return Uniform(self, key, full, draw_numbers)  # type: ignore[arg-type]
        width = high - low

        def draw_standard() -> Tensor:
            return (draw_numbers() - low) / width

        value = Uniform(self, key, full, draw_standard, width, low)  # type: ignore[arg-type]
        value.target = target
        return self._record_filled_tensor(target, value)

    def bernoulli(
        self,
        full: Callable[[float], Tensor],
        draw_numbers: Callable[[], Tensor],
        probability: float | None,
        dtype: torch.dtype,
        *,
        target: Tensor | None = None,
    ) -> Any:
        """Return zeros and ones, 1 with probability ``probability`` (None if it varies)."""
        certain = probability is not None and not 0.0 < probability < 1.0
        key, numbers = (None, None) if certain else self._next_draw(full)
        if numbers is not None:
            numbers = numbers.to(dtype)
            return numbers if target is None else target.copy_(numbers)
        if key is None or probability is None:
            return draw_numbers()
        mask = self.make_mask(key, full, probability, dtype)
        return mask if target is None else self._record_filled_tensor(target, mask)

    def _next_draw(self, full: Callable[[float], Tensor]) -> tuple[str | None, Tensor | None]:
        """Return the key of the current draw, and its numbers if ``draw_override`` gives any.

        The key is None for a draw that is not a mask.
        """
        if self._replay is not None and not self._replay.reached_draw:
            self._replay.reached_draw = True
            return self._replay.key, None
        key = self.next_draw_key()
        if key is None or self.draw_override is None:
            return key, None
        return key, self.draw_override(key, full)

    def make_mask(
        self,
        key: str,
        full: Callable[[float], Tensor],
        probability: float,
        dtype: torch.dtype,
        *,
        threshold: float | None = None,
        below: bool = True,
        transform: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Mask:
        """Return a mask that is 1 with probability ``probability``: a site with h = (1 - p)·ones.

        ``transform`` applies the functions that the model has applied to the draw.
        """
        drops_at_one = self.drops_at_one(key, probability < 0.5 or (probability == 0.5 and below))
        origin = MaskOrigin(threshold, below, drops_at_one)
        p = round(probability if drops_at_one else 1.0 - probability, 12)

        def compute(kind: str | None) -> Tensor:
            h = full(1.0 - p)
            with self.enable_grad():
                m = self.noisy(h, p, **self.site_options(h.shape, kind))
                single, branch = h.numel() == 1, kind is not None
                self.record_mask(key, origin._replace(single_value=single, decides_branch=branch))
                return transform(self.dispatch(torch.rsub, m, 1.0) if drops_at_one else m)

        template = transform(full(0.0)) if dtype == torch.bool else None
        mask = Mask(self, key, compute, dtype, origin, template=template)  # type: ignore[arg-type]
        if template is None or template.numel() != 1:
            mask.value()  # a single bool may decide a branch, whose site has another kind
        return mask

    def enable_grad(self) -> AbstractContextManager[Any]:
        """Enable gradients if the pass has them: models often make masks under ``no_grad``."""
        return torch.set_grad_enabled(self.grad_enabled or torch.is_grad_enabled())

    def _record_filled_tensor(self, target: Tensor, value: RandomValue) -> RandomValue:
        """Use ``value`` wherever the model uses ``target``, the tensor that it filled in place."""
        if not torch.compiler.is_compiling():
            old = self._filled_tensors or {}
            self._filled_tensors = {k: v for k, v in old.items() if v[0]() is not None}
            self._filled_tensors[id(target)] = (TensorWeakRef(target), value)
        return value

    def forget_filled_tensor(self, target: Tensor) -> None:
        """Treat a tensor that was filled in place as an ordinary one from now on."""
        if self._filled_tensors is not None:
            self._filled_tensors.pop(id(target), None)

    def replace_filled_tensors(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments with random values in place of tensors that were filled in place.

        If there are no such tensors, or the function reads no values, return None.
        """
        filled = self._filled_tensors
        if filled is None or func in META:
            return None

        def random_value(x: Any) -> Any:
            entry = filled.get(id(x))
            return entry[1] if entry is not None and entry[0]() is x else x

        if not any(random_value(x) is not x for x in leaves_of((args, kwargs))):
            return None
        self.reads_filled_tensor = True
        return map_leaves(args, random_value), map_leaves(kwargs, random_value)

    def track_modules(self) -> ModuleTracker:
        """Track the modules that the pass calls, from now on; return the tracker."""
        if self._tracker is None:
            self._tracker = ModuleTracker(self)
        return self._tracker

    def decide_branch(self, mask: Mask) -> bool:
        """Return the value of ``if mask:`` that drops nothing; in a replay, the other one.

        Both branches are blended later.
        """
        if self._replay is not None and self._replay.key == mask.key:
            return not mask.keeps_at_one
        if mask.key not in self._decided_branches:
            tracker = self.track_modules()
            tracker.check()
            is_module_drop = self.is_module_drop(mask.key)
            value = mask.value("module-drop" if is_module_drop else "layer-drop")
            if value.numel() != 1:
                raise mask.refuse("a branch on many values")
            factor = value if mask.keeps_at_one else self.dispatch(torch.rsub, value, 1.0)
            self._decided_branches |= {mask.key}
            tracker.blends.append(
                EnclosingBlend(mask, factor, *tracker.running[-1])
                if is_module_drop
                else Blend(mask, factor)
            )
        return mask.keeps_at_one

    def replay(self, mask: Mask, run: Callable[[], H]) -> H:
        """Run a part of the pass again with the value of the condition that drops; return its output.

        Raises:
            NotAMask: if this part of the pass contains other sites or random draws.
        """
        before = self.progress()
        self._replay = replay = Replay(mask.key)
        try:
            output = run()
        finally:
            self._replay = None
        if not replay.reached_draw or self.progress() != before:
            raise mask.refuse("a branch around other random numbers", branch=True)
        return output


def mask_structure(shape: Sequence[int], batch_size: int | None = None) -> str:
    """Return in words which entries share one value of a mask of that shape.

    ``batch_size`` is None if it is not known.
    """
    if tuple(shape) in ((), (1,)) or (batch_size != 1 and all(n == 1 for n in shape)):
        return "per batch"
    if batch_size is not None and shape[0] % batch_size:
        return "shared by all examples"
    unshared = [d for d in range(1, len(shape)) if shape[d] != 1]
    if len(shape) == 1 or len(unshared) == len(shape) - 1:
        return "independent"
    if not unshared:
        return "per example"
    if unshared == [1]:
        return "per token" if len(shape) == 3 else "per channel"
    if unshared == [len(shape) - 1]:
        return "per feature"
    return "same for all channels"
