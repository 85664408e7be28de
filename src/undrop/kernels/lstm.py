"""The LSTM layer with its tangent along ε, and a backward written by hand.

With pre-activations a and tangents ȧ, s = σ(a) or tanh(a) and ṡ = s'(a)·ȧ:

    c = f c₋ + i g,    ċ = ḟ c₋ + f ċ₋ + i̇ g + i ġ,    h = o τ,    ḣ = ȯ τ + o τ̇,
    τ = tanh c,    τ̇ = (1 - τ²) ċ.

Backward of a gate: ``dȧ = s'·dṡ`` and ``da = s'·ds + s''·ȧ·dṡ``, where s''·ȧ is (1 - 2s)·ṡ for a
sigmoid and -2s·ṡ for tanh.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from undrop.kernels.recurrent import (
    Adjoints,
    Cell,
    States,
    Weights,
    recurrence,
    sigmoid_backward,
    tanh_backward,
)

__all__ = ["lstm"]


_BLOCK = 8  # steps whose slopes are worked out at once


class _Slopes:
    """What adjoints are multiplied by, worked out for a block of steps at a time.

    ``gates`` are s'(a), ``state`` is ∂h/∂c = o(1 - τ²), and along the tangent ``dgates`` are s''(a)·ȧ
    and ``dstate`` is ∂ḣ/∂c = ȯ(1 - τ²) - 2o τ τ̇, each a list by step within the block.

    Args:
        s: the slots of all steps in some rows.
        d: those of their tangent.
    """

    def __init__(self, s: Tensor, d: Tensor | None = None) -> None:
        self._s, self._d = s, d
        rows, size = s.shape[1], s.shape[3]
        self._gates, self._state = (
            s.new_empty(_BLOCK, rows, 4, size),
            s.new_empty(_BLOCK, rows, size),
        )
        self.gates, self.state = self._gates.unbind(0), self._state.unbind(0)
        if d is not None:
            self._dgates, self._dstate = (torch.empty_like(x) for x in (self._gates, self._state))
            self.dgates, self.dstate = self._dgates.unbind(0), self._dstate.unbind(0)

    def enter(self, t: int) -> int:
        """Go back to step t; its place in the block."""
        place = t % _BLOCK
        if place == _BLOCK - 1 or t == len(self._s) - 2:
            self._work_out(slice(t - place, t + 1), slice(0, place + 1))
        return place

    def _work_out(self, steps: slice, places: slice) -> None:
        s = self._s[steps]
        gates, g, o, tau = s[:, :, 1:5], s[:, :, 3], s[:, :, 4], s[:, :, 5]
        slopes = torch.addcmul(gates, gates, gates, value=-1.0, out=self._gates[places])
        torch.mul(g, g, out=slopes[:, :, 2]).neg_().add_(1.0)
        tanh_backward(o, tau, grad_input=self._state[places])
        if self._d is None:
            return
        d = self._d[steps]
        curved = torch.mul(gates, d[:, :, 1:5], out=self._dgates[places]).mul_(-2.0)
        curved[:, :, :2].add_(d[:, :, 1:3])
        curved[:, :, 3].add_(d[:, :, 4])
        state = tanh_backward(d[:, :, 4], tau, grad_input=self._dstate[places])
        state.addcmul_(tau * d[:, :, 5], o, value=-2.0)


class _Owed(NamedTuple):
    """What the tangent of a step owes to the primal's adjoints, until that step's turn."""

    both: Tensor  # (2, rows, 5, size): adjoints of the tangent's c₋ i f g o, and what is owed
    c_i: Tensor  # slots of these
    f_g: Tensor
    o: Tensor
    g_dc: Tensor  # that of ċ₋
    g_ds: Tensor  # those of the tangent's gates
    s: Tensor  # what is owed to c₋ and the gates
    a: Tensor  # to the pre-activations
    c: Tensor  # to c

    @classmethod
    def new(cls, like: Tensor, rows: int) -> _Owed:
        """Buffers for some rows."""
        size = like.shape[-1]
        both = like.new_empty(2, rows, 5, size)
        a, c = like.new_empty(rows, 4, size), like.new_empty(rows, size)
        slots = both[:, :, :2], both[:, :, 2:4], both[:, :, 4]
        return cls(both, *slots, both[0, :, 0], both[0, :, 1:], both[1], a, c)


class _LSTM(Cell):
    """Slots c₋ i f g o τ: torch's order of gates, with the factors of c, c₋ f and i g, as pairs."""

    slots = 6
    active = hidden = (1, 5)
    inputs = ((1, 5),)
    stateful = True

    def begin(self) -> None:
        tape = self.tape
        s = tape.slots[:, : tape.batch]
        self.c, self.i, self.f, self.g, self.o, self.tau = (s[:, :, n].unbind(0) for n in range(6))
        self.i_f = s[:, :, 1:3].unbind(0)
        self.h = tape.h[:, : tape.batch].unbind(0)
        if tape.rows:
            s, d = tape.slots[:, : tape.rows], tape.slots[:, tape.batch :]
            self.at_g, self.at_o, self.at_tau = (s[:, :, n].unbind(0) for n in (3, 4, 5))
            self.at_c_i, self.at_i_f, self.at_f_g = (s[:, :, n : n + 2].unbind(0) for n in range(3))
            self.dc, self.dg, self.do, self.dtau = (d[:, :, n].unbind(0) for n in (0, 3, 4, 5))
            self.dc_i, self.di_f, self.df_g = (d[:, :, n : n + 2].unbind(0) for n in range(3))
            self.dh = tape.h[:, tape.batch :].unbind(0)
            self.products = tape.h.new_empty(tape.rows, 2, tape.size)
            self.terms = self.products.unbind(1)

    def primal(self, t: int) -> None:
        self.i_f[t].sigmoid_()
        self.g[t].tanh_()
        self.o[t].sigmoid_()
        c = torch.mul(self.c[t], self.f[t], out=self.c[t + 1]).addcmul_(self.i[t], self.g[t])
        torch.tanh(c, out=self.tau[t])
        torch.mul(self.o[t], self.tau[t], out=self.h[t + 1])

    def tangent(self, t: int) -> None:
        o, tau = self.at_o[t], self.at_tau[t]
        sigmoid_backward(self.di_f[t], self.at_i_f[t], grad_input=self.di_f[t])
        tanh_backward(self.dg[t], self.at_g[t], grad_input=self.dg[t])
        sigmoid_backward(self.do[t], o, grad_input=self.do[t])
        products = torch.mul(self.at_c_i[t], self.df_g[t], out=self.products)
        products.addcmul_(self.dc_i[t], self.at_f_g[t])
        dc = torch.add(*self.terms, out=self.dc[t + 1])
        tanh_backward(dc, tau, grad_input=self.dtau[t])
        torch.mul(self.do[t], tau, out=self.dh[t + 1]).addcmul_(o, self.dtau[t])

    def prepare(self, adjoints: Adjoints, lag: int, gc: Tensor | None, gdc: Tensor | None) -> None:
        tape, h = self.tape, adjoints.h
        batch, rows, size = tape.batch, tape.rows, tape.size
        s = tape.slots[:, :batch]
        self.c_i, self.f_g = s[:, :, :2].unbind(0), s[:, :, 2:4].unbind(0)
        self.tau = s[:, :, 5].unbind(0)
        self.slopes = _Slopes(s)
        self.g_h, self.g_a = h[:, :batch].unbind(0), adjoints.slots[:, :batch].unbind(0)
        self.g_c, s = h.new_empty(batch, size), h.new_empty(batch, 5, size)
        self.g_c_column, self.g_c_at = self.g_c.unsqueeze(1), self.g_c[:rows]
        self.g_c_i, self.g_f_g, self.g_o, self.g_s = s[:, :2], s[:, 2:4], s[:, 4], s[:, 1:]
        self.g_c_before, self.g_s_at = s[:, 0], s[:rows]
        self.g_c_next = h.new_zeros(batch, size) if gc is None else gc
        if rows:
            self.dslopes = _Slopes(tape.slots[:, :rows], tape.slots[:, batch:])
            # The primal's rows and the tangent's below one another, (2, rows, slots, size).
            strides = tape.slots.stride()
            both = tape.slots.as_strided(
                (len(tape.slots), 2, rows, self.slots, size),
                (strides[0], batch * strides[1], *strides[1:]),
            )
            self.both_c_i, self.both_f_g = both[:, :, :, :2].unbind(0), both[:, :, :, 2:4].unbind(0)
            self.both_tau = both[:, :, :, 5].unbind(0)
            self.g_dh, self.g_da = h[:, batch:].unbind(0), adjoints.slots[:, batch:].unbind(0)
            self.g_at = adjoints.slots[:, :rows].unbind(0)
            self.g_dc = h.new_empty(rows, size)
            self.g_dc_column = self.g_dc.unsqueeze(1)
            self.g_dc_next = h.new_zeros(rows, size) if gdc is None else gdc
            self.owed = [_Owed.new(h, rows) for _ in range(lag + 1)]

    def tangent_adjoint(self, t: int) -> None:
        gh, gc, owed = self.g_dh[t + 1], self.g_dc_column, self.owed[t % len(self.owed)]
        slopes, n = self.dslopes, self.dslopes.enter(t)
        torch.mul(gh, slopes.dstate[n], out=owed.c)
        torch.addcmul(self.g_dc_next, gh, slopes.state[n], out=self.g_dc)
        torch.mul(gc, self.both_f_g[t], out=owed.c_i)
        torch.mul(gc, self.both_c_i[t], out=owed.f_g)
        torch.mul(gh, self.both_tau[t], out=owed.o)
        torch.mul(owed.g_ds, slopes.gates[n], out=self.g_da[t])
        torch.mul(owed.g_ds, slopes.dgates[n], out=owed.a)
        self.g_dc_next = owed.g_dc

    def primal_adjoint(self, t: int) -> None:
        gh, gc, slopes, n = self.g_h[t + 1], self.g_c_column, self.slopes, self.slopes.enter(t)
        owed = self.owed[t % len(self.owed)] if self.tape.rows else None
        torch.addcmul(self.g_c_next, gh, slopes.state[n], out=self.g_c)
        if owed is not None:
            self.g_c_at.add_(owed.c)
        torch.mul(gc, self.f_g[t], out=self.g_c_i)
        torch.mul(gc, self.c_i[t], out=self.g_f_g)
        torch.mul(gh, self.tau[t], out=self.g_o)
        if owed is not None:
            self.g_s_at.add_(owed.s)
        torch.mul(self.g_s, slopes.gates[n], out=self.g_a[t])
        if owed is not None:
            self.g_at[t].add_(owed.a)
        self.g_c_next = self.g_c_before

    def first_adjoints(self) -> tuple[Tensor | None, Tensor | None]:
        return self.g_c_next, self.g_dc_next if self.tape.rows else None

    @staticmethod
    def bias(b_ih: Tensor, b_hh: Tensor) -> Tensor:
        return b_ih + b_hh


