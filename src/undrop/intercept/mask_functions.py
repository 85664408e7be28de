"""Functions of random values: those that make a mask of a draw, and those that use a mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.intercept.random_values import Mask, RandomValue, Uniform, leaves_of, map_leaves

if TYPE_CHECKING:
    from undrop.intercept.interception import Interception

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
R = TypeVar("R", bound=RandomValue)


class _Call(NamedTuple):
    """A function of random values, with its arguments."""

    func: Callable[..., Any]
    operation: str
    """The operation that the function performs; "" if masks do not use it."""
    inplace: bool
    args: _Args
    kwargs: _Kwargs

    def leaves(self) -> list[Any]:
        """Return the arguments, including those within lists."""
        return leaves_of((self.args, self.kwargs))

    def with_each(self, function: Callable[[Any], Any]) -> _Call:
        """Return the call with the function applied to every argument."""
        args, kwargs = (map_leaves(tree, function) for tree in (self.args, self.kwargs))
        return _Call(self.func, self.operation, self.inplace, args, kwargs)

    def first_of(self, kind: type[R]) -> R | None:
        """Return the first argument of that kind."""
        # Older versions of torch.compile can't trace next() with a default.
        for leaf in self.leaves():
            if isinstance(leaf, kind):
                return leaf
        return None


_NAMES = {
    "add": "add __add__ __radd__ add_ __iadd__",
    "sub": "sub subtract __sub__ sub_ __isub__",
    "rsub": "rsub __rsub__",
    "mul": "mul multiply __mul__ __rmul__ mul_ __imul__",
    "div": "div divide true_divide __truediv__ div_ __itruediv__ __div__ __idiv__",
    "rdiv": "__rtruediv__ __rdiv__",
    "neg": "neg negative __neg__ neg_",
    "lt": "lt less __lt__ le less_equal __le__",
    "gt": "gt greater __gt__ ge greater_equal __ge__",
    "eq": "eq __eq__",
    "ne": "ne not_equal __ne__",
    "floor": "floor floor_ trunc",
    "not": "logical_not bitwise_not __invert__ logical_not_",
    "and": "logical_and bitwise_and __and__ __rand__ logical_and_ __iand__",
    "or": "logical_or bitwise_or __or__ __ror__ logical_or_ __ior__",
    "where": "where",
    "fill": "masked_fill masked_fill_",
    "set": "__setitem__",
    "cast": "to type type_as float double half bfloat16 bool long int short byte char cpu cuda",
    "meta": """size dim numel stride is_contiguous is_floating_point ndimension element_size is_complex
        get_device __len__ nelement storage_offset""",
    "item": "item",
    "branch": "__bool__",
    "move": """view reshape expand expand_as unsqueeze unsqueeze_ squeeze squeeze_ permute transpose t
        movedim flatten unflatten repeat contiguous clone detach broadcast_to view_as reshape_as
        swapaxes repeat_interleave tile flip narrow select pin_memory __getitem__ requires_grad_""",
    "smooth": """sum mean sqrt rsqrt reciprocal pow square exp log log1p clamp_min clamp __pow__ __rpow__
        __matmul__ __rmatmul__ matmul mm bmm cat stack concat lerp addcmul addcdiv copy_ where
        index_select gather index_add scatter_add cumprod prod einsum avg_pool1d avg_pool2d avg_pool3d
        linear conv1d conv2d conv3d interpolate softmax tanh sigmoid softplus""",
}
_LARGE = 1e3  # a value this large in place of dropped entries stands for minus infinity

_OPERATION: dict[Callable[..., Any], tuple[str, bool]] = {}
"""The operation that a function performs, and whether it works in place."""
_POOLS: dict[Callable[..., Any], tuple[int, Callable[..., Any]]] = {}


def _collect() -> None:
    for operation, names in _NAMES.items():
        for name in names.split():
            inplace = name.startswith("__i") and name != "__invert__"
            inplace = inplace or (name.endswith("_") and not name.endswith("__"))
            for owner in (Tensor, torch, F):
                function = getattr(owner, name, None)
                if function is not None:
                    _OPERATION.setdefault(function, (operation, inplace))
    for dims in (1, 2, 3):
        average = getattr(F, f"avg_pool{dims}d")
        for owner in (F, torch):
            for name in (f"max_pool{dims}d", f"max_pool{dims}d_with_indices"):
                function = getattr(owner, name, None)
                if function is not None:
                    _POOLS[function] = (dims, average)


_collect()
META = frozenset(
    [
        *(function for function, (operation, _) in _OPERATION.items() if operation == "meta"),
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_cuda", "is_sparse")),
    ]
)
"""Functions that read the shape, the type or the device of a tensor, but not its values."""


def evaluate(mode: Interception, func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    """Return the result of a function that has random values among its arguments."""
    operation, inplace = _OPERATION.get(func, ("", False))
    if operation == "meta":
        return func(args[0].like(), *args[1:], **kwargs)
    call = _Call(func, operation, inplace, args, kwargs).with_each(_latest)
    draw = call.first_of(Uniform)
    if draw is not None:
        found = _of_uniform(draw, call)
        if found is not NotImplemented:
            return found
        call = call.with_each(_drawn)
    mask = call.first_of(Mask)
    if mask is None:
        return mode.dispatch(func, *call.args, **call.kwargs)
    with mode.enable_grad():
        return _of_mask(mask, call)


def _latest(x: Any) -> Any:
    return x.became if isinstance(x, Uniform) and x.became is not None else x


def _drawn(x: Any) -> Any:
    return x.materialize() if isinstance(x, Uniform) else x


def _of_uniform(u: Uniform, call: _Call) -> Any:
    """Return the next step of a draw on its way to a mask, or NotImplemented."""
    if u.drawn is not None:
        return NotImplemented
    func, operation, inplace, args, kwargs = call
    first = args[0] is u
    if operation in ("move", "cast") and first and not inplace:
        if not any(isinstance(x, RandomValue) for x in leaves_of((args[1:], kwargs))):
            return u.after((func, args[1:], kwargs))
        return NotImplemented
    if operation == "item" and u.like().numel() == 1:
        return u  # compared later, in Python
    if operation == "neg":
        return u.affine(-1.0, 0.0, inplace)
    if operation == "floor":
        found = _floored(u)
        if inplace and found is not NotImplemented:
            u.became = found
        return found
    other = _constant(args[1] if first else args[0]) if len(args) == 2 and not kwargs else None
    if other is None:
        return NotImplemented
    if operation in ("lt", "gt"):
        probability, threshold, below = u.split_at(other, (operation == "lt") == first)
        return _mask(u, probability, threshold, below, torch.bool)
    scale, shift = _affine(operation, first, other)
    return NotImplemented if scale is None else u.affine(scale, shift, inplace)


def _affine(operation: str, first: bool, c: float) -> tuple[float | None, float]:
    """Return (a, b) with a·x + b the operation's result; a is None if it is not affine."""
    if operation == "add":
        return 1.0, c
    if operation == "mul" and c:
        return c, 0.0
    if operation == "div" and first and c:
        return 1.0 / c, 0.0
    if operation in ("sub", "rsub"):
        return (1.0, -c) if (operation == "sub") == first else (-1.0, c)
    return None, 0.0


