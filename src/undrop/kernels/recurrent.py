"""What the recurrent tangent kernels share: buffers, the two sweeps over time, and their GEMMs.

For the first ``rows`` entries of the batch the tangent is carried along. The rows of the primal and
of the tangent lie side by side in every buffer, so that one GEMM serves both: the input products of
all steps, the recurrent product of a step, and the weight gradients over all steps.

A weight tangent Ẇ adds ``Ẇ h`` to the tangent. To multiply few rows by Ẇ at each step would cost
almost as much as many rows, since it is the reading of Ẇ that takes the time. So the tangent then
runs ``lag`` steps behind the primal, and ``Ẇ h`` is one GEMM for that many steps. In the backward
sweep it is the tangent's adjoint that runs ahead of the primal's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undrop.errors import OptionError

__all__ = [
    "Adjoints",
    "Cell",
    "States",
    "Tape",
    "Weights",
    "recurrence",
    "sigmoid_backward",
    "tanh_backward",
]

sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input  # g·s(1 - s), written where told
tanh_backward = torch.ops.aten.tanh_backward.grad_input  # g·(1 - s²)

_LAG = 8  # steps whose Ẇ h is one product: enough rows for a GEMM, and a short run-up
_TRANSPOSE_FROM = 8  # steps from which a transposed copy of W_hh pays for itself

Span = tuple[int, int]  # a range of slots


class Weights(NamedTuple):
    """The parameters of a layer, and the tangents of its matrices."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    dw_ih: Tensor | None = None
    dw_hh: Tensor | None = None


class States(NamedTuple):
    """h, the second state c if the cell has one, and their tangents; None for zero."""

    h: Tensor | None
    c: Tensor | None
    dh: Tensor | None
    dc: Tensor | None


@dataclass
class Tape:
    """What the forward sweep leaves for the backward one; the batch's rows before the tangent's."""

    x: Tensor  # (steps, batch + rows, inputs)
    slots: Tensor  # (steps + 1, batch + rows, slots, size): gates and such, as the cell names them
    h: Tensor  # (steps + 1, batch + rows, size): the state before each step, and the last
    batch: int

    @property
    def steps(self) -> int:
        """The length of the sequence."""
        return self.x.shape[0]

    @property
    def rows(self) -> int:
        """How many entries of the batch carry a tangent."""
        return self.x.shape[1] - self.batch

    @property
    def size(self) -> int:
        """The number of hidden units."""
        return self.h.shape[2]


@dataclass
class Adjoints:
    """What the backward sweep fills."""

    h: Tensor  # (steps + 1, batch + rows, size): of the tape's h
    slots: Tensor  # (steps, batch + rows, slots, size): of the pre-activations


def _columns(slots: Tensor, span: Span) -> Tensor:
    """A range of slots as columns: (steps, batch + rows, width)."""
    size = slots.shape[-1]
    return slots.flatten(2)[..., span[0] * size : span[1] * size]


class Cell(ABC):
    """One step of a recurrent layer, its tangent, and the adjoints of both, in place on a tape."""

    slots: ClassVar[int]  # of the tape
    hidden: ClassVar[Span]  # those that the recurrent product is added to
    inputs: ClassVar[tuple[Span, ...]]  # those that the input product is added to
    active: ClassVar[Span]  # those that are pre-activations before a step, and have adjoints
    stateful: ClassVar[bool]  # whether there is a second state, in slot 0

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    @abstractmethod
    def begin(self) -> None:
        """Look up the views that the forward sweep needs."""

    @abstractmethod
    def primal(self, t: int) -> None:
        """From the pre-activations of step t to the state after it."""

    @abstractmethod
    def tangent(self, t: int) -> None:
        """The same for the tangent's rows; the primal of step t is done."""

    @abstractmethod
    def prepare(self, adjoints: Adjoints, lag: int, gc: Tensor | None, gdc: Tensor | None) -> None:
        """Look up the views that the backward sweep needs; adjoints of the last c are given."""

    @abstractmethod
    def tangent_adjoint(self, t: int) -> None:
        """From the adjoint of ḣ after step t to those of the tangent's pre-activations."""

    @abstractmethod
    def primal_adjoint(self, t: int) -> None:
        """The same for the primal's rows; ``tangent_adjoint(t)`` is done."""

    @abstractmethod
    def first_adjoints(self) -> tuple[Tensor | None, Tensor | None]:
        """The adjoints of the second state and of its tangent before the first step."""

    @staticmethod
    @abstractmethod
    def bias(b_ih: Tensor, b_hh: Tensor) -> Tensor:
        """The bias of each active slot, (slots, size), from both biases as (gates, size)."""

    @classmethod
    def adjoint_span(cls, span: Span) -> Span:
        """A range of the tape's slots as one of the adjoint's, which only has the active ones."""
        return span[0] - cls.active[0], span[1] - cls.active[0]

    @classmethod
    def input_parts(cls, size: int) -> Iterator[tuple[Span, slice]]:
        """The slots of the input product, and for each range its rows of w_ih."""
        start = 0
        for span in cls.inputs:
            stop = start + (span[1] - span[0]) * size
            yield span, slice(start, stop)
            start = stop