def lstm(
    x: Tensor,
    dx: Tensor | None,
    state: tuple[Tensor, Tensor] | None,
    dstate: tuple[Tensor, Tensor] | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    dw_ih: Tensor | None = None,
    dw_hh: Tensor | None = None,
    *,
    rows: int | None = None,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """One layer of an LSTM in one direction, with its tangent; weights as in ``torch.nn.LSTM``.

    Differentiable once, in all tensors, through primal and tangent outputs alike. The tangent may be
    carried for the first r entries of the batch only, at 1 + r/B times the cost of none.

    Args:
        x: inputs (T, B, I).
        dx: their tangent ∂x/∂ε (T, r, I); None for zero, as for all tangents.
        state: h and c before the first step, (B, H) each.
        dstate: their tangents, (r, H) each.
        w_ih: (4H, I).
        w_hh: (4H, H).
        b_ih: (4H,), or None for no bias; the same holds for b_hh.
        b_hh: (4H,).
        dw_ih: the tangent of w_ih, as DropConnect has one.
        dw_hh: that of w_hh.
        rows: r, where it can't be read off the tangents: by default B if only weights have one.

    Returns:
        y (T, B, H); ẏ (T, r, H); h and c after the last step; their tangents. Where r = 0 the tangents
        are None.
    """
    first = States(*(state or (None, None)), *(dstate or (None, None)))
    w = Weights(w_ih, w_hh, b_ih, b_hh, dw_ih, dw_hh)
    y, dy, (h, c, dh, dc) = recurrence(_LSTM, x, dx, first, w, rows)
    assert h is not None
    assert c is not None
    return y, dy, (h, c), None if dh is None or dc is None else (dh, dc)