def _constant(x: Any) -> float | None:
    """Return x as a number, if reading it does not wait for a device."""
    if isinstance(x, (int, float)):
        return float(x)
    plain = isinstance(x, Tensor) and not torch.compiler.is_compiling()
    if plain and x.numel() == 1 and x.device.type == "cpu" and not x.requires_grad:
        return float(x)
    return None


def _floored(u: Uniform) -> Any:
    """floor(keep + U) is 1 where U ≥ 1 - keep."""
    if u.scale != 1.0 or not 0.0 <= u.shift <= 1.0:
        return NotImplemented
    return _mask(u, u.shift, 1.0 - u.shift, False, u.like().dtype)


def _mask(u: Uniform, probability: float, threshold: float, below: bool, dtype: torch.dtype) -> Any:
    if not 0.0 < probability < 1.0:
        u.mode.idle_dropout(None, True)
        return u.moved(u.fill(probability)).to(dtype)
    return u.mode.mask(
        u.key, u.fill, probability, dtype=dtype, threshold=threshold, below=below, moved=u.moved
    )


def _of_mask(m: Mask, call: _Call) -> Any:
    """Return the result of a function of a mask; raise ``NotAMask`` for a use that can't be followed."""
    func, operation, inplace, args, kwargs = call
    first = args and args[0] is m
    if operation == "branch" and m.binary:
        return m.mode.branch(m)
    if operation == "move" and first and not inplace:
        return m.derived(m.mode.dispatch(func, m.value(), *args[1:], **kwargs))
    if operation == "cast" and first:
        return _cast(m, call)
    if func in _POOLS and first and m.binary:
        return _any_in_window(m, func, *args[1:], **kwargs)
    found = _of_zeros_and_ones(m, operation, args) if m.binary else NotImplemented
    if found is NotImplemented and operation in ("where", "fill", "set") and m.binary:
        return _chosen(m, operation, inplace, args, kwargs)
    if found is NotImplemented and operation in _ARITHMETIC:
        found = _computed(m, call)
    if found is NotImplemented:
        raise m.refuse(getattr(func, "__name__", str(func)))
    return m.become(found) if inplace and first and isinstance(found, Mask) else found


