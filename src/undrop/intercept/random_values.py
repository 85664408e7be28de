"""The values that a model gets in place of random tensors while it makes a mask by hand.

A mask of zeros and ones is a site. With keep probability k, its soft value is m = k·(1 + ε·σ·η) in the
mask's own shape, whatever it is multiplied with and however it is scaled. A model makes a mask in steps,
such as ``(keep + torch.rand(shape)).floor_()`` or ``torch.rand(shape) < p``. Between the steps it holds
a :class:`Uniform`, whose numbers are not drawn yet, and at the end a :class:`Mask`. Both behave like
tensors. A step that does not lead to a mask gets real random numbers, and then the draw is not a site.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from undrop.errors import UnsupportedDropoutError

if TYPE_CHECKING:
    from undrop.intercept.interception import Interception

Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function that moves entries or casts them, with its further arguments."""


class MaskOrigin(NamedTuple):
    """How a draw became a mask: it is 1 where U is below (or above) the threshold."""

    threshold: float | None
    """None for a draw that is 0 or 1 by itself."""
    below: bool
    drops_at_one: bool
    """Whether the mask drops where it is 1: then the site is 1 - mask."""
    single: bool = False
    """Whether it is one value for the whole batch."""
    site: str = ""
    """The name of its site."""
    branch: bool = False
    """Whether it decides a branch."""

    def number(self, one: bool) -> float:
        """Return a value of U for which the mask is 1, or 0."""
        if self.threshold is None:
            return float(one)
        return self.threshold / 2 if one == self.below else (1.0 + self.threshold) / 2


class NotAMask(UnsupportedDropoutError):
    """A mask was used in a way that is not multiplication by noise."""


class RandomValue:
    """Replaces a random tensor in a pass; the interception evaluates every function that uses it."""

    def __init__(self, mode: Interception, key: str) -> None:
        self.mode = mode
        self.key = key

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Evaluate a function that is called while the interception is off, as inside a rule."""
        owner = next(x for x in leaves_of((args, kwargs or {})) if isinstance(x, RandomValue))
        return owner.mode.handle_random_values(func, types, args, kwargs or {})

    def like(self) -> Tensor:
        """Return a tensor of the same shape, type and device."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of a tensor like this one."""
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return getattr(self.like(), name)

    def __len__(self) -> int:
        return len(self.like())

    def __hash__(self) -> int:
        return id(self)

    def __float__(self) -> float:
        return float(_method("__float__")(self))

    def __int__(self) -> int:
        return int(_method("__int__")(self))

    def __bool__(self) -> bool:
        return bool(_method("__bool__")(self))


class Uniform(RandomValue):
    """a·U + b with U uniform on (0, 1), not drawn yet; ``scale`` is a, and ``shift`` is b.

    ``fill`` returns a tensor with one value in the shape, type and device of the draw; ``draw`` draws U.
    """

    def __init__(
        self,
        mode: Interception,
        key: str,
        fill: Callable[[float], Tensor],
        draw: Callable[[], Tensor],
        scale: float = 1.0,
        shift: float = 0.0,
    ) -> None:
        super().__init__(mode, key)
        self.fill, self.draw = fill, draw
        self.scale, self.shift = scale, shift
        self.steps: list[Step] = []
        self.drawn: Tensor | None = None
        self.target: Tensor | None = None
        """The tensor that the model fills in place, if it does."""
        self.became: Any = None
        """The mask that an in-place function made of this value."""

    def like(self) -> Tensor:
        """Return zeros of the same shape, or the numbers themselves once they are drawn."""
        if self.became is not None:
            return self.became.like() if isinstance(self.became, Mask) else self.became
        return self.moved(self.fill(0.0)) if self.drawn is None else self.drawn

    def moved(self, x: Tensor) -> Tensor:
        """Return x after the steps that the draw has gone through."""
        for function, args, kwargs in self.steps:
            x = self.mode.dispatch(function, x, *args, **kwargs)
        return x

    def materialize(self) -> Tensor:
        """Draw the numbers. After that, this is an ordinary tensor and not a site."""
        if self.drawn is None:
            drawn = self.draw() * self.scale + self.shift
            if self.target is not None:
                drawn = self.target.copy_(drawn)
                self.mode.forget(drawn)
            self.drawn = self.moved(drawn)
        return self.drawn

    def affine(self, scale: float, shift: float, inplace: bool) -> Uniform:
        """Return scale·x + shift, in place or not."""
        made = self if inplace else Uniform(self.mode, self.key, self.fill, self.draw)
        made.steps = self.steps
        made.scale, made.shift = scale * self.scale, scale * self.shift + shift
        return made

    def after(self, step: Step) -> Uniform:
        """Return the draw after one more step."""
        made = self.affine(1.0, 0.0, False)
        made.steps = [*self.steps, step]
        return made

    def split_at(self, value: float, below: bool) -> tuple[float, float, bool]:
        """Return P(x < value) or P(x > value), and the same event in terms of U: threshold, below."""
        threshold = (value - self.shift) / self.scale
        below = below if self.scale > 0.0 else not below
        share = min(max(threshold, 0.0), 1.0)
        return (share if below else 1.0 - share), threshold, below


