"""One pass of a model over a stacked batch: [without noise; +ε₀; -ε₀].

At every site the rows are multiplied by 1, 1 + ε₀·σ·η and 1 - ε₀·σ·η. Then u ≈ (F₊ - F₋)/2ε₀ and
F ≈ (F₊ + F₋)/2, both to O(ε₀²), from one call of the model and with torch's own kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from undrop.engines.blocks import BlockTensor, blockwise, has_blocks
from undrop.engines.layout import Layout, Rows
from undrop.engines.midpoint import MIDPOINT_RULES
from undrop.engines.plan import NotStackable, Plan, PlanChanged
from undrop.intercept import SITE_RULES, Interception, Rule, Site, call
from undrop.intercept.checkpointing import Region, enclosing_function
from undrop.intercept.interception import outside_depth
from undrop.intercept.random_values import MaskOrigin
from undrop.intercept.recurrent import RECURRENT, RecurrentCall, parse_call, portable, run_layers

_METADATA = frozenset(("__get__", "__len__", "size", "dim", "numel"))
"""Functions that only read a tensor's shape or type; they are not part of the trail."""


class StackedPass(Interception):
    """Runs a model on a stacked batch. The n-th dropout that it reaches is the n-th site of the plan.

    The plan already names the sites, so the pass does not read the Python stack and can be compiled.

    Args:
        model: the model that runs.
        plan: its plan.
        rows: the examples that carry noise.
        noise: the result of :func:`stacked_noise`.
    """

    def __init__(self, model: nn.Module, plan: Plan, rows: Rows, noise: Sequence[Any]) -> None:
        TorchFunctionMode.__init__(self)
        self.plan, self.rows, self.noise = plan, rows, noise
        self.index = 0
        self.has_idle_dropout = False
        self.trail = 0
        self.stacked = not plan.at_first_site
        self._model = model
        self._rules = stacked_rules(plan.midpoints)
        self.grad_enabled = torch.is_grad_enabled()
        self.draw_index = 0
        self._compiled = torch.compiler.is_compiling()
        if not self._compiled:
            self._depth = outside_depth.value
            self._prepared_regions: weakref.WeakSet[Region] = weakref.WeakSet()

    def __enter__(self) -> StackedPass:
        """Start to intercept."""
        self.open_blocks += 1
        if any(s.site.kind == "module-drop" for s in self.plan.sites):
            self.track_modules()
        TorchFunctionMode.__enter__(self)
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the rule of a function; split functions of block tensors into blocks."""
        rule = self._rules.get(func)
        if not self._compiled and getattr(func, "__name__", "") not in _METADATA:
            self.trail = hash((self.trail, func))
        if types or self._filled_tensors:
            result = self.handle_random_values(func, types, args, kwargs or {})
            if result is not NotImplemented:
                return result
        if types and BlockTensor in types and func not in RECURRENT:
            if func in SITE_RULES:
                raise NotStackable(f"noise on a weight reaches another dropout, {func.__name__}")
            return self.blockwise(func, *args, **(kwargs or {}))
        if rule is None:
            if func is Tensor.unflatten:  # torch.compile can't follow this one within a mode
                func = torch.unflatten
            return func(*args, **(kwargs or {}))
        if not self._compiled:
            if outside_depth.value != self._depth:
                return func(*args, **(kwargs or {}))
            if torch.is_grad_enabled() or func in SITE_RULES:
                self.prepare_recomputation()
            elif self.grad_enabled and enclosing_function() is not None:
                return func(*args, **(kwargs or {}))  # an autograd function has its own backward
        return rule(self, *args, **(kwargs or {}))

    def dispatch(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of tensors as if the model had called it."""
        types = (BlockTensor,) if has_blocks((*args, *kwargs.values())) else ()
        return self.__torch_function__(func, types, args, kwargs)

    def next_draw_key(self) -> str | None:
        """Return the key of the next random draw, which is its index; None if it is not a mask."""
        index = self.draw_index
        self.draw_index += 1
        if index >= len(self.plan.mask_draws):
            raise PlanChanged
        return None if self.plan.mask_draws[index] is None else str(index)

    def rule_out(self, key: str, origin: MaskOrigin | None = None) -> None:
        """Raise ``PlanChanged``, because the draw was a mask in the plain pass."""
        raise PlanChanged

    def drops_at_one(self, key: str, default: bool) -> bool:
        """Return whether a mask drops where it is 1, as the plan says."""
        return bool(self.plan.mask_draws[int(key)])

    def is_module_drop(self, key: str) -> bool:
        """Return whether a random branch blends the enclosing module, as the plan says."""
        return self.site().kind == "module-drop"

    def progress(self) -> tuple[int, int]:
        """Return how many sites and draws the pass has reached."""
        return self.index, self.draw_index

    def record_mask(self, key: str, origin: MaskOrigin) -> None:
        """Do nothing: only the plain pass records masks."""

    def site_options(self, shape: Sequence[int], kind: str | None) -> dict[str, Any]:
        """Return nothing: the plan describes the site."""
        return {}

    def as_probability(self, p: Any) -> float | None:
        """Return p as a number, from the plan if reading it from a tensor is slow or impossible."""
        if not isinstance(p, Tensor) or (p.device.type == "cpu" and not self._compiled):
            return super().as_probability(p)
        if self.draw_index >= len(self.plan.mask_draws) or self.index >= len(self.plan.sites):
            return None
        p_drop = self.plan.sites[self.index].site.p
        return p_drop if self.plan.mask_draws[self.draw_index] else 1.0 - p_drop

    def blockwise(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of block tensors once per block."""
        return blockwise(func, args, kwargs, self.rows.layout.blocks, self.batch_dim)

    def _continuation(self) -> Callable[[], Interception]:
        position = self.index, self.stacked, self.draw_index

        def make() -> Interception:
            mode = StackedPass(self._model, self.plan, self.rows, self.noise)
            mode.index, mode.stacked, mode.draw_index = position
            return mode

        return make

    def _location(self) -> str:
        return "the model"

    def noisy(self, h: Tensor, p: float, **_: Any) -> Tensor:
        """Return h with the noise of the next site of the plan."""
        index = self.index
        self.index += 1
        if index >= len(self.plan.sites):
            raise PlanChanged
        s = self.plan.sites[index]
        if p != s.site.p or h.dim() != len(s.site.shape):
            raise PlanChanged
        if not self.stacked:
            assert s.dim is not None
            h = self.rows.stack(h, s.dim)
            self.stacked = True
        noise = self.noise[index]
        if noise is None:
            return h
        if s.dim is None:
            return BlockTensor.noisy(h, noise, self.rows.layout)
        if h.shape[s.dim] != self.rows.layout.total * s.repeats:
            raise PlanChanged
        factors: Tensor = noise.to(h)
        return h * factors

    def site(self, *args: Any, **kwargs: Any) -> Site:
        """Return the site that comes next."""
        return self.plan.sites[min(self.index, len(self.plan.sites) - 1)].site

    def batch_dim(self, x: Tensor) -> int | None:
        """Return the batch dimension of a stacked x; None if it has none.

        A parameter never has one, whatever its shape.
        """
        if not self.stacked or isinstance(x, nn.Parameter):
            return None
        total, dim = self.rows.layout.total, self.plan.dim
        if x.dim() > dim and x.shape[dim] == total:
            return dim
        return next((d for d, n in enumerate(x.shape) if n == total), None)

    def midpoint(self, x: Tensor) -> Tensor:
        """Return x without a graph, with the midpoint (x₊ + x₋)/2 in place of x₊ and of x₋."""
        x = x.detach()
        dim = self.batch_dim(x)
        if dim is not None:
            return self._averaged(x, dim)
        total = self.rows.layout.total
        if self.stacked and x.dim() and x.shape[0] % total == 0 and x.shape[0]:
            repeats = x.shape[0] // total
            if not any(s.time_major for s in self.plan.sites):
                return self._averaged(x, 0, repeats)
            return self._averaged(x.unflatten(0, (repeats, total)), 1).flatten(0, 1)
        return x

    def _averaged(self, x: Tensor, dim: int, repeats: int = 1) -> Tensor:
        before, plus, minus, after = self.rows.layout.split(x, dim, repeats)
        midpoint = (plus + minus).mul_(0.5)
        return torch.cat((*before, midpoint, midpoint, *after), dim)


def run_stacked(
    model: nn.Module,
    plan: Plan,
    layout: Layout,
    index: Tensor | None,
    noise: list[Any],
    inputs: Any,
) -> tuple[Any, int]:
    """Run a model on a stacked batch; return its output and the trail of the pass.

    Compiled code has no trail and returns 0. If the pass reaches other sites than the plan lists, this
    raises ``PlanChanged``.

    Args:
        model: the model that runs.
        plan: its plan.
        layout: the number of rows of each kind.
        index: the example of each row; None if all examples carry noise.
        noise: the result of :func:`stacked_noise`.
        inputs: the inputs, already stacked unless the plan stacks at the first site.
    """
    with StackedPass(model, plan, Rows.of_index(layout, index), noise) as mode:
        output = call(model, inputs)
    if mode.index != len(plan.sites):
        raise PlanChanged
    return output, mode.trail


def _recurrent(function: Callable[..., Any], mode: StackedPass, *args: Any) -> Any:
    """Run recurrent layers; layers with noise on their weights run once per block."""
    call = parse_call(function, args)
    has_dropout = call.training and call.dropout > 0.0 and call.layers > 1
    if has_dropout and call.batch_sizes is not None:
        raise NotStackable("its recurrent layers drop entries of a packed sequence")
    if not has_blocks(call.weights):
        if has_dropout:
            return run_layers(mode, call, RecurrentCall.run)
        return portable(function)(*args)
    if not has_dropout:
        return mode.blockwise(portable(function), *args)
    return run_layers(mode, call, lambda layer: _run_blocks(mode, layer))


def _run_blocks(mode: StackedPass, layer: RecurrentCall) -> tuple[Tensor, tuple[Tensor, ...]]:
    fields: Any = {"x": layer.x, "state": layer.state, "weights": layer.weights}
    out, final = mode.blockwise(lambda **block: layer._replace(**block).run(), **fields)
    return out, tuple(final)


def _batch_norm(
    mode: StackedPass,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalize the rows at +ε₀ and at -ε₀ separately, as two passes would."""
    options = (weight, bias, training, momentum, eps)
    if not training or not mode.stacked:
        return F.batch_norm(input, running_mean, running_var, *options)
    layout = mode.rows.layout
    if layout.plain:
        raise NotStackable("batch norm in train mode mixes the examples of a batch")
    _, plus, minus, _ = layout.split(input, 0, len(input) // layout.total)
    normalized = F.batch_norm(plus, running_mean, running_var, *options)
    # Running statistics are updated once per step, so the second call updates copies.
    mean, var = (None if s is None else s.clone() for s in (running_mean, running_var))
    return torch.cat((normalized, F.batch_norm(minus, mean, var, *options)))


_STACKED_RULES: dict[Callable[..., Any], Rule] = {f: partial(_recurrent, f) for f in RECURRENT}
_STACKED_RULES[F.batch_norm] = _batch_norm
_rules: dict[tuple[bool, int, int], dict[Callable[..., Any], Rule]] = {}


def stacked_rules(midpoints: bool) -> dict[Callable[..., Any], Rule]:
    """Return the rules of a stacked pass, including those that users register."""
    key = (midpoints, len(MIDPOINT_RULES), len(SITE_RULES))
    if key not in _rules:
        _rules[key] = {**(MIDPOINT_RULES if midpoints else {}), **SITE_RULES, **_STACKED_RULES}
    return _rules[key]
