"""The dropout functions of torch and of undrop, as sites."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.errors import UnsupportedDropoutError
from undrop.intercept.interception import SITE_RULES, Interception
from undrop.noise import structured_dropout

aten: Any = torch.ops.aten


def _noisy(mode: Interception, h: Tensor, p: float, inplace: bool, kind: str, **how: Any) -> Tensor:
    if not inplace:
        return mode.noisy(h, p, kind=kind, label=kind, **how)
    # The caller may use h itself afterwards: like torch's own in-place dropout this writes into h.
    # The clone keeps the old value for the derivative in η.
    return h.copy_(mode.noisy(h.clone(), p, kind=kind, label=kind, **how))


@SITE_RULES.register(F.dropout)
def _dropout(
    mode: Interception,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    active = training and p
    return _noisy(mode, input, p, inplace, "dropout") if active else mode.off(input, training)


@SITE_RULES.register(torch.dropout, aten.dropout, aten.dropout.default)
def _aten_dropout(mode: Interception, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(mode, input, p, train)


@SITE_RULES.register(torch.dropout_, aten.dropout_, aten.dropout_.default)
def _aten_dropout_(mode: Interception, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(mode, input, p, train, inplace=True)


@SITE_RULES.register(torch.native_dropout, aten.native_dropout, aten.native_dropout.default)
def _native_dropout(
    mode: Interception, input: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Any]:
    """It returns its mask too, which the caller may use: so it is a mask made by hand."""
    if train is False or not p:
        return mode.off(input, train), torch.ones_like(input, dtype=torch.bool)
    keep = mode.bernoulli(
        lambda k: torch.full_like(input, k, requires_grad=False),
        lambda: torch.rand_like(input) >= p,
        1.0 - p,
        torch.bool,
    )
    scaled = input / (1.0 - p)
    out = scaled * keep if isinstance(keep, Tensor) else keep.mul(scaled)
    return out, keep


def _feature_dropout(
    mode: Interception,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    kind: str,
    unbatched: int | None = None,
    train: bool | None = None,
) -> Tensor:
    """One η per feature map: dimensions after the channel share it.

    Torch takes (C, L) of dropout1d and (C, D, H, W) of dropout3d for one example without a batch:
    ``unbatched`` is that number of dimensions.
    """
    training = training if train is None else train
    if not training or not p:
        return mode.off(input, training)
    shared = tuple(range(1 if input.dim() == unbatched else 2, input.dim()))
    return _noisy(mode, input, p, inplace, kind, mask="per feature map", shared=shared)


SITE_RULES.register(F.dropout1d)(partial(_feature_dropout, kind="dropout1d", unbatched=2))
SITE_RULES.register(F.dropout2d)(partial(_feature_dropout, kind="dropout2d"))
SITE_RULES.register(F.dropout3d)(partial(_feature_dropout, kind="dropout3d", unbatched=4))
SITE_RULES.register(torch.feature_dropout, aten.feature_dropout, aten.feature_dropout.default)(
    partial(_feature_dropout, kind="dropout2d")
)
SITE_RULES.register(torch.feature_dropout_, aten.feature_dropout_, aten.feature_dropout_.default)(
    partial(_feature_dropout, kind="dropout2d", inplace=True)
)


@SITE_RULES.register(structured_dropout)
def _structured_dropout(
    mode: Interception, h: Tensor, p: float, *, training: bool = True, **structure: Any
) -> Tensor:
    active = training and p
    return mode.noisy(h, p, **{"kind": "dropout", **structure}) if active else mode.off(h, training)


@SITE_RULES.register(
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
)
def _alpha_dropout(
    mode: Interception,
    input: Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    *,
    train: bool | None = None,
) -> Tensor:
    if not (training if train is None else train) or not p:
        return input
    name = mode.site(input.shape, p, kind="alpha").name
    raise UnsupportedDropoutError(
        f"alpha dropout at {name!r} is not multiplicative zero-mean noise, so undrop can't take it "
        "apart: use nn.Dropout there, or put that module in eval mode."
    )
