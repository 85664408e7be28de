"""LayerDrop: a layer that a random branch skips is run, and its output blended with its input.

A model asks ``if torch.rand([]) < p: continue``. It gets the more probable answer, by which the layer
runs. The next module called is the layer: its output y becomes x + m·(y - x), with x its input and m
the mask of the branch. Where that is not what the branch does, the module that asks is run a second
time with the other answer, and its outputs y and z become z + m·(y - z).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from undrop.intercept.running_statistics import keep_buffers

if TYPE_CHECKING:
    from undrop.intercept.random_values import Mask


class Blend:
    """Waits for the next module that this thread calls, and blends its output.

    Args:
        mask: the mask of the branch.
        factor: m, the soft value of "the layer runs".
    """

    def __init__(self, mask: Mask, factor: Tensor) -> None:
        self.mask, self.factor = mask, factor
        self._thread = threading.get_ident()
        self._layer: nn.Module | None = None
        self._hooks = (
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, with_kwargs=True),
        )

    def remove(self) -> None:
        """Wait no longer."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._layer is None and threading.get_ident() == self._thread:
            self._layer = module

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if module is not self._layer or threading.get_ident() != self._thread:
            return None
        self.remove()
        self.mask.mode.blended(self)
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not inputs:
            raise self.mask.refuse("a branch around a module without tensors", branch=True)
        return self._blended(inputs[0], output)

    def _blended(self, x: Tensor, output: Any) -> Any:
        """Return the output with x + m·(y - x) in the place of its first tensor y."""
        if isinstance(output, Tensor) and output.shape == x.shape:
            return self._mixed(x, output)
        if isinstance(output, Mapping) and output:
            name = next(iter(output))
            output[name] = self._blended(x, output[name])  # type: ignore[index]
            return output
        if isinstance(output, (tuple, list)) and output and not hasattr(output, "_fields"):
            return type(output)((self._blended(x, output[0]), *output[1:]))
        raise self.mask.refuse(
            "a branch around a module whose output is not like its input", branch=True
        )

    def _mixed(self, x: Tensor, y: Tensor) -> Tensor:
        return x + self.factor.reshape(()).to(y.dtype) * (y - x)


class BlendAround(Blend):
    """Blends what the module that asks for the branch returns in both branches.

    Args:
        mask: the mask of the branch.
        factor: m, the soft value of the branch that was taken.
    """

    def __init__(self, mask: Mask, factor: Tensor) -> None:
        super().__init__(mask, factor)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
            frame = frame.f_back
        self._layer = None if frame is None else frame.f_locals["self"]

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if module is not self._layer or threading.get_ident() != self._thread:
            return None
        self.remove()
        mode = self.mask.mode
        mode.blended(self)
        with keep_buffers(module):
            other = mode.replayed(self.mask, lambda: module.forward(*args, **kwargs))
        return self._both(other, output)

    def _both(self, other: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and isinstance(other, Tensor) and other.shape == output.shape:
            return self._mixed(other, output)
        same = type(output) in (tuple, list) and type(other) is type(output)
        if same and len(output) == len(other):
            return type(output)(map(self._both, other, output))
        if output is other:
            return output
        raise self.mask.refuse("a branch between results of different kinds", branch=True)
