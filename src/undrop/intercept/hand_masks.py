"""The part of an interception that follows the masks that a model makes by hand."""

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
class KnownDraws:
    """What earlier passes found out about the random draws of a model, by key."""

    not_masks: set[str] = field(default_factory=set)
    drops_at_one: dict[str, bool] = field(default_factory=dict)
    """Whether a mask drops where it is 1, for the masks whose uses show it."""
    module_drops: set[str] = field(default_factory=set)
    """Random branches that blend two outputs of the enclosing module; see ``branches.py``."""
    tried_reversed: set[str] = field(default_factory=set)
    """Branches for which a pass has tried the less probable value of the condition."""

    def learn(self, uses: Mapping[str, set[bool]], masks: Mapping[str, MaskOrigin]) -> bool:
        """Store which value of each mask drops; return whether the pass assumed a wrong one."""
        wrong = False
        for key, right in uses.items():
            if len(right) == 1 and key not in self.drops_at_one:
                (is_right,) = right
                self.drops_at_one[key] = masks[key].drops_at_one == is_right
                wrong = wrong or not is_right
        return wrong

    def rule_out(self, key: str, draw: MaskOrigin | None = None) -> None:
        """Store that a draw did not work as a mask.

        For a branch, the next pass tries the other value of the condition, and the pass after that
        blends the enclosing module. If this fails too, the draw is not a mask.
        """
        if draw is None or not draw.branch or key in self.module_drops:
            self.not_masks.add(key)
        elif key not in self.tried_reversed:
            self.tried_reversed.add(key)
            self.drops_at_one[key] = not draw.drops_at_one
        else:
            self.drops_at_one.pop(key)
            self.module_drops.add(key)


_KNOWN: weakref.WeakKeyDictionary[nn.Module, KnownDraws] = weakref.WeakKeyDictionary()


def known_draws(model: nn.Module) -> KnownDraws:
    """Return what is known about the random draws of a model."""
    return _KNOWN.setdefault(bare(model), KnownDraws())


ForcedDraws: TypeAlias = Callable[[str, Callable[[float], Tensor]], Tensor | None]
"""Returns the numbers of a draw from its key and ``fill``; None lets the pass draw them."""


@dataclass
class Replay:
    """A second run of a part of the pass, in which one condition has its other value."""

    key: str
    """The key of the draw that decides the condition."""
    begun: bool = False
    """Whether the second run has reached this draw."""


KINDS = {
    "dropout": ("nativedropout",),
    "drop-path": ("droppath", "stochasticdepth"),
    "drop-block": ("dropblock", "dropblock2d", "dropblockfast2d"),
    "zoneout": ("zoneout",),
}
"""The kind of a mask made by hand, by how the name of its function or class ends."""


