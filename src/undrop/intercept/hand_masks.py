"""The part of an interception that follows random masks which a model makes by hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from undrop.intercept.branches import Blend, BlendAround
from undrop.intercept.mask_functions import META
from undrop.intercept.random_values import Mask, RandomValue, Uniform, leaves_of, replaced

H = TypeVar("H")


@dataclass
class KnownDraws:
    """What is known about the random draws of a model, by key."""

    others: set[str] = field(default_factory=set)
    """Draws that are no masks."""
    drops: dict[str, bool] = field(default_factory=dict)
    """Whether a mask drops where it is 1, as far as its uses say so."""
    around: set[str] = field(default_factory=set)
    """Branches that are blended around the module that asks, not around the next one."""

    def refused(self, key: str, branch: bool = False) -> None:
        """Take a draw for no mask; a branch is tried around its own module first."""
        (self.around if branch and key not in self.around else self.others).add(key)


_KNOWN: weakref.WeakKeyDictionary[nn.Module, KnownDraws] = weakref.WeakKeyDictionary()


def known_draws(model: nn.Module) -> KnownDraws:
    """Return what is known about the random draws of a model."""
    while isinstance(model, DistributedDataParallel) or "_orig_mod" in model._modules:
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod  # type: ignore[assignment]
    return _KNOWN.setdefault(model, KnownDraws())


class MaskDraw(NamedTuple):
    """How a draw became a mask: it is 1 where U is below (or above) the threshold."""

    threshold: float | None
    """None for a draw that is 0 or 1 by itself."""
    below: bool
    likely: bool
    """Whether 1 is the more probable value."""
    flipped: bool = False
    """Whether the site is 1 - mask."""
    site: str = ""
    """The name of its site."""
    branch: bool = False
    """Whether it decides a branch."""

    def number(self, one: bool) -> float:
        """Return a number that the mask is 1 of, or 0."""
        if self.threshold is None:
            return float(one)
        return self.threshold / 2 if one == self.below else (1.0 + self.threshold) / 2


class Given(Protocol):
    """Gives a pass the real numbers of some draws."""

    def real(self, key: str, fill: Callable[[float], Tensor]) -> Tensor | None:
        """Return the numbers of a draw, or None to leave it to the pass."""
        ...


class HandMasks:
    """Follows random values from their draw to their use; :class:`Interception` is one."""

    gradients: bool
    """Whether the pass has gradients."""
    drew: bool
    given: Given | None = None
    aliased = False
    """Whether the pass has used a tensor that was drawn in place, by its own name."""
    _aliases: dict[int, tuple[TensorWeakRef, RandomValue]] | None = None
    _blend: Blend | None = None
    _branched: frozenset[str] = frozenset()
    _replay: float | None = None
    _watch: RemovableHandle | None = None
    uses: dict[str, set[bool]] | None = None
    """For each mask whether it drops where it is 1, by its uses; None if it is not recorded."""

    def next_draw(self) -> str | None:
        """Return the key of the draw that happens now; None if it is no mask."""
        raise NotImplementedError

    def not_a_mask(self, key: str, branch: bool = False) -> None:
        """Remember that a draw is no mask, or no branch around the next module."""
        raise NotImplementedError

    def drops(self, key: str, chance: float, otherwise: bool) -> bool:
        """Return whether a mask, which is 1 with that chance, drops where it is 1."""
        raise NotImplementedError

    def around(self, key: str) -> bool:
        """Return whether a branch is blended around the module that asks."""
        raise NotImplementedError

    def position(self) -> tuple[int, int]:
        """Return how many sites and draws the pass has met."""
        raise NotImplementedError

    def resume(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function of tensors as if the model had called it."""
        raise NotImplementedError

    def noisy(self, h: Tensor, p: float, **how: Any) -> Tensor:
        """Return what the action makes of h."""
        raise NotImplementedError

    def described(self, shape: Sequence[int], kind: str | None) -> dict[str, Any]:
        """Return the kind, mask structure and label of a mask's site."""
        raise NotImplementedError

    def met_mask(self, key: str, draw: MaskDraw) -> None:
        """Note how a draw became a mask."""

    def uniform(
        self,
        fill: Callable[[float], Tensor],
        draw: Callable[[], Tensor],
        *,
        target: Tensor | None = None,
        low: float = 0.0,
        high: float = 1.0,
    ) -> Any:
        """Return uniform numbers that may become a mask; ``target`` holds them if drawn in place."""
        key, given = self._next(fill)
        if given is not None:
            given = given * (high - low) + low
            return given if target is None else target.copy_(given)
        if key is None or not high > low:
            self.drew = True
            return draw()
        if target is None:
            return Uniform(self, key, fill, draw)  # type: ignore[arg-type]
        width = high - low
        value = Uniform(self, key, fill, lambda: (draw() - low) / width, width, low)  # type: ignore[arg-type]
        value.target = target
        return self._known_as(target, value)

    def _next(self, fill: Callable[[float], Tensor]) -> tuple[str | None, Tensor | None]:
        """Return the key of the draw that happens now (None: no mask), and its numbers if given."""
        if self._replay is not None:
            number, self._replay = self._replay, None
            return None, fill(number)
        key = self.next_draw()
        return key, None if key is None or self.given is None else self.given.real(key, fill)

    def bernoulli(
        self,
        fill: Callable[[float], Tensor],
        draw: Callable[[], Tensor],
        chance: float | None,
        dtype: torch.dtype,
        *,
        target: Tensor | None = None,
    ) -> Any:
        """Return zeros and ones that are 1 with probability ``chance`` (None: it has no one value)."""
        certain = chance is not None and not 0.0 < chance < 1.0
        key, given = (None, None) if certain else self._next(fill)
        if given is not None:
            given = given.to(dtype)
            return given if target is None else target.copy_(given)
        if key is None or chance is None:
            self.drew = self.drew or not certain
            return draw()
        made = self.mask(key, fill, chance, dtype=dtype, threshold=None, below=True)
        return made if target is None else self._known_as(target, made)

    def mask(
        self,
        key: str,
        fill: Callable[[float], Tensor],
        chance: float,
        *,
        dtype: torch.dtype,
        threshold: float | None,
        below: bool,
        moved: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Mask:
        """Return the mask that is 1 with probability ``chance``: the site of h = keep·ones."""
        likely = chance > 0.5 or (chance == 0.5 and not below)
        flipped = self.drops(key, chance, not likely)
        draw = MaskDraw(threshold, below, likely, flipped)
        p = round(chance if flipped else 1.0 - chance, 12)

        def make(kind: str | None) -> Tensor:
            h = fill(1.0 - p)
            with torch.set_grad_enabled(self.gradients or torch.is_grad_enabled()):
                soft = self.noisy(h, p, **self.described(h.shape, kind))
                self.met_mask(key, draw._replace(branch=kind is not None))
                return moved(self.resume(torch.rsub, (soft, 1.0), {}) if flipped else soft)

        like = moved(fill(0.0)) if dtype == torch.bool else None
        made = Mask(self, key, make, dtype, likely=likely, like=like)  # type: ignore[arg-type]
        made.unlikely = draw.number(not likely)
        if like is None or like.numel() != 1:
            made.value()  # a single bool may be a branch, which has another kind
        return made

    def _known_as(self, target: Tensor, value: RandomValue) -> RandomValue:
        """Recognise a tensor that was drawn in place, also where the model uses it by its name."""
        if not torch.compiler.is_compiling():
            known = self._aliases or {}
            self._aliases = {k: v for k, v in known.items() if v[0]() is not None}
            self._aliases[id(target)] = (TensorWeakRef(target), value)
        return value

    def forget(self, target: Tensor) -> None:
        """Take a tensor that was drawn in place for an ordinary one."""
        if self._aliases is not None:
            self._aliases.pop(id(target), None)

    def unaliased(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments with random values in the place of tensors drawn in place, if any."""
        aliases = self._aliases
        if aliases is None or func in META:
            return None

        def look(x: Any) -> Any:
            found = aliases.get(id(x))
            return found[1] if found is not None and found[0]() is x else x

        if not any(look(x) is not x for x in leaves_of((args, kwargs))):
            return None
        self.aliased = True
        return replaced(args, look), replaced(kwargs, look)

    def watch_modules(self) -> None:
        """Let every module look for hooks at its end: one that asks for a branch gets its hook late."""
        self._watch = register_module_forward_pre_hook(lambda module, args: None)

    def branch(self, mask: Mask) -> bool:
        """Answer ``if mask:`` with the more probable branch, and blend it with the other one."""
        if mask.key not in self._branched:
            self.settle()
            around = self.around(mask.key)
            value = mask.value("module-drop" if around else "layer-drop")
            if value.numel() != 1:
                raise mask.refuse("a branch on many values")
            factor = value if mask.likely else self.resume(torch.rsub, (value, 1.0), {})
            self._branched |= {mask.key}
            self._blend = (BlendAround if around else Blend)(mask, factor)
        return mask.likely

    def blended(self, blend: Blend) -> None:
        """Note that a branch has found its module."""
        self._blend = None

    def replayed(self, mask: Mask, run: Callable[[], H]) -> H:
        """Return what a part of the pass returns in the less probable branch.

        Raises:
            NotAMask: if that part has sites or draws of its own.
        """
        before, self._replay = self.position(), mask.unlikely
        try:
            output = run()
        finally:
            unused, self._replay = self._replay is not None, None
        if unused or self.position() != before:
            raise mask.refuse("a branch around other random numbers", branch=True)
        return output

    def settle(self, failed: bool = False) -> None:
        """Refuse a branch that no module followed.

        Raises:
            NotAMask: unless the pass has failed anyway.
        """
        blend, self._blend = self._blend, None
        if blend is not None:
            blend.remove()
            refusal = blend.mask.refuse("a branch that no module follows", branch=True)
            if not failed:
                raise refusal


SHARED = "shared by all examples"


def structure(shape: Sequence[int], batch: int | None = None) -> tuple[str, bool]:
    """Return which entries share a mask of that shape, in words, and whether each example has its own.

    Args:
        shape: the shape of the mask.
        batch: the number of examples, where it is known.
    """
    if tuple(shape) in ((), (1,)) or (batch != 1 and all(n == 1 for n in shape)):
        return "per batch", False
    if batch is not None and shape[0] % batch:
        return SHARED, False
    own = [d for d in range(1, len(shape)) if shape[d] != 1]
    if len(shape) == 1 or len(own) == len(shape) - 1:
        return "independent", True
    if not own:
        return "per example", True
    if own == [1]:
        return ("per token" if len(shape) == 3 else "per channel"), True
    if own == [len(shape) - 1]:
        return "per feature", True
    return "same for all channels", True