class _Product:
    """``target += source @ weight`` of a step: the primal's rows of step k, the tangent's of t.

    Where k and t differ the rows are brought together in a small buffer, so that it stays one GEMM.
    """

    def __init__(self, source: Tensor, target: Tensor, weight: Tensor, batch: int) -> None:
        self.weight = weight
        self.steps = min(len(source), len(target))
        self.all = source.unbind(0), target.unbind(0)
        self.primal = source[:, :batch].unbind(0), target[:, :batch].unbind(0)
        self.tangent = source[:, batch:].unbind(0), target[:, batch:].unbind(0)
        self.staged = source.new_empty(source.shape[1:]), target.new_empty(target.shape[1:])
        self.staged_primal = self.staged[0][:batch], self.staged[1][:batch]
        self.staged_tangent = self.staged[0][batch:], self.staged[1][batch:]

    def __call__(self, k: int, t: int) -> None:
        if k == t:
            self.all[1][k].addmm_(self.all[0][k], self.weight)
        elif t < 0:
            self.primal[1][k].addmm_(self.primal[0][k], self.weight)
        elif k >= self.steps:
            self.tangent[1][t].addmm_(self.tangent[0][t], self.weight)
        else:
            self.staged_primal[0].copy_(self.primal[0][k])
            self.staged_tangent[0].copy_(self.tangent[0][t])
            torch.mm(self.staged[0], self.weight, out=self.staged[1])
            self.primal[1][k].add_(self.staged_primal[1])
            self.tangent[1][t].add_(self.staged_tangent[1])


def _set(target: Tensor, source: Tensor | None) -> None:
    if source is None:
        target.zero_()
    else:
        target.copy_(source)


def _start(
    cell: type[Cell], x: Tensor, dx: Tensor | None, first: States, rows: int, w: Weights
) -> Tape:
    """The tape with inputs, first states and the input products of all steps in their places."""
    steps, batch, inputs = x.shape
    size = w.w_hh.shape[1]
    tape = Tape(
        x=x.new_empty(steps, batch + rows, inputs),
        slots=x.new_empty(steps + 1, batch + rows, cell.slots, size),
        h=x.new_empty(steps + 1, batch + rows, size),
        batch=batch,
    )
    tape.x[:, :batch] = x
    _set(tape.x[:, batch:], dx)
    _set(tape.h[0, :batch], first.h)
    _set(tape.h[0, batch:], first.dh)
    if cell.stateful:
        _set(tape.slots[0, :batch, 0], first.c)
        _set(tape.slots[0, batch:, 0], first.dc)
    pre = tape.slots[:-1, :, cell.active[0] : cell.active[1]]
    bias = None
    if w.b_ih is not None and w.b_hh is not None:
        bias = cell.bias(w.b_ih.reshape(-1, size), w.b_hh.reshape(-1, size))
    _set(pre[:, :batch], bias)
    pre[:, batch:] = 0.0
    for span, part in cell.input_parts(size):
        columns = _columns(tape.slots[:-1], span)
        columns.flatten(0, 1).addmm_(tape.x.flatten(0, 1), w.w_ih[part].t())
        if w.dw_ih is not None:
            product = x[:, :rows].flatten(0, 1) @ w.dw_ih[part].t()
            columns[:, batch:].add_(product.view(steps, rows, -1))
    return tape


