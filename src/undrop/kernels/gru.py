"""The GRU layer with its tangent along ε, and a backward written by hand.

With r, z sigmoids of their pre-activations, m = W_hn h₋ + b_hn, n = tanh(q), q = W_in x + b_in + r m:

    h = n + z (h₋ - n),    ḣ = ṅ + z (ḣ₋ - ṅ) + ż (h₋ - n),    ṅ = (1 - n²) q̇,    q̇ = ȧ + ṙ m + r ṁ.

Backward of a gate as in ``lstm.py``.
"""

from __future__ import annotations

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

__all__ = ["gru"]


class _GRU(Cell):
    """Slots r z m n."""

    slots = 4
    active = (0, 4)
    hidden = (0, 3)
    inputs = ((0, 2), (3, 4))
    stateful = False

    def begin(self) -> None:
        tape, rows = self.tape, self.tape.rows
        s = tape.slots[:, : tape.batch]
        self.r, self.z, self.m, self.n = (s[:, :, k].unbind(0) for k in range(4))
        self.r_z = s[:, :, :2].unbind(0)
        self.h = tape.h[:, : tape.batch].unbind(0)
        if rows:
            s, d = tape.slots[:, :rows], tape.slots[:, tape.batch :]
            self.at_r, self.at_z, self.at_m, self.at_n = (s[:, :, k].unbind(0) for k in range(4))
            self.dr, self.dz, self.dm, self.dn = (d[:, :, k].unbind(0) for k in range(4))
            self.at_r_z, self.dr_z = s[:, :, :2].unbind(0), d[:, :, :2].unbind(0)
            self.at_h, self.dh = tape.h[:, :rows].unbind(0), tape.h[:, tape.batch :].unbind(0)

    def primal(self, t: int) -> None:
        self.r_z[t].sigmoid_()
        n = self.n[t].addcmul_(self.r[t], self.m[t]).tanh_()
        torch.lerp(n, self.h[t], self.z[t], out=self.h[t + 1])

    def tangent(self, t: int) -> None:
        n, dn = self.at_n[t], self.dn[t]
        sigmoid_backward(self.dr_z[t], self.at_r_z[t], grad_input=self.dr_z[t])
        dn.addcmul_(self.dr[t], self.at_m[t]).addcmul_(self.at_r[t], self.dm[t])
        tanh_backward(dn, n, grad_input=dn)
        dh = torch.lerp(dn, self.dh[t], self.at_z[t], out=self.dh[t + 1])
        dh.addcmul_(self.dz[t], self.at_h[t] - n)

    def prepare(self, adjoints: Adjoints, lag: int, gc: Tensor | None, gdc: Tensor | None) -> None:
        self.begin()
        h, slots, rows = adjoints.h, adjoints.slots, self.tape.rows
        batch, size = h.shape[1] - rows, h.shape[2]
        self.g_h, s = h[:, :batch].unbind(0), slots[:, :batch]
        self.g_r_z, self.g_m, self.g_q = (
            s[:, :, :2].unbind(0),
            s[:, :, 2].unbind(0),
            s[:, :, 3].unbind(0),
        )
        self.g_s, self.kept = h.new_empty(batch, 2, size), h.new_empty(batch, size)
        if rows:
            self.g_dh, d = h[:, batch:].unbind(0), slots[:, batch:]
            self.g_dr_z, self.g_dm, self.g_dq = (
                d[:, :, :2].unbind(0),
                d[:, :, 2].unbind(0),
                d[:, :, 3].unbind(0),
            )
            self.g_at_h, self.g_at = h[:, :rows].unbind(0), slots[:, :rows].unbind(0)
            self.g_ds, self.curved = h.new_empty(rows, 2, size), h.new_empty(rows, 2, size)
            self.dkept = h.new_empty(rows, size)
            # What the tangent of a step owes to the primal's adjoints, until that step's turn.
            self.owed = [h.new_empty(rows, 7, size) for _ in range(lag + 1)]

    def tangent_adjoint(self, t: int) -> None:
        g, n, dn, r_z = self.g_dh[t + 1], self.at_n[t], self.dn[t], self.at_r_z[t]
        owed = self.owed[t % len(self.owed)]
        to_s, to_a, to_m, to_q, to_h = owed[:, :2], owed[:, 2:4], owed[:, 4], owed[:, 5], owed[:, 6]
        kept = torch.mul(g, self.at_z[t], out=self.dkept)
        self.g_dh[t].add_(kept)
        g_dn = g - kept
        torch.mul(g, self.dz[t], out=to_h)
        q = tanh_backward(g_dn, n, grad_input=self.g_dq[t])
        # -(1 - n²) g ż - 2 n ṅ dṅ, of which the first is what h = n + z (h₋ - n) owes to n.
        tanh_backward(to_h, n, grad_input=to_q).neg_()
        to_q.addcmul_(g_dn.mul_(dn), n, value=-2.0)
        torch.mul(q, self.at_r[t], out=self.g_dm[t])
        torch.mul(q, self.dr[t], out=to_m)
        torch.mul(q, self.at_m[t], out=self.g_ds[:, 0])
        torch.mul(q, self.dm[t], out=to_s[:, 0])
        torch.mul(g, self.at_h[t] - n, out=self.g_ds[:, 1])
        torch.mul(g, self.dh[t] - dn, out=to_s[:, 1])
        sigmoid_backward(self.g_ds, r_z, grad_input=self.g_dr_z[t])
        curved = torch.mul(self.dr_z[t], self.g_ds, out=self.curved)
        torch.addcmul(curved, curved, r_z, value=-2.0, out=to_a)

    def primal_adjoint(self, t: int) -> None:
        g, n, rows, gs = self.g_h[t + 1], self.n[t], self.tape.rows, self.g_s
        kept = torch.mul(g, self.z[t], out=self.kept)
        self.g_h[t].add_(kept)
        q = tanh_backward(g - kept, n, grad_input=self.g_q[t])
        owed = self.owed[t % len(self.owed)] if rows else g
        if rows:
            q[:rows].add_(owed[:, 5])
            self.g_at_h[t].add_(owed[:, 6])
        torch.mul(q, self.r[t], out=self.g_m[t])
        torch.mul(q, self.m[t], out=gs[:, 0])
        torch.mul(g, self.h[t] - n, out=gs[:, 1])
        if rows:
            gs[:rows].add_(owed[:, :2])
        sigmoid_backward(gs, self.r_z[t], grad_input=self.g_r_z[t])
        if rows:
            self.g_at[t][:, :3].add_(owed[:, 2:5])

    def first_adjoints(self) -> tuple[None, None]:
        return None, None

    @staticmethod
    def bias(b_ih: Tensor, b_hh: Tensor) -> Tensor:
        return torch.cat((b_ih[:2] + b_hh[:2], b_hh[2:], b_ih[2:]))