class Mask(RandomValue):
    """A random mask m = k·(1 + ε·σ·η), or a smooth function of masks alone.

    ``make`` computes the soft value when it is first needed; until then, ``like`` has its shape and
    device. ``dtype`` is the type that the model sees, ``draw`` says how the draw became a mask, and
    ``binary`` whether the real mask is 0 or 1 everywhere.
    """

    def __init__(
        self,
        mode: Interception,
        key: str,
        make: Callable[[str | None], Tensor],
        dtype: torch.dtype,
        draw: MaskOrigin,
        *,
        binary: bool = True,
        like: Tensor | None = None,
    ) -> None:
        super().__init__(mode, key)
        self._like = like
        self.make: Callable[[str | None], Tensor] | None = make
        self.dtype = dtype
        self.draw, self.binary = draw, binary
        self.keeps = not draw.drops_at_one
        """Whether the mask is 1 where the site keeps h."""
        self.large = False
        """Whether it is multiplied by a large number, like a mask that is added to scores."""
        self._value: Tensor | None = None

    def value(self, kind: str | None = None) -> Tensor:
        """Return the soft value."""
        if self._value is None:
            assert self.make is not None
            self._value = self.make(kind)
            self.make = None
        return self._value

    def like(self) -> Tensor:
        """Return a tensor of the same shape, type and device."""
        value = self._like if self._value is None and self._like is not None else self.value()
        return value if value.dtype == self.dtype else value.detach().to(self.dtype)

    def derived(
        self, value: Tensor, dtype: torch.dtype | None = None, binary: bool | None = None
    ) -> Mask:
        """Return a mask with another value that is computed from this one."""
        made = Mask(
            self.mode,
            self.key,
            lambda _: value,
            dtype or self.dtype,
            self.draw,
            binary=self.binary if binary is None else binary,
        )
        made.keeps, made.large = self.keeps, self.large
        return made

    def used(self, *, drops: bool) -> None:
        """Record whether a use of this mask drops entries where it is 1, or where it is 0."""
        if self.mode.uses is not None:
            self.mode.uses.setdefault(self.key, set()).add(drops != self.keeps)

    def become(self, other: Mask) -> Mask:
        """Take over the value of another mask, as an in-place function does."""
        self._value, self.make = other.value(), None
        self.binary, self.keeps = other.binary, other.keeps
        return self

    def refuse(self, use: str, branch: bool = False) -> NotAMask:
        """Return the error for a use that undrop can't follow; the draw may stop being a mask."""
        self.mode.rule_out(self.key, self.draw._replace(branch=branch))
        return NotAMask(
            f"the random mask at {self.key!r} is used in {use}, where undrop can't replace it by "
            "noise, so it is no longer a site: call again."
        )


def _method(name: str) -> Callable[..., Any]:
    # torch.compile knows functions implemented in C++ by their identity, and Tensor.__rsub__ is Python.
    function: Any = torch.rsub if name == "__rsub__" else getattr(Tensor, name)

    def method(self: RandomValue, *args: Any, **kwargs: Any) -> Any:
        return handle_torch_function(function, (self,), self, *args, **kwargs)

    method.__name__ = name
    return method


_OPERATORS = """add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv
    rfloordiv mod pow rpow neg abs invert and rand iand or ror ior xor rxor matmul rmatmul lt le gt ge
    eq ne getitem setitem"""

for _name in (
    *(f"__{name}__" for name in _OPERATORS.split()),
    *(n for n in dir(Tensor) if not n.startswith("_") and callable(getattr(Tensor, n))),
):
    if hasattr(Tensor, _name):
        setattr(RandomValue, _name, _method(_name))


def leaves_of(tree: Any) -> list[Any]:
    """Return the arguments of a function, including those within lists and dictionaries."""
    if isinstance(tree, (list, tuple)):
        return [leaf for each in tree for leaf in leaves_of(each)]
    if isinstance(tree, dict):
        return [leaf for each in tree.values() for leaf in leaves_of(each)]
    return [tree]


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return arguments with ``function`` applied to each of them."""
    if isinstance(tree, list):
        return [map_leaves(each, function) for each in tree]
    if isinstance(tree, tuple):
        return tuple([map_leaves(each, function) for each in tree])
    if isinstance(tree, dict):
        return {key: map_leaves(each, function) for key, each in tree.items()}
    return function(tree)