def _forward_sweep(cell: Cell, tape: Tape, w: Weights, lag: int) -> None:
    steps, batch, rows = tape.steps, tape.batch, tape.rows
    cell.begin()
    gates = _columns(tape.slots[:-1], cell.hidden)
    weight = w.w_hh.t()
    recur = _Product(
        tape.h, gates, weight.contiguous() if steps >= _TRANSPOSE_FROM else weight, batch
    )
    for k in range(steps + lag):
        t = k - lag
        if w.dw_hh is not None and t >= 0 and t % lag == 0:
            block = slice(t, min(t + lag, steps))
            product = tape.h[block, :rows].flatten(0, 1) @ w.dw_hh.t()
            gates[block, batch:].add_(product.view(-1, rows, product.shape[1]))
        recur(k, t)
        if k < steps:
            cell.primal(k)
        if rows and t >= 0:
            cell.tangent(t)


def _backward_sweep(cell: Cell, tape: Tape, adjoints: Adjoints, w: Weights, lag: int) -> None:
    steps, batch, rows = tape.steps, tape.batch, tape.rows
    gates = _columns(adjoints.slots, cell.adjoint_span(cell.hidden))
    recur = _Product(gates, adjoints.h, w.w_hh, batch)
    for k in reversed(range(steps + lag)):
        t = k - lag
        if rows and t >= 0:
            cell.tangent_adjoint(t)
        if w.dw_hh is not None and t >= 0 and t % lag == 0:
            block = slice(t, min(t + lag, steps))
            product = gates[block, batch:].flatten(0, 1) @ w.dw_hh
            adjoints.h[block, :rows].add_(product.view(-1, rows, product.shape[1]))
        if k < steps:
            cell.primal_adjoint(k)
        recur(k, t)


def _input_gradient(cell: Cell, tape: Tape, adjoints: Adjoints, w: Weights) -> Tensor:
    """d/dx over d/dẋ, (steps, batch + rows, inputs)."""
    gradient = torch.empty_like(tape.x)
    for n, (span, part) in enumerate(cell.input_parts(tape.size)):
        columns = _columns(adjoints.slots, cell.adjoint_span(span))
        flat = gradient.flatten(0, 1)
        flat.addmm_(columns.flatten(0, 1), w.w_ih[part], beta=min(n, 1))
        if w.dw_ih is not None:
            product = columns[:, tape.batch :].flatten(0, 1) @ w.dw_ih[part]
            gradient[:, : tape.rows].add_(product.view(tape.steps, tape.rows, -1))
    return gradient


