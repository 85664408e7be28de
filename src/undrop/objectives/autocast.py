"""Torch's modes around a step, for those of its passes that run later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

__all__ = ["AutocastState"]


class AutocastState:
    """Autocast as it is now; a step is only made where gradients are on.

    Later samples of noise run in ``backward()`` or when a part is read, which is mostly outside of
    the ``with torch.autocast(…)`` that the step was made in, and may be under ``torch.no_grad()``.

    Args:
        tensors: those of the passes, for the types of their devices.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        types = sorted({t.device.type for t in tensors})
        cache = torch.is_autocast_cache_enabled()
        self._autocasts = [
            torch.autocast(
                each,
                dtype=torch.get_autocast_dtype(each),
                enabled=torch.is_autocast_enabled(each),
                cache_enabled=cache,
            )
            for each in types
            if torch.amp.is_autocast_available(each)
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """What runs within is run as if it were then."""
        with torch.inference_mode(False), ExitStack() as stack:  # that puts gradients on as well
            for autocast in self._autocasts:
                stack.enter_context(autocast)
            yield
