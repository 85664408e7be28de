"""Functions of random values: some turn a draw into a mask, and others use a mask."""

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
    """A key of ``_NAMES``; "" for a function that is not listed there."""
    inplace: bool
    args: _Args
    kwargs: _Kwargs

    def is_first(self, value: RandomValue) -> bool:
        """Return whether a random value is the first argument."""
        return bool(self.args) and self.args[0] is value

    def other(self, value: RandomValue) -> Any:
        """Return the second argument if the random value is the first, else the first."""
        return self.args[1 if self.is_first(value) else 0] if len(self.args) > 1 else None

    def leaves(self) -> list[Any]:
        """Return the arguments, including those within lists, tuples and dictionaries."""
        return leaves_of((self.args, self.kwargs))

    def map(self, function: Callable[[Any], Any]) -> _Call:
        """Return the call with ``function`` applied to every argument."""
        args, kwargs = (map_leaves(tree, function) for tree in (self.args, self.kwargs))
        return self._replace(args=args, kwargs=kwargs)

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
        __matmul__ __rmatmul__ matmul mm bmm cat stack concat lerp addcmul addcdiv copy_
        index_select gather index_add scatter_add cumprod prod einsum avg_pool1d avg_pool2d avg_pool3d
        linear conv1d conv2d conv3d interpolate softmax tanh sigmoid softplus""",
}
"""For each operation on random values, the names of the functions that perform it."""

_LARGE = 1e3  # a number this large in place of dropped entries stands for infinity


def _works_in_place(name: str) -> bool:
    if name.endswith("__"):
        return name.startswith("__i") and name != "__invert__"
    return name.endswith("_")


_OPERATIONS: dict[Callable[..., Any], tuple[str, bool]] = {
    getattr(owner, name): (operation, _works_in_place(name))
    for operation, names in _NAMES.items()
    for name in names.split()
    for owner in (Tensor, torch, F)
    if hasattr(owner, name)
}
"""The operation that a function performs, and whether it works in place."""
_POOLS: dict[Callable[..., Any], tuple[int, Callable[..., Any]]] = {
    getattr(owner, f"max_pool{dims}d{suffix}"): (dims, getattr(F, f"avg_pool{dims}d"))
    for dims in (1, 2, 3)
    for suffix in ("", "_with_indices")
    for owner in (F, torch)
    if hasattr(owner, f"max_pool{dims}d{suffix}")
}
"""For each max pooling function, its number of dimensions and the matching average pooling."""
_ATTRIBUTES = "shape dtype device ndim layout requires_grad is_cuda is_sparse"
META = frozenset(
    [function for function, (operation, _) in _OPERATIONS.items() if operation == "meta"]
    + [getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split()]
)
"""Functions that read the shape, the type or the device of a tensor, but not its values."""
_ARITHMETIC = frozenset(("add", "sub", "rsub", "mul", "div", "rdiv", "neg", "smooth", "where"))
_OUT_OF_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {
    function: getattr(torch, operation)
    for function, (operation, inplace) in _OPERATIONS.items()
    if inplace and operation in ("add", "sub", "mul", "div", "neg")
}
"""For each arithmetic function that works in place, the function that does not."""


def apply_function(
    mode: Interception, func: Callable[..., Any], args: _Args, kwargs: _Kwargs
) -> Any:
    """Return the result of a function that has random values among its arguments."""
    operation, inplace = _OPERATIONS.get(func, ("", False))
    if operation == "meta":
        return func(args[0].template(), *args[1:], **kwargs)
    call = _Call(func, operation, inplace, args, kwargs).map(_current)
    uniform = call.first_of(Uniform)
    if uniform is not None:
        out = _apply_to_uniform(uniform, call)
        if out is not NotImplemented:
            return out
        call = call.map(lambda x: x.materialize() if isinstance(x, Uniform) else x)
    mask = call.first_of(Mask)
    if mask is None:
        return mode.dispatch(func, *call.args, **call.kwargs)
    with mode.enable_grad():
        return _apply_to_mask(mask, call)


def _current(x: Any) -> Any:
    """Return the result of the in-place function that replaced x, if there is one, else x."""
    return x.replacement if isinstance(x, Uniform) and x.replacement is not None else x


def _apply_to_uniform(u: Uniform, call: _Call) -> Any:
    """Return another Uniform or a Mask; NotImplemented if the function needs real random numbers."""
    if u.numbers is not None:
        return NotImplemented
    func, operation, inplace, args, kwargs = call
    is_first = call.is_first(u)
    if operation in ("move", "cast") and is_first and not inplace:
        if not any(isinstance(x, RandomValue) for x in leaves_of((args[1:], kwargs))):
            return u.with_transform((func, args[1:], kwargs))
        return NotImplemented
    if operation == "item" and u.template().numel() == 1:
        return u  # the model compares it later, in Python
    if operation == "neg":
        return u.affine(-1.0, 0.0, inplace)
    if operation == "floor":
        out = _floor(u)
        if inplace and out is not NotImplemented:
            u.replacement = out
        return out
    other = _as_number(call.other(u)) if len(args) == 2 and not kwargs else None
    if other is None:
        return NotImplemented
    if operation in ("lt", "gt"):
        probability, threshold, below = u.compare(other, (operation == "lt") == is_first)
        return _make_mask(u, probability, threshold, below, torch.bool)
    coefficients = _affine_coefficients(operation, is_first, other)
    return NotImplemented if coefficients is None else u.affine(*coefficients, inplace)


def _affine_coefficients(operation: str, x_is_first: bool, c: float) -> tuple[float, float] | None:
    """Return (a, b) if the operation on x and c is a·x + b; None if it is not affine in x."""
    if operation == "add":
        return 1.0, c
    if operation == "mul" and c:
        return c, 0.0
    if operation == "div" and x_is_first and c:
        return 1.0 / c, 0.0
    if operation in ("sub", "rsub"):
        return (1.0, -c) if (operation == "sub") == x_is_first else (-1.0, c)
    return None


def _as_number(x: Any) -> float | None:
    """Return x as a number; None if it has no value yet, or if reading it would wait for a device."""
    if isinstance(x, (int, float)):
        return float(x)
    readable = isinstance(x, Tensor) and not torch.compiler.is_compiling()
    if readable and x.numel() == 1 and x.device.type == "cpu" and not x.requires_grad:
        return float(x)
    return None


def _floor(u: Uniform) -> Any:
    """floor(keep + U) is 1 where U ≥ 1 - keep."""
    if u.scale != 1.0 or not 0.0 <= u.shift <= 1.0:
        return NotImplemented
    return _make_mask(u, u.shift, 1.0 - u.shift, False, u.template().dtype)


def _make_mask(
    u: Uniform, probability: float, threshold: float, below: bool, dtype: torch.dtype
) -> Any:
    """Return the mask of a comparison with U, or a constant tensor if it is the same for every U."""
    if not 0.0 < probability < 1.0:
        u.mode.idle_dropout(None, True)
        return u.transform(u.full(probability)).to(dtype)
    return u.mode.make_mask(
        u.key, u.full, probability, dtype, threshold=threshold, below=below, transform=u.transform
    )


def _apply_to_mask(m: Mask, call: _Call) -> Any:
    """Return the result of a function of a mask.

    Raises:
        NotAMask: if undrop can't follow this use of the mask.
    """
    func, operation, inplace, args, kwargs = call
    is_first = call.is_first(m)
    if operation == "branch" and m.binary:
        return m.mode.decide_branch(m)
    if operation == "move" and is_first and not inplace:
        return m.derive(m.mode.dispatch(func, m.value(), *args[1:], **kwargs))
    if operation == "cast" and is_first:
        return _cast(m, call)
    if func in _POOLS and is_first and m.binary:
        return _max_pool(m, func, *args[1:], **kwargs)
    out = _apply_logic(m, call) if m.binary else NotImplemented
    if out is NotImplemented and operation in ("where", "fill", "set") and m.binary:
        return _choose(m, call)
    if out is NotImplemented and operation in _ARITHMETIC:
        out = _compute(m, call)
    if out is NotImplemented:
        raise m.refuse(getattr(func, "__name__", str(func)))
    return m.assign(out) if inplace and is_first and isinstance(out, Mask) else out


def _apply_logic(m: Mask, call: _Call) -> Any:
    """Return the mask that a logical function makes of zeros and ones, or NotImplemented."""
    value, dispatch, operation = m.value(), m.mode.dispatch, call.operation
    is_first, other = call.is_first(m), call.other(m)
    negate = operation == "not"
    number = other if isinstance(other, (int, float)) else None
    if operation in ("eq", "ne") and number in (0, 1):
        negate = (operation == "eq") == (number == 0)
    elif operation in ("lt", "gt") and number is not None and 0.0 <= number <= 1.0:
        negate = (operation == "lt") == is_first
    elif operation == "rsub" or (operation == "sub" and not is_first):
        if number != 1:
            return NotImplemented
        negate = True
    elif operation == "floor" or (operation in ("and", "or", "mul") and other is m):
        return m
    elif operation in ("and", "or") and isinstance(other, (Mask, Tensor)):
        b = other.value() if isinstance(other, Mask) else other.to(value.dtype)
        both = dispatch(torch.mul, value, b)
        if operation == "and":
            return m.derive(both)
        return m.derive(dispatch(torch.sub, dispatch(torch.add, value, b), both))
    elif operation != "not":
        return NotImplemented
    dtype = torch.bool if operation in ("eq", "ne", "lt", "gt") else m.dtype
    if not negate:
        return m.derive(value, dtype)
    out = m.derive(dispatch(torch.rsub, value, 1.0), dtype)
    out.keeps_at_one = not m.keeps_at_one
    return out


def _cast(m: Mask, call: _Call) -> Any:
    """Return the mask in another type or on another device; its value stays in floating point."""
    value = m.value()
    sample = torch.empty((), dtype=m.dtype, device=value.device)
    on_sample = call.map(lambda x: sample if x is m else x.template() if isinstance(x, Mask) else x)
    out = call.func(*on_sample.args, **on_sample.kwargs)
    if not isinstance(out, Tensor):  # ``type()`` returns the name of the type
        return out
    if not m.binary and not out.dtype.is_floating_point:
        raise m.refuse("a cast to whole numbers")
    dtype = out.dtype if out.dtype.is_floating_point else value.dtype
    if dtype != value.dtype or out.device != value.device:
        value = m.mode.dispatch(Tensor.to, value, device=out.device, dtype=dtype)
    return m.derive(value, out.dtype)


def _max_pool(
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
    all_zero = dispatch(torch.exp, dispatch(torch.mul, pooled, float(math.prod(sizes))))
    return m.derive(dispatch(torch.rsub, all_zero, 1.0))


def _choose(m: Mask, call: _Call) -> Any:
    """Return b + m·(a - b) for ``where(m, a, b)``, ``b.masked_fill(m, a)`` and ``b[m] = a``."""
    operation, args, dispatch = call.operation, call.args, m.mode.dispatch
    if call.kwargs or len(args) != 3:
        raise m.refuse(operation)
    condition, a, b = args if operation == "where" else (args[1], args[2], args[0])
    if condition is not m or any(isinstance(x, RandomValue) for x in (a, b)):
        raise m.refuse(operation)
    for x in (a, b):
        if isinstance(x, (int, float)) and not abs(x) < _LARGE:
            raise m.refuse(f"a choice between a value and {x:g}")
    _record_choice(m, operation, a, b)
    value = m.value()
    if operation == "set":
        for _ in range(b.dim() - value.dim()):
            value = dispatch(torch.unsqueeze, value, -1)
    dtype = next((x.dtype for x in (a, b) if isinstance(x, Tensor)), value.dtype)
    if not dtype.is_floating_point:
        raise m.refuse("a choice between whole numbers")
    value = dispatch(Tensor.to, value, dtype=dtype)
    writes_b = call.inplace or operation == "set"
    if isinstance(b, (int, float)) and b == 0:
        out = dispatch(torch.mul, a, value)
    else:
        old = b.clone() if writes_b else b
        change = dispatch(torch.sub, a, old) if isinstance(a, Tensor) or a else -old
        out = dispatch(torch.add, old, dispatch(torch.mul, value, change))
    return dispatch(Tensor.copy_, b, out) if writes_b else out


def _record_choice(m: Mask, operation: str, a: Any, b: Any) -> None:
    """Record which value of m drops, if the model takes a where m = 1 and b where m = 0."""
    if operation != "where":
        m.record_use(drops_at_one=True)
    elif m.mode.mask_uses is not None:
        zeros = [x == 0 if isinstance(x, (int, float)) else not x.any() for x in (a, b)]
        if zeros[0] != zeros[1]:
            m.record_use(drops_at_one=zeros[0])


def _compute(m: Mask, call: _Call) -> Any:
    """Apply a smooth function to the values of masks; without other tensors, the result is a mask."""
    func, operation, leaves = call.func, call.operation, call.leaves()
    floats = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    dtype = floats[0].dtype if floats else torch.get_default_dtype()

    def value_of(x: Any) -> Any:
        if not isinstance(x, Mask):
            return x
        value = x.value()
        return value if x.dtype.is_floating_point else m.mode.dispatch(Tensor.to, value, dtype)

    gives_mask = not any(isinstance(x, Tensor) for x in leaves)
    if isinstance(call.args[0], Mask) and func in _OUT_OF_PLACE:
        func, gives_mask = _OUT_OF_PLACE[func], True
    if not gives_mask and operation in ("mul", "div", "smooth"):
        for mask in (x for x in leaves if isinstance(x, Mask)):
            mask.record_use(drops_at_one=False)
    if not gives_mask and operation in ("add", "sub", "rsub") and m.is_large:
        raise m.refuse("a sum in which it stands for minus infinity")
    values = call.map(value_of)
    out = m.mode.dispatch(func, *values.args, **values.kwargs)
    if not gives_mask:
        return out
    mask = m.derive(out, out.dtype)
    mask.binary = False
    if operation in ("mul", "div"):
        numbers = (x for x in leaves if isinstance(x, (int, float)))
        mask.is_large = operation == "mul" and any(abs(x) >= _LARGE for x in numbers)
    return mask