_ARITHMETIC = frozenset(("add", "sub", "rsub", "mul", "div", "rdiv", "neg", "smooth", "where"))


def _of_zeros_and_ones(m: Mask, operation: str, args: _Args) -> Any:
    """Return the mask that a logical function makes of zeros and ones."""
    value, dispatch = m.value(), m.mode.dispatch
    other = args[1] if len(args) > 1 and args[0] is m else args[0] if len(args) > 1 else None
    opposite = operation == "not"
    number = other if isinstance(other, (int, float)) else None
    if operation in ("eq", "ne") and number in (0, 1):
        opposite = (operation == "eq") == (number == 0)
    elif operation in ("lt", "gt") and number is not None and 0.0 <= number <= 1.0:
        opposite = (operation == "lt") == (args[0] is m)
    elif operation == "rsub" or (operation == "sub" and args[0] is not m):
        if number != 1:
            return NotImplemented
        opposite = True
    elif operation == "floor" or (operation in ("and", "or", "mul") and other is m):
        return m
    elif operation in ("and", "or") and isinstance(other, (Mask, Tensor)):
        b = other.value() if isinstance(other, Mask) else other.to(value.dtype)
        both = dispatch(torch.mul, value, b)
        if operation == "and":
            return m.derived(both)
        return m.derived(dispatch(torch.sub, dispatch(torch.add, value, b), both))
    elif operation != "not":
        return NotImplemented
    dtype = torch.bool if operation in ("eq", "ne", "lt", "gt") else m.dtype
    if not opposite:
        return m.derived(value, dtype)
    made = m.derived(dispatch(torch.rsub, value, 1.0), dtype)
    made.keeps = not m.keeps
    return made


def _cast(m: Mask, call: _Call) -> Any:
    """Return the mask in another type or on another device; its value stays a float."""
    value = m.value()
    sample = torch.empty((), dtype=m.dtype, device=value.device)
    given = call.with_each(lambda x: sample if x is m else x.like() if isinstance(x, Mask) else x)
    found = call.func(*given.args, **given.kwargs)
    if not isinstance(found, Tensor):  # the name of the type
        return found
    if not m.binary and not found.dtype.is_floating_point:
        raise m.refuse("a cast to whole numbers")
    how = {"dtype": found.dtype} if found.dtype.is_floating_point else {}
    if found.dtype != value.dtype or found.device != value.device:
        value = m.mode.dispatch(Tensor.to, value, device=found.device, **how)
    return m.derived(value, found.dtype)


