"""The LSTM layer with its tangent along ε, and a backward written by hand.

With pre-activations a and tangents ȧ, s = σ(a) or tanh(a) and ṡ = s'(a)·ȧ:

    c = f c₋ + i g,    ċ = ḟ c₋ + f ċ₋ + i̇ g + i ġ,    h = o τ,    ḣ = ȯ τ + o τ̇,
    τ = tanh c,    τ̇ = (1 - τ²) ċ.

Backward of a gate: ``dȧ = s'·dṡ`` and ``da = s'·ds + s''·ȧ·dṡ``, where s''·ȧ is (1 - 2s)·ṡ for a
sigmoid and -2s·ṡ for tanh.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undrop.kernels.recurrent import (
    Adjoints,
    Cell,
    States,
    Tape,
    Weights,
    recurrence,
    sigmoid_backward,
    tanh_backward,
)

__all__ = ["lstm"]


class _LSTM(Cell):
    """Slots c₋ i f g o τ: torch's order of gates, with the factors of c, c₋ f and i g, as pairs."""

    slots = 6
    active = hidden = (1, 5)
    inputs = ((1, 5),)
    stateful = True

    def __init__(self, tape: Tape) -> None:
        self.rows = rows = tape.rows
        self._primal_views(tape.slots[:, : tape.batch], tape.h[:, : tape.batch])
        if rows:
            self._tangent_views(tape.slots[:, :rows], tape.slots[:, tape.batch :])
            self.dh = tape.h[:, tape.batch :].unbind(0)
            self.products = tape.h.new_empty(rows, 2, tape.size)

    def _primal_views(self, s: Tensor, h: Tensor) -> None:
        self.c, self.i, self.f, self.g, self.o, self.tau = (s[:, :, n].unbind(0) for n in range(6))
        self.i_f, self.c_i, self.f_g = (s[:, :, n : n + 2].unbind(0) for n in (1, 0, 2))
        self.h = h.unbind(0)

    def _tangent_views(self, s: Tensor, d: Tensor) -> None:
        """Views of the tangent's slots d, and of the primal's in the same rows, s."""
        self.at_g, self.at_o, self.at_tau = (s[:, :, n].unbind(0) for n in (3, 4, 5))
        self.at_i_f, self.at_c_i, self.at_f_g = (s[:, :, n : n + 2].unbind(0) for n in (1, 0, 2))
        self.at_gates, self.dgates = s[:, :, 1:5].unbind(0), d[:, :, 1:5].unbind(0)
        self.dc, self.dg, self.do, self.dtau = (d[:, :, n].unbind(0) for n in (0, 3, 4, 5))
        self.di_f, self.dc_i, self.df_g = (d[:, :, n : n + 2].unbind(0) for n in (1, 0, 2))

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
        dc = torch.add(products[:, 0], products[:, 1], out=self.dc[t + 1])
        tanh_backward(dc, tau, grad_input=self.dtau[t])
        torch.mul(self.do[t], tau, out=self.dh[t + 1]).addcmul_(o, self.dtau[t])

    def prepare(self, adjoints: Adjoints, lag: int, gc: Tensor | None, gdc: Tensor | None) -> None:
        h, slots = adjoints.h, adjoints.slots
        batch, size, rows = h.shape[1] - self.rows, h.shape[2], self.rows
        self.g_h, primal = h[:, :batch].unbind(0), slots[:, :batch]
        self.g_i_f, self.g_g, self.g_o = (
            primal[:, :, :2].unbind(0),
            primal[:, :, 2].unbind(0),
            primal[:, :, 3].unbind(0),
        )
        self.g_c = h.new_zeros(batch, size) if gc is None else gc.clone()
        self.g_s, self.g_tau = h.new_empty(batch, 5, size), h.new_empty(batch, size)
        if rows:
            self.g_dh, tangent = h[:, batch:].unbind(0), slots[:, batch:]
            self.g_di_f, self.g_dg, self.g_do = (
                tangent[:, :, :2].unbind(0),
                tangent[:, :, 2].unbind(0),
                tangent[:, :, 3].unbind(0),
            )
            self.g_at = slots[:, :rows].unbind(0)
            self.g_dc = h.new_zeros(rows, size) if gdc is None else gdc.clone()
            self.g_ds, self.g_dtau = h.new_empty(rows, 5, size), h.new_empty(rows, size)
            self.curved = h.new_empty(rows, 4, size)
            # What the tangent of a step owes to the primal's adjoints, until that step's turn.
            self.owed = [h.new_empty(rows, 10, size) for _ in range(lag + 1)]

    def tangent_adjoint(self, t: int) -> None:
        gh, o, tau, dtau = self.g_dh[t + 1], self.at_o[t], self.at_tau[t], self.dtau[t]
        owed = self.owed[t % len(self.owed)]
        to_s, to_a, to_c = owed[:, :5], owed[:, 5:9], owed[:, 9]
        tanh_backward(torch.mul(gh, self.do[t], out=to_c), tau, grad_input=to_c)
        g = torch.mul(gh, o, out=self.g_dtau)
        gc = self.g_dc.add_(tanh_backward(g, tau, grad_input=to_a[:, 0])).unsqueeze(1)
        to_c.addcmul_(g.mul_(dtau), tau, value=-2.0)
        gs = self.g_ds
        torch.mul(gc, self.at_f_g[t], out=gs[:, :2])
        torch.mul(gc, self.at_c_i[t], out=gs[:, 2:4])
        torch.mul(gh, tau, out=gs[:, 4])
        torch.mul(gc, self.df_g[t], out=to_s[:, :2])
        torch.mul(gc, self.dc_i[t], out=to_s[:, 2:4])
        torch.mul(gh, dtau, out=to_s[:, 4])
        self.g_dc.copy_(gs[:, 0])
        sigmoid_backward(gs[:, 1:3], self.at_i_f[t], grad_input=self.g_di_f[t])
        tanh_backward(gs[:, 3], self.at_g[t], grad_input=self.g_dg[t])
        sigmoid_backward(gs[:, 4], o, grad_input=self.g_do[t])
        curved = torch.mul(self.dgates[t], gs[:, 1:], out=self.curved)
        torch.mul(curved, self.at_gates[t], out=to_a).mul_(-2.0)
        to_a[:, :2].add_(curved[:, :2])
        to_a[:, 3].add_(curved[:, 3])

    def primal_adjoint(self, t: int) -> None:
        gh, o, tau, rows = self.g_h[t + 1], self.o[t], self.tau[t], self.rows
        g = torch.mul(gh, o, out=self.g_tau)
        self.g_c.add_(tanh_backward(g, tau, grad_input=g))
        gc, gs = self.g_c.unsqueeze(1), self.g_s
        if rows:
            owed = self.owed[t % len(self.owed)]
            self.g_c[:rows].add_(owed[:, 9])
        torch.mul(gc, self.f_g[t], out=gs[:, :2])
        torch.mul(gc, self.c_i[t], out=gs[:, 2:4])
        torch.mul(gh, tau, out=gs[:, 4])
        if rows:
            gs[:rows].add_(owed[:, :5])
        self.g_c.copy_(gs[:, 0])
        sigmoid_backward(gs[:, 1:3], self.i_f[t], grad_input=self.g_i_f[t])
        tanh_backward(gs[:, 3], self.g[t], grad_input=self.g_g[t])
        sigmoid_backward(gs[:, 4], o, grad_input=self.g_o[t])
        if rows:
            self.g_at[t].add_(owed[:, 5:9])

    def first_adjoints(self) -> tuple[Tensor | None, Tensor | None]:
        return self.g_c, self.g_dc if self.rows else None

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
