"""The autocast state of a step, for its passes that run later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch

from undrop.torch_compat import other_accelerator


class AutocastState:
    """Autocast as it is now, on the CPU and on the accelerator.

    Further samples of noise run in ``backward()`` or when a part is read. That is usually outside
    the step's ``with torch.autocast(…)``, and may be under ``torch.no_grad()``.
    """

    def __init__(self) -> None:
        cache = torch.is_autocast_cache_enabled()
        self._autocasts = [
            torch.autocast(
                device,
                dtype=torch.get_autocast_dtype(device),
                enabled=torch.is_autocast_enabled(device),
                cache_enabled=cache,
            )
            for device in _devices()
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run the block under that state, with gradients enabled."""
        with (
            torch.inference_mode(False),
            ExitStack() as stack,
        ):  # that enables gradients too
            for autocast in self._autocasts:
                stack.enter_context(autocast)
            yield


@cache
def _devices() -> tuple[str, ...]:
    """Return the types of device that autocast knows here."""
    kinds = ["cpu"]
    if torch.cuda.is_available():
        kinds.append("cuda")
    if torch.backends.mps.is_available():
        kinds.append("mps")
    other = other_accelerator()
    if other is not None:
        kinds.append(other.type)
    return tuple(kind for kind in kinds if torch.amp.is_autocast_available(kind))
