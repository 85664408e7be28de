"""The ops that the tangent engine trusts.

In torch 2.13 the reverse pass through a forward-mode tangent is silently wrong for some ops (layer,
batch and instance norm, ``linalg.solve``, …). Therefore the engine trusts only the ops listed here. A
test compares the reverse-over-forward derivative of each of them with finite differences
(``tests/engines/test_proven.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from undrop.engines.tangent_rules import BACKWARD, TANGENT_RULES
from undrop.intercept import Interception, RngSnapshot, Rule, Site, call, is_sharded, keep_buffers
from undrop.intercept.checkpointing import enclosing_function, in_checkpoint

_SHAPES = """view _unsafe_view expand permute transpose t unsqueeze squeeze select slice
    split split_with_sizes unbind alias clone _to_copy copy_ cat stack repeat flip roll constant_pad_nd
    index index_select gather masked_fill where tril triu diagonal unfold
    index_add index_put index_put_ masked_fill_ masked_scatter scatter scatter_add zero_
    reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
    pixel_shuffle pixel_unshuffle channel_shuffle im2col col2im"""
_ARITHMETIC = """add sub rsub mul div neg pow reciprocal sqrt rsqrt exp log log1p expm1 abs sin cos
    maximum minimum clamp clamp_min addcmul lerp add_ mul_ sub_ div_
    addcdiv addcmul_ atan atan2 clamp_ clamp_max clamp_min_ copysign cosh erf exp2 exp_ floor fmod hypot
    log2 logaddexp logit nan_to_num neg_ pow_ remainder round sgn sinh sqrt_ tan"""
_ACTIVATIONS = """relu gelu silu tanh sigmoid softplus leaky_relu elu hardtanh hardswish mish
    log_sigmoid_forward relu_ celu softshrink hardshrink threshold _prelu_kernel
    elu_ hardswish_ hardtanh_ leaky_relu_ mish_ sigmoid_ silu_ tanh_"""
_PRODUCTS = "mm bmm addmm addmv addbmm baddbmm dot mv _trilinear convolution embedding"
_REDUCTIONS = """sum mean var var_mean std amax amin max min median cumsum cumprod prod sort topk trace
    linalg_vector_norm"""
_POOLING = """max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d
    max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d native_group_norm"""

PROVEN = frozenset(
    " ".join((_SHAPES, _ARITHMETIC, _ACTIVATIONS, _PRODUCTS, _REDUCTIONS, _POOLING)).split()
)
"""Names of aten ops whose reverse-over-forward derivative is proven correct."""

_FILLED = """zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full
    new_empty_strided"""
CONSTANT = frozenset(_FILLED.split())
"""Names of aten ops whose result depends only on a tensor's shape and type, so it has no tangent."""

_CHECKPOINTING = "activation checkpointing"  # not an op, but it loses the tangent
_FUNCTION = "the autograd function"  # if it has a rule for tangents, that rule is not proven
_ITEM = "Tensor.item"  # a plain number has no tangent
_SCRIPT = "code in TorchScript"  # it loses the tangent from its second call on
_NOT_ATEN = (_CHECKPOINTING, _FUNCTION, _ITEM, _SCRIPT, *BACKWARD.values())


class TangentTrace(TorchDispatchMode):
    """Records the ops on tensors that depend on a site.

    Such tensors are marked by their storage: a value written to a part of it appears in all its views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.checking = True
        """Whether ops are recorded; not within a rule."""
        self.scripted: Callable[[], bool] = lambda: False
        """Returns whether the op that runs now comes from TorchScript."""
        self._marked: set[StorageWeakRef] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to skip its compiler, torch would first load all of it (80 MB)."""
        return False

    def mark(self, tree: Any) -> None:
        """Mark all tensors of a tree as dependent on a site."""
        self._marked.update(_storages(tree))

    def touches(self, tree: Any) -> bool:
        """Return whether any tensor of a tree depends on a site."""
        return not self._marked.isdisjoint(_storages(tree))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op; if its arguments are marked, record it and mark its results."""
        name = func.overloadpacket.__name__
        touched = self.checking and name not in CONSTANT and self.touches((args, kwargs))
        out = func(*args, **(kwargs or {}))
        if touched and name == "_local_scalar_dense":
            self.ops.append(_ITEM)
        elif touched and _storages(out):
            named = _enclosing() or _variant(func, args)
            self.ops.append(_SCRIPT if self.scripted() else named)
            self.mark(out)
        return out


def _variant(func: Any, args: tuple[Any, ...]) -> str:
    """Return the op's name; a variant that the op's proof does not cover gets a longer name."""
    name: str = func.overloadpacket.__name__
    if any(isinstance(t, Tensor) and t.layout is not torch.strided for t in args):
        return f"{name} of a sparse tensor"
    if name == "linalg_vector_norm" and len(args) > 1 and args[1] != 2:
        return f"{name} of order {args[1]}"
    if name == "scatter" and "reduce" in func._overloadname:
        return f"{name} with reduce"
    return name


def _storages(tree: Any) -> list[StorageWeakRef]:
    """Return the storages of all tensors that can have a tangent."""
    return [
        StorageWeakRef(t.untyped_storage())
        for t in tree_leaves(tree)
        if isinstance(t, Tensor)
        and t.layout is torch.strided
        and (t.is_floating_point() or t.is_complex())
    ]


def _enclosing() -> str | None:
    """Return the name of a caller on the Python stack that loses the tangent, or None."""
    if in_checkpoint():
        return _CHECKPOINTING
    function = enclosing_function()
    return None if function is None else f"{_FUNCTION} {function}"


def _unchecked(trace: TangentTrace, function: Callable[..., Any], rule: Rule) -> Rule:
    """Wrap the rule of a function so that the trace does not record the ops inside it."""

    def unchecked(mode: Interception, *args: Any, **kwargs: Any) -> Any:
        touched = trace.touches((args, kwargs))
        if touched and function in BACKWARD:
            trace.ops.append(BACKWARD[function])
        trace.checking = False
        try:
            out = rule(mode, *args, **kwargs)
        finally:
            trace.checking = True
        if touched or mode.sites:
            trace.mark(out)
        return out

    return unchecked


class _Counting(Interception):
    """Counts the torch functions that are running. TorchScript runs its ops outside of any."""

    running = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.running += 1
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            self.running -= 1


@torch.no_grad()
def first_unproven_op(model: nn.Module, inputs: Any) -> str | None:
    """Return the first unproven op that the tangent reaches; None if all are proven.

    This runs one pass without gradients. The result is for the branch that this pass takes.
    """
    if is_sharded(model):
        return "parameters sharded by FSDP"
    trace = TangentTrace()

    def mark(site: Site, h: Tensor) -> Tensor:
        h = h.clone()
        trace.mark(h)
        if in_checkpoint():
            trace.ops.append(_CHECKPOINTING)
        return h

    rules = {f: _unchecked(trace, f, rule) for f, rule in TANGENT_RULES.items()}
    mode = _Counting(model, mark, rules)
    with RngSnapshot(model), keep_buffers(model), trace, mode:
        trace.scripted = lambda: not mode.running
        try:
            call(model, inputs)
        except NotImplementedError:  # a tensor without storage, as inside torch.vmap
            return "torch.func's transforms"
    unproven = next((op for op in trace.ops if op not in PROVEN), None)
    if unproven is not None and not unproven.startswith(_NOT_ATEN):
        unproven = f"aten::{unproven}"
    return unproven