def _any_in_window(
    m: Mask,
    func: Callable[..., Any],
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Mask:
    """Max pooling of zeros and ones is 1 - Π(1 - m) over each window, which is smooth (DropBlock)."""
    dims, average = _POOLS[func]
    if dilation not in (1, (1,) * dims, [1] * dims) or return_indices:
        raise m.refuse("max pooling with dilation or indices")
    sizes = (kernel_size,) * dims if isinstance(kernel_size, int) else tuple(kernel_size)
    dispatch = m.mode.dispatch
    logs = dispatch(torch.log1p, dispatch(torch.neg, m.value()))
    pooled = dispatch(average, logs, kernel_size, stride, padding, ceil_mode)
    none = dispatch(torch.exp, dispatch(torch.mul, pooled, float(math.prod(sizes))))
    return m.derived(dispatch(torch.rsub, none, 1.0))


def _chosen(m: Mask, operation: str, inplace: bool, args: _Args, kwargs: _Kwargs) -> Any:
    """where(m, a, b) = b + m·(a - b), and other ways to write it."""
    if kwargs or len(args) != 3:
        raise m.refuse(operation)
    dispatch = m.mode.dispatch
    if operation == "where":
        condition, a, b = args
    else:
        b, condition, a = args
    target = b
    if condition is not m or any(isinstance(x, RandomValue) for x in (a, b)):
        raise m.refuse(operation)
    for x in (a, b):
        if isinstance(x, (int, float)) and not abs(x) < _LARGE:
            raise m.refuse(f"a choice between a value and {x:g}")
    _note_choice(m, operation, a, b)
    value = m.value()
    if operation == "set":
        for _ in range(target.dim() - value.dim()):
            value = dispatch(torch.unsqueeze, value, -1)
    floating = next((x for x in (a, b) if isinstance(x, Tensor)), value)
    if not floating.is_floating_point():
        raise m.refuse("a choice between whole numbers")
    value = dispatch(Tensor.to, value, dtype=floating.dtype)
    if isinstance(b, (int, float)) and b == 0:
        out = dispatch(torch.mul, a, value)
    else:
        other = b.clone() if inplace or operation == "set" else b
        step = dispatch(torch.sub, a, other) if isinstance(a, Tensor) or a else -other
        out = dispatch(torch.add, other, dispatch(torch.mul, value, step))
    if inplace or operation == "set":
        return dispatch(Tensor.copy_, target, out)
    return out


def _note_choice(m: Mask, operation: str, a: Any, b: Any) -> None:
    """Note whether a choice of a where m = 1 and b where m = 0 drops at m = 1 or at m = 0."""
    if operation != "where":
        m.used(drops=True)
    elif m.mode.uses is not None:
        zeros = [x == 0 if isinstance(x, (int, float)) else not x.any() for x in (a, b)]
        if zeros[0] != zeros[1]:
            m.used(drops=zeros[0])


def _computed(m: Mask, call: _Call) -> Any:
    """Apply a smooth function to soft values; the result of masks and constants is a mask again."""
    func, operation, leaves = call.func, call.operation, call.leaves()
    floats = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    dtype = floats[0].dtype if floats else torch.get_default_dtype()

    def soft(x: Any) -> Any:
        if not isinstance(x, Mask):
            return x
        value = x.value()
        return value if x.dtype.is_floating_point else m.mode.dispatch(Tensor.to, value, dtype)

    tracked = not any(isinstance(x, Tensor) for x in leaves)
    if isinstance(call.args[0], Mask) and func in _OUT_OF_PLACE:
        func, tracked = _OUT_OF_PLACE[func], True
    if not tracked and operation in ("mul", "div", "smooth"):
        for mask in (x for x in leaves if isinstance(x, Mask)):
            mask.used(drops=False)
    if not tracked and operation in ("add", "sub", "rsub") and m.large:
        raise m.refuse("a sum in which it stands for minus infinity")
    given = call.with_each(soft)
    out = m.mode.dispatch(func, *given.args, **given.kwargs)
    if not tracked:
        return out
    made = m.derived(out, out.dtype, binary=False)
    if operation in ("mul", "div"):
        numbers = (x for x in leaves if isinstance(x, (int, float)))
        made.large = operation == "mul" and any(abs(x) >= _LARGE for x in numbers)
    return made


_OUT_OF_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {
    function: getattr(torch, operation)
    for function, (operation, inplace) in _OPERATION.items()
    if inplace and operation in ("add", "sub", "mul", "div", "neg")
}
