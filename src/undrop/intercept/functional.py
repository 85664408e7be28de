"""The dropout functions of torch and of undrop, as sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrop.errors import UnsupportedDropoutError
from undrop.intercept.interception import Interception, intercepts
from undrop.noise import structured_dropout


class _Call(NamedTuple):
    h: Tensor
    p: float
    training: bool
    inplace: bool

    @property
    def idle(self) -> bool:
        return not self.training or self.p == 0.0


def _read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    """The arguments of any of torch's dropout functions, which share one order of them."""
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    training = given.get("training", given.get("train", True))
    return _Call(
        given["input"], float(given.get("p", 0.5)), bool(training), bool(given.get("inplace"))
    )


def _noisy(mode: Interception, call: _Call, kind: str, **structure: Any) -> Tensor:
    module = mode.running_module()
    label: str | None = kind
    if isinstance(module, nn.modules.dropout._DropoutNd):
        label = None  # the module is the site
    elif isinstance(module, nn.MultiheadAttention):
        label = kind = "attention"
    if not call.inplace:
        return mode.noisy(call.h, call.p, kind=kind, label=label, **structure)
    # The caller may go on to use h itself: like torch's own in-place dropout this writes into h. The
    # clone keeps the old value for the derivative in η.
    return call.h.copy_(mode.noisy(call.h.clone(), call.p, kind=kind, label=label, **structure))


@intercepts(F.dropout, torch.dropout, torch.dropout_)
def _dropout(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    call = _read(args, kwargs)
    if func is torch.dropout_:
        call = call._replace(inplace=True)
    return call.h if call.idle else _noisy(mode, call, "dropout")


@intercepts(torch.native_dropout)
def _native_dropout(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    out = _dropout(mode, func, args, kwargs)
    return out, torch.ones_like(out, dtype=torch.bool)


@intercepts(F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_)
def _feature_dropout(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """One η per feature map: dimensions after the channel share it."""
    call = _read(args, kwargs)
    if call.idle:
        return call.h
    if func is torch.feature_dropout_:
        call = call._replace(inplace=True)
    # torch takes (C, L) of dropout1d and (C, D, H, W) of dropout3d for one example without batch.
    unbatched = (func is F.dropout1d and call.h.dim() == 2) or (
        func is F.dropout3d and call.h.dim() == 4
    )
    shared = tuple(range(1 if unbatched else 2, call.h.dim()))
    kind = "dropout2d" if "feature" in func.__name__ else func.__name__
    return _noisy(mode, call, kind, mask="per feature map", shared=shared)


@intercepts(structured_dropout)
def _structured_dropout(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    call = _read(args, kwargs)
    structure = {k: v for k, v in kwargs.items() if k not in ("p", "training")}
    return call.h if call.idle else mode.noisy(call.h, call.p, **structure)


@intercepts(
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
)
def _alpha_dropout(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    call = _read(args, kwargs)
    if call.idle:
        return call.h
    name = mode.site(call.h.shape, call.p, kind="alpha").name
    raise UnsupportedDropoutError(
        f"alpha dropout at {name!r} is not multiplicative zero-mean noise, so undrop can't take it "
        "apart: use nn.Dropout there, or put that module in eval mode."
    )
