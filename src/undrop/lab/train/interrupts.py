"""Ctrl-C and SIGTERM as a wish to stop at the next step, not a blow in the middle of one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Interrupts", "listening"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Whether, and by which signal, the process was asked to stop."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal; the second one interrupts at once."""
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)


@contextlib.contextmanager
def listening() -> Iterator[Interrupts]:
    """Note signals instead of dying of them, in the main thread; elsewhere none ever comes."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    former = {number: signal.signal(number, interrupts) for number in _SIGNALS}
    try:
        yield interrupts
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
