"""Dropout on the probabilities of FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from undrop.intercept.interception import SITE_RULES, Interception
from undrop.kernels.flex import FlexCall, attend, flex_attention, written_out


def _factors(mode: Interception, call: FlexCall) -> Tensor | None:
    """1 + ε·σ·η in the shape of the probabilities; None where it is 1."""
    if call.dropout_p == 0.0:
        return None
    ones = call.ones()
    factors = mode.noisy(
        ones, call.dropout_p, kind="attention", mask="per probability", label="attention"
    )
    return None if factors is ones else factors


@SITE_RULES.register(flex_attention)
def _flex_attention(mode: Interception, *args: Any) -> Any:
    call = FlexCall(*args)
    return attend(call, _factors(mode, call))


def flex_written_out(
    mode: Interception,
    call: FlexCall,
    softmax: Callable[[Tensor, int], Tensor] = torch.softmax,
) -> Any:
    """The same in plain operations, for engines that no kernel serves."""
    return written_out(call, _factors(mode, call), softmax)