def _weight_gradients(
    cell: Cell, tape: Tape, adjoints: Adjoints, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """In the order of ``Weights``, None where not wanted; one GEMM over all steps for each matrix."""

    def matrix(source: Tensor, rows: slice, spans: Sequence[Span]) -> Tensor:
        """Σ over steps and rows of the adjoints in these slots times what came in."""
        width = tape.size * sum(b - a for a, b in spans)
        result = source.new_empty(width, source.shape[-1])
        start = 0
        for span in spans:
            columns = _columns(adjoints.slots, cell.adjoint_span(span))[:, rows].flatten(0, 1)
            stop = start + columns.shape[1]
            torch.mm(columns.t(), source.flatten(0, 1), out=result[start:stop])
            start = stop
        return result

    # Over one dimension after the other: over both at once torch is eight times as slow.
    sums = adjoints.slots[:, : tape.batch].sum(0).sum(0)

    def bias(spans: Sequence[Span]) -> Tensor:
        return torch.cat([sums[slice(*cell.adjoint_span(span))] for span in spans]).flatten()

    every, first, tangent = slice(None), slice(0, tape.rows), slice(tape.batch, None)
    h, x, hidden = tape.h[:-1], tape.x, (cell.hidden,)
    gradients: tuple[Callable[[], Tensor], ...] = (
        lambda: matrix(x, every, cell.inputs),
        lambda: matrix(h, every, hidden),
        lambda: bias(cell.inputs),
        lambda: bias(hidden),
        lambda: matrix(x[:, first], tangent, cell.inputs),
        lambda: matrix(h[:, first], tangent, hidden),
    )
    return tuple(g() if want else None for g, want in zip(gradients, wanted, strict=True))


class _Recurrence(torch.autograd.Function):
    """(x, ẋ, states, weights) to (y, ẏ, h, c, ḣ, ċ)."""

    @staticmethod
    def forward(
        ctx: Any, cell: type[Cell], rows: int, x: Tensor, dx: Tensor | None, *rest: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        first, w = States(*rest[:4]), Weights(*rest[4:])  # type: ignore[arg-type]
        lag = 0 if w.dw_hh is None else max(1, min(_LAG, len(x) // 2))
        with torch.autocast(x.device.type, enabled=False):
            tape = _start(cell, x, dx, first, rows, w)
            _forward_sweep(cell(tape), tape, w, lag)
        ctx.save_for_backward(tape.x, tape.slots, tape.h, *w)
        ctx.set_materialize_grads(False)
        ctx.cell, ctx.batch, ctx.lag = cell, tape.batch, lag
        primal, tangent = slice(0, tape.batch), slice(tape.batch, None)
        y, dy = tape.h[1:, primal], tape.h[1:, tangent]
        h, dh = y[-1].clone(), dy[-1].clone()
        c = dc = None
        if cell.stateful:
            c, dc = tape.slots[-1, primal, 0].clone(), tape.slots[-1, tangent, 0].clone()
        return (y, dy, h, c, dh, dc) if rows else (y, None, h, c, None, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gy, gdy, gh, gc, gdh, gdc = grads
        x, slots, h, *weights = ctx.saved_tensors
        tape, w, batch = Tape(x, slots, h, ctx.batch), Weights(*weights), ctx.batch
        width = ctx.cell.active[1] - ctx.cell.active[0]
        adjoints = Adjoints(
            torch.empty_like(h), x.new_empty(tape.steps, h.shape[1], width, tape.size)
        )
        adjoints.h[0] = 0.0
        for part, g, last in ((slice(0, batch), gy, gh), (slice(batch, None), gdy, gdh)):
            _set(adjoints.h[1:, part], g)
            if last is not None:
                adjoints.h[-1, part] += last
        with torch.autocast(x.device.type, enabled=False):
            cell = ctx.cell(tape)
            cell.prepare(adjoints, ctx.lag, gc, gdc)
            _backward_sweep(cell, tape, adjoints, w, ctx.lag)
            gw = _weight_gradients(cell, tape, adjoints, ctx.needs_input_grad[8:])
            gx = None
            if any(ctx.needs_input_grad[2:4]):
                gx = _input_gradient(cell, tape, adjoints, w)
        c, dc = cell.first_adjoints()
        inputs = (None, None) if gx is None else (gx[:, :batch], gx[:, batch:])
        gradients = None, None, *inputs, adjoints.h[0, :batch], c, adjoints.h[0, batch:], dc, *gw
        return tuple(
            g if need else None for g, need in zip(gradients, ctx.needs_input_grad, strict=True)
        )


def recurrence(
    cell: type[Cell], x: Tensor, dx: Tensor | None, first: States, w: Weights, rows: int | None
) -> tuple[Tensor, Tensor | None, States]:
    """Run a cell over a sequence: y, ẏ (None if no tangent is carried) and the last states.

    Args:
        cell: the kind of layer.
        x: inputs (steps, batch, inputs).
        dx: their tangent for the first ``rows`` entries of the batch, None for zero.
        first: the first states, (batch, size), and their tangents, (rows, size); None for zero.
        w: the weights and their tangents.
        rows: how many entries of the batch carry a tangent; None to read it off the tangents given,
            all of them where only weights have one.

    Raises:
        OptionError: if there are more rows than the batch has, or tangents of another number of
            rows, or no steps.
    """
    given = {int(d.shape[-2]) for d in (dx, first.dh, first.dc) if d is not None}
    if rows is None:
        moving = w.dw_ih is not None or w.dw_hh is not None
        rows = max(given) if given else x.shape[1] if moving else 0
    if len(x) == 0 or rows > x.shape[1] or given - {rows}:
        raise OptionError(
            f"tangents are carried for {rows} of {x.shape[1]} entries of the batch over {len(x)} "
            f"steps, and came with {sorted(given)} rows: give all the same, at most the batch, and "
            "at least one step."
        )
    if not rows:
        w = w._replace(dw_ih=None, dw_hh=None)
    dtype = torch.promote_types(x.dtype, w.w_hh.dtype)
    tensors = [None if v is None else v.to(dtype) for v in (x, dx, *first, *w)]
    y, dy, h, c, dh, dc = _Recurrence.apply(cell, rows, *tensors)
    return y, dy, States(h, c, dh, dc)
