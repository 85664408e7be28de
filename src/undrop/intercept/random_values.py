"""Values that a model gets in place of random tensors while it makes a mask by hand.

A mask of zeros and ones is a site. In place of a mask with keep probability k, undrop computes with the
tensor m = k·(1 + ε·σ·η) of the same shape. The model may scale m, and multiply any tensor by it.

A model makes a mask in several calls, such as ``(keep + torch.rand(shape)).floor_()`` or
``torch.rand(shape) < p``. The first call returns a :class:`Uniform`, whose numbers are not drawn yet,
and the last call returns a :class:`Mask`. Both behave like tensors. If the model does anything else with
a :class:`Uniform`, undrop draws its numbers, and the draw is not a site.
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

Transform = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function that rearranges or casts the entries of a tensor, and its arguments after the tensor."""


class MaskOrigin(NamedTuple):
    """How a random draw U becomes a mask, which is 1 where U is below (or above) a threshold."""

    threshold: float | None
    """None for a draw of zeros and ones."""
    below: bool
    """Whether the mask is 1 below the threshold."""
    drops_at_one: bool
    """Whether the mask drops where it is 1; then the site is 1 - mask."""
    single_value: bool = False
    """Whether the mask has one value for the whole batch."""
    site_name: str = ""
    decides_branch: bool = False
    """Whether the mask is the condition of an ``if``."""

    def number_for(self, one: bool) -> float:
        """Return a random number for which the mask is 1, or one for which it is 0."""
        if self.threshold is None:
            return float(one)
        return self.threshold / 2 if one == self.below else (1.0 + self.threshold) / 2


class NotAMask(UnsupportedDropoutError):
    """A model uses a mask in a way that is not multiplication by noise."""


class RandomValue:
    """Replaces a random tensor in a pass; the interception handles every function that uses it."""

    def __init__(self, mode: Interception, key: str) -> None:
        self.mode = mode
        self.key = key

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Handle a function that is called while the interception is inactive, as inside a rule."""
        owner = next(x for x in leaves_of((args, kwargs or {})) if isinstance(x, RandomValue))
        return owner.mode.handle_random_values(func, types, args, kwargs or {})

    def template(self) -> Tensor:
        """Return a tensor of the same shape, type and device."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the template."""
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return getattr(self.template(), name)

    def __len__(self) -> int:
        return len(self.template())

    def __hash__(self) -> int:
        return id(self)

    def __float__(self) -> float:
        return float(_method("__float__")(self))

    def __int__(self) -> int:
        return int(_method("__int__")(self))

    def __bool__(self) -> bool:
        return bool(_method("__bool__")(self))


class Uniform(RandomValue):
    """a·U + b, where U is uniform on (0, 1) and not drawn yet; ``scale`` is a, and ``shift`` is b.

    ``full(k)`` returns a tensor of the draw's shape, type and device in which every entry is k.
    ``draw_numbers`` draws U.
    """

    def __init__(
        self,
        mode: Interception,
        key: str,
        full: Callable[[float], Tensor],
        draw_numbers: Callable[[], Tensor],
        scale: float = 1.0,
        shift: float = 0.0,
    ) -> None:
        super().__init__(mode, key)
        self.full, self.draw_numbers = full, draw_numbers
        self.scale, self.shift = scale, shift
        self.transforms: list[Transform] = []
        """The functions that the model has applied to the draw, except for scale and shift."""
        self.numbers: Tensor | None = None
        """The random numbers, once they are drawn."""
        self.target: Tensor | None = None
        """The tensor that the model fills in place, if it fills one."""
        self.replacement: Mask | Tensor | None = None
        """The result of an in-place function, which the model sees in place of this value."""

    def template(self) -> Tensor:
        """Return zeros of the same shape, or the numbers themselves once they are drawn."""
        if self.replacement is not None:
            out = self.replacement
            return out.template() if isinstance(out, Mask) else out
        return self.transform(self.full(0.0)) if self.numbers is None else self.numbers

    def transform(self, x: Tensor) -> Tensor:
        """Apply to x the functions that the model has applied to the draw."""
        for function, args, kwargs in self.transforms:
            x = self.mode.dispatch(function, x, *args, **kwargs)
        return x

    def materialize(self) -> Tensor:
        """Draw the numbers. From then on, this is an ordinary tensor and not a site."""
        if self.numbers is None:
            numbers = self.draw_numbers() * self.scale + self.shift
            if self.target is not None:
                numbers = self.target.copy_(numbers)
                self.mode.forget_filled_tensor(numbers)
            self.numbers = self.transform(numbers)
        return self.numbers

    def affine(self, scale: float, shift: float, inplace: bool) -> Uniform:
        """Return scale·x + shift, where x is this value, in place or as a new value."""
        out = self if inplace else Uniform(self.mode, self.key, self.full, self.draw_numbers)
        out.transforms = self.transforms
        out.scale, out.shift = scale * self.scale, scale * self.shift + shift
        return out

    def with_transform(self, transform: Transform) -> Uniform:
        """Return this value with one more function applied to it."""
        out = self.affine(1.0, 0.0, inplace=False)
        out.transforms = [*self.transforms, transform]
        return out

    def compare(self, value: float, below: bool) -> tuple[float, float, bool]:
        """Return the probability of x < value (or x > value), and a threshold for U.

        The last result says whether the comparison is U < threshold, not U > threshold.
        """
        threshold = (value - self.shift) / self.scale
        below = below if self.scale > 0.0 else not below
        cdf = min(max(threshold, 0.0), 1.0)
        return (cdf if below else 1.0 - cdf), threshold, below