def gru(
    x: Tensor,
    dx: Tensor | None,
    state: Tensor | None,
    dstate: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    dw_ih: Tensor | None = None,
    dw_hh: Tensor | None = None,
    *,
    rows: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """One layer of a GRU in one direction, with its tangent; weights as in ``torch.nn.GRU``.

    Differentiable once, in all tensors, through primal and tangent outputs alike. The tangent may be
    carried for the first r entries of the batch only, at 1 + r/B times the cost of none.

    Args:
        x: inputs (T, B, I).
        dx: their tangent ∂x/∂ε (T, r, I); None for zero, as for all tangents.
        state: h before the first step, (B, H).
        dstate: its tangent, (r, H).
        w_ih: (3H, I).
        w_hh: (3H, H).
        b_ih: (3H,), or None for no bias; the same holds for b_hh.
        b_hh: (3H,).
        dw_ih: the tangent of w_ih, as DropConnect has one.
        dw_hh: that of w_hh.
        rows: r, where it can't be read off the tangents: by default B if only weights have one.

    Returns:
        y (T, B, H); ẏ (T, r, H); h after the last step; its tangent. Where r = 0 the tangents are None.
    """
    w = Weights(w_ih, w_hh, b_ih, b_hh, dw_ih, dw_hh)
    y, dy, last = recurrence(_GRU, x, dx, States(state, None, dstate, None), w, rows)
    assert last.h is not None
    return y, dy, last.h, last.dh