class HandMasks:
    """The part of :class:`Interception` that follows random values from their draw to their use."""

    grad_enabled: bool
    """Whether the pass has gradients."""
    forced_draws: ForcedDraws | None = None
    reads_filled_tensor = False
    """Whether the model read a mask through the tensor that it filled in place, rather than through the
    return value."""
    _filled_tensors: dict[int, tuple[TensorWeakRef, RandomValue]] | None = None
    _branched: frozenset[str] = frozenset()
    _replay: Replay | None = None
    _tracker: ModuleTracker | None = None
    uses: dict[str, set[bool]] | None = None
    """For each mask, whether its uses agree with the value that is assumed to drop; None if the pass
    does not record it."""
    open_blocks = 0
    """How many ``with`` blocks of this interception are open: some rules open another one."""
    functions = 0
    """How many functions the model has called."""

    sites: list[Site]
    mask_draws: dict[str, bool | None]
    """For each random draw that can become a mask: whether the mask drops where it is 1; None if the
    draw is not a mask."""
    mask_origins: dict[str, MaskOrigin]
    """How draws became masks, by key."""
    batch: int | None = None
    """The number of examples, if it is known; :func:`mask_structure` needs it."""
    _module_paths: dict[int, str]
    _calls: Counter[str]
    _known: KnownDraws
    dispatch: Callable[..., Any]
    """Calls a function of tensors as if the model had called it."""
    noisy: Callable[..., Tensor]
    """Returns the action's result for h."""

    def numbered(self, name: str) -> str:
        """Return a name; add a number to it if the pass has used the name before."""
        self._calls[name] += 1
        count = self._calls[name]
        return name if count == 1 else f"{name}#{count}"

    def next_draw_key(self) -> str | None:
        """Return the key of the current random draw; None if it is known not to be a mask."""
        key = self.numbered(f"{running_path(self._module_paths)}.random".lstrip("."))
        mask = key not in self._known.not_masks
        self.mask_draws[key] = False if mask else None
        return key if mask else None

    def rule_out(self, key: str, draw: MaskOrigin | None = None) -> None:
        """Store that a draw did not work as a mask; see :meth:`KnownDraws.rule_out`."""
        self._known.rule_out(key, draw)

    def drops_at_one(self, key: str, default: bool) -> bool:
        """Return whether a mask drops where it is 1.

        If its uses do not show it, this is ``default``: whether 1 is its less probable value.
        """
        self.mask_draws[key] = self._known.drops_at_one.get(key, default)
        return bool(self.mask_draws[key])

    def is_module_drop(self, key: str) -> bool:
        """Return whether a random branch blends two outputs of the enclosing module."""
        return key in self._known.module_drops

    def progress(self) -> tuple[int, int]:
        """Return how many sites and draws the pass has seen so far."""
        return len(self.sites), len(self.mask_draws)

    def record_mask(self, key: str, draw: MaskOrigin) -> None:
        """Store how a draw became a mask."""
        self.mask_origins[key] = draw._replace(site=self.sites[-1].name)

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
        return {"kind": kind, "mask": mask_structure(shape, self.batch), "label": kind}

    def _kind_by_name(self) -> str:
        """Return the kind of a mask from the names of the functions and modules that make it."""
        for frame in frames():
            owner = frame.f_locals.get("self")
            for name in (frame.f_code.co_name, type(owner).__name__):
                plain = name.replace("_", "").lower()
                kind = next((k for k, words in KINDS.items() if plain.endswith(words)), None)
                if kind is not None:
                    return kind
            if isinstance(owner, nn.Module) and id(owner) in self._module_paths:
                break
        return "mask"

    def uniform(
        self,
        fill: Callable[[float], Tensor],
        draw: Callable[[], Tensor],
        *,
        target: Tensor | None = None,
        low: float = 0.0,
        high: float = 1.0,
    ) -> Any:
        """Return uniform numbers that may become a mask; ``target`` is filled by an in-place draw."""
        key, given = self._next(fill)
        if given is not None:
            given = given * (high - low) + low
            return given if target is None else target.copy_(given)
        if key is None or not high > low:
            return draw()
        if target is None:
            return Uniform(self, key, fill, draw)  # type: ignore[arg-type]
        width = high - low
        value = Uniform(self, key, fill, lambda: (draw() - low) / width, width, low)  # type: ignore[arg-type]
        value.target = target
        return self._alias(target, value)

    def _next(self, fill: Callable[[float], Tensor]) -> tuple[str | None, Tensor | None]:
        """Return the key of the current draw, None if it is not a mask, and its numbers if given."""
        if self._replay is not None and not self._replay.begun:
            self._replay.begun = True
            return self._replay.key, None
        key = self.next_draw_key()
        return key, None if key is None or self.forced_draws is None else self.forced_draws(
            key, fill
        )

    def bernoulli(
        self,
        fill: Callable[[float], Tensor],
        draw: Callable[[], Tensor],
        probability: float | None,
        dtype: torch.dtype,
        *,
        target: Tensor | None = None,
    ) -> Any:
        """Return zeros and ones, 1 with probability ``probability`` (None if it varies)."""
        certain = probability is not None and not 0.0 < probability < 1.0
        key, given = (None, None) if certain else self._next(fill)
        if given is not None:
            given = given.to(dtype)
            return given if target is None else target.copy_(given)
        if key is None or probability is None:
            return draw()
        made = self.mask(key, fill, probability, dtype=dtype, threshold=None, below=True)
        return made if target is None else self._alias(target, made)

    def mask(
        self,
        key: str,
        fill: Callable[[float], Tensor],
        probability: float,
        *,
        dtype: torch.dtype,
        threshold: float | None,
        below: bool,
        moved: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Mask:
        """Return the mask that is 1 with probability ``probability``, a site with h = keep·ones."""
        drops_at_one = self.drops_at_one(key, probability < 0.5 or (probability == 0.5 and below))
        draw = MaskOrigin(threshold, below, drops_at_one)
        p = round(probability if drops_at_one else 1.0 - probability, 12)

        def make(kind: str | None) -> Tensor:
            h = fill(1.0 - p)
            with self.enable_grad():
                soft = self.noisy(h, p, **self.site_options(h.shape, kind))
                made = draw._replace(single=h.numel() == 1, branch=kind is not None)
                self.record_mask(key, made)
                return moved(self.dispatch(torch.rsub, soft, 1.0) if drops_at_one else soft)

        like = moved(fill(0.0)) if dtype == torch.bool else None
        mask = Mask(self, key, make, dtype, draw, like=like)  # type: ignore[arg-type]
        if like is None or like.numel() != 1:
            mask.value()  # a single bool may be a branch, which has another kind
        return mask

    def enable_grad(self) -> AbstractContextManager[Any]:
        """Enable gradients if the pass has them: models often make masks under ``no_grad``."""
        return torch.set_grad_enabled(self.grad_enabled or torch.is_grad_enabled())

    def _alias(self, target: Tensor, value: RandomValue) -> RandomValue:
        """Use ``value`` wherever the model uses ``target``, the tensor that it filled in place."""
        if not torch.compiler.is_compiling():
            known = self._filled_tensors or {}
            self._filled_tensors = {k: v for k, v in known.items() if v[0]() is not None}
            self._filled_tensors[id(target)] = (TensorWeakRef(target), value)
        return value

    def forget(self, target: Tensor) -> None:
        """Treat a tensor that was filled in place as an ordinary one from now on."""
        if self._filled_tensors is not None:
            self._filled_tensors.pop(id(target), None)

    def with_random_values(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Replace tensors that were filled in place by their random values; None if there are none."""
        aliases = self._filled_tensors
        if aliases is None or func in META:
            return None

        def look(x: Any) -> Any:
            found = aliases.get(id(x))
            return found[1] if found is not None and found[0]() is x else x

        if not any(look(x) is not x for x in leaves_of((args, kwargs))):
            return None
        self.reads_filled_tensor = True
        return map_leaves(args, look), map_leaves(kwargs, look)

    def track_modules(self) -> ModuleTracker:
        """Start to track the modules that the pass calls."""
        if self._tracker is None:
            self._tracker = ModuleTracker(self)
        return self._tracker

    def branch(self, mask: Mask) -> bool:
        """Return the value of ``if mask:`` that drops nothing; both branches are blended later."""
        if self._replay is not None and self._replay.key == mask.key:
            return not mask.keeps
        if mask.key not in self._branched:
            tracker = self.track_modules()
            tracker.check()
            enclosing = self.is_module_drop(mask.key)
            value = mask.value("module-drop" if enclosing else "layer-drop")
            if value.numel() != 1:
                raise mask.refuse("a branch on many values")
            factor = value if mask.keeps else self.dispatch(torch.rsub, value, 1.0)
            self._branched |= {mask.key}
            module = tracker.running[-1] if enclosing else None
            tracker.blends.append(
                Blend(mask, factor) if module is None else EnclosingBlend(mask, factor, *module)
            )
        return mask.keeps

    def replay(self, mask: Mask, run: Callable[[], H]) -> H:
        """Run a part of the pass again with the value of the condition that drops; return its output.

        Raises:
            NotAMask: if that part has its own sites or draws.
        """
        before = self.progress()
        self._replay = replay = Replay(mask.key)
        try:
            output = run()
        finally:
            self._replay = None
        if not replay.begun or self.progress() != before:
            raise mask.refuse("a branch around other random numbers", branch=True)
        return output


SHARED = "shared by all examples"


def mask_structure(shape: Sequence[int], batch: int | None = None) -> str:
    """Return in words which entries share one value of a mask of that shape.

    ``batch`` is the number of examples, if it is known.
    """
    if tuple(shape) in ((), (1,)) or (batch != 1 and all(n == 1 for n in shape)):
        return "per batch"
    if batch is not None and shape[0] % batch:
        return SHARED
    own = [d for d in range(1, len(shape)) if shape[d] != 1]
    if len(shape) == 1 or len(own) == len(shape) - 1:
        return "independent"
    if not own:
        return "per example"
    if own == [1]:
        return "per token" if len(shape) == 3 else "per channel"
    if own == [len(shape) - 1]:
        return "per feature"
    return "same for all channels"