class Mask(RandomValue):
    """A random mask m = k·(1 + ε·σ·η), or a smooth function of masks alone.

    Args:
        mode: the interception of the pass.
        key: the key of the random draw.
        compute: returns the value m from the kind of the site; it is called when m is first needed.
        dtype: the type that the model sees.
        origin: how the draw becomes the mask.
        template: has the shape and device of m until m is computed.
    """

    def __init__(
        self,
        mode: Interception,
        key: str,
        compute: Callable[[str | None], Tensor],
        dtype: torch.dtype,
        origin: MaskOrigin,
        template: Tensor | None = None,
    ) -> None:
        super().__init__(mode, key)
        self._template = template
        self._compute: Callable[[str | None], Tensor] | None = compute
        self.dtype = dtype
        self.origin = origin
        self.binary = True
        """Whether the model's own mask is 0 or 1 everywhere."""
        self.keeps_at_one = not origin.drops_at_one
        """Whether the site keeps h where this mask is 1."""
        self.is_large = False
        """Whether the model has multiplied the mask by a large number, perhaps to add it to scores."""
        self._value: Tensor | None = None

    def value(self, kind: str | None = None) -> Tensor:
        """Return m; the first call decides the kind of the site."""
        if self._value is None:
            assert self._compute is not None
            self._value = self._compute(kind)
            self._compute = None
        return self._value

    def template(self) -> Tensor:
        """Return a tensor of the same shape, type and device."""
        value = self._template if self._value is None else None
        value = self.value() if value is None else value
        return value if value.dtype == self.dtype else value.detach().to(self.dtype)

    def derive(self, value: Tensor, dtype: torch.dtype | None = None) -> Mask:
        """Return a mask whose value is a function of this mask."""
        out = Mask(self.mode, self.key, lambda _: value, dtype or self.dtype, self.origin)
        out.binary, out.keeps_at_one, out.is_large = self.binary, self.keeps_at_one, self.is_large
        return out

    def record_use(self, *, drops_at_one: bool) -> None:
        """Record that the model uses the mask to drop entries where it is 1, or where it is 0."""
        if self.mode.mask_uses is not None:
            negated = (
                self.keeps_at_one == self.origin.drops_at_one
            )  # the draw's mask is 1 - this one
            self.mode.mask_uses.setdefault(self.key, set()).add(drops_at_one != negated)

    def assign(self, other: Mask) -> Mask:
        """Take over the value of another mask, as an in-place function does."""
        self._value, self._compute = other.value(), None
        self.binary, self.keeps_at_one = other.binary, other.keeps_at_one
        return self

    def refuse(self, use: str, *, branch: bool = False) -> NotAMask:
        """Rule the draw out, and return the error for a use of its mask that undrop can't follow."""
        self.mode.rule_out(self.key, self.origin._replace(decides_branch=branch))
        return NotAMask(
            f"the random mask at {self.key!r} is used in {use}, where undrop can't replace it by "
            "noise, so it is no longer a site: call again."
        )


def _method(name: str) -> Callable[..., Any]:
    """Return a method that passes its call to the active interception."""
    # torch.compile recognizes functions in C++ by identity, but Tensor.__rsub__ is in Python.
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
    """Return the arguments of a function, including those within lists, tuples and dictionaries."""
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in leaves_of(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in leaves_of(item)]
    return [tree]


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return the arguments of a function with ``function`` applied to each leaf."""
    if isinstance(tree, list):
        return [map_leaves(item, function) for item in tree]
    if isinstance(tree, tuple):
        return tuple([map_leaves(item, function) for item in tree])
    if isinstance(tree, dict):
        return {key: map_leaves(item, function) for key, item in tree.items()}
    return function(tree)
