"""Scaled dot product attention: torch's fused kernels have no forward-mode rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.engines.rules.softmax import softmax
from undrop.sites import Handler, Interception
from undrop.sites.attention import AttentionCall, written_out

__all__ = ["RULES"]


def _attention(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Matrix products, and our rule for the softmax between them."""
    return written_out(
        mode,
        AttentionCall(*args, **kwargs),
        lambda x, dim: softmax(mode, torch.softmax, (x, dim), {}),
    )


RULES: Mapping[Callable[..., Any], Handler] = {F.scaled_dot_product_attention: _attention}
