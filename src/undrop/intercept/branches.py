"""LayerDrop: run a layer that a random branch may skip, and blend its output with its input.

A model evaluates ``if torch.rand([]) < p: continue``, and the interception returns the value of
the condition for which the layer runs. The next module that the model calls is the layer: its output y
becomes x + m·(y - x), where x is its input and m is the mask of the branch. If the branch does something
else, the enclosing module (the one that evaluates the branch) runs a second time with the other value of
the condition, and its two outputs y and z become z + m·(y - z).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks

from undrop.intercept.running_statistics import keep_buffers

if TYPE_CHECKING:
    from undrop.intercept.hand_masks import HandMasks
    from undrop.intercept.random_values import Mask


class ModuleTracker:
    """Tracks which modules this thread is running.

    It writes into torch's dictionaries of hooks itself, because torch.compile can't trace
    ``register_module_forward_hook``.
    """

    def __init__(self, mode: HandMasks) -> None:
        self._mode = mode
        self.running: list[tuple[nn.Module, int]] = []
        """The running modules, innermost last, each with ``mode.functions`` as it was when it began."""
        self.blends: list[Blend] = []
        """The branches whose modules have not returned yet."""
        compiled = torch.compiler.is_compiling()
        self._thread = None if compiled else threading.get_ident()
        self._key = -1 if compiled else -id(self)  # torch numbers hooks from 0
        torch_hooks._global_forward_pre_hooks[self._key] = self._begin
        torch_hooks._global_forward_hooks[self._key] = self._end
        torch_hooks._global_forward_hooks_with_kwargs[self._key] = True

    def remove(self) -> None:
        """Stop tracking."""
        del torch_hooks._global_forward_pre_hooks[self._key]
        del torch_hooks._global_forward_hooks[self._key]
        del torch_hooks._global_forward_hooks_with_kwargs[self._key]

    def pending(self) -> Blend | None:
        """Return the branch whose module has not been called yet."""
        return self.blends[-1] if self.blends and self.blends[-1].layer is None else None

    def check(self, end: bool = False) -> None:
        """Raise ``NotAMask`` for a branch that no module follows; at the end, for any that is left."""
        if self.pending() or (end and self.blends):
            raise self.blends[-1].mask.refuse("a branch that no module follows", branch=True)

    def _in_other_thread(self) -> bool:
        return self._thread is not None and self._thread != threading.get_ident()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._in_other_thread():
            return
        self.running.append((module, self._mode.functions))
        blend = self.pending()
        if blend is not None:
            if self._thread is not None:
                blend.mask.mode.prepare_recomputation()
            blend.layer = module

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self._in_other_thread():
            return output
        while self.running and self.running.pop()[0] is not module:
            pass
        while self.blends and self.blends[-1].layer is module:
            output = self.blends.pop().apply(args, kwargs, output)
        return output


class Blend:
    """Blends the input and the output of the next module, ``layer``, which is None until it is called.

    ``factor`` is m, the soft value of "the layer runs".
    """

    def __init__(self, mask: Mask, factor: Tensor, layer: nn.Module | None = None) -> None:
        self.mask, self.factor, self.layer = mask, factor, layer

    def apply(self, args: Any, kwargs: Any, output: Any) -> Any:
        """Return the blended output of the module."""
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not inputs:
            raise self.mask.refuse("a branch around a module without tensors", branch=True)
        self.mask.used(drops=not self.mask.keeps)
        return self._blended(inputs[0], output)

    def _blended(self, x: Tensor, output: Any) -> Any:
        """Return the output with x + m·(y - x) in place of its first tensor y."""
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


class EnclosingBlend(Blend):
    """Blends two outputs of the module that evaluates the branch, one for each value of the condition.

    ``begun`` is how many functions the model had called when the module began.
    """

    def __init__(self, mask: Mask, factor: Tensor, layer: nn.Module, begun: int) -> None:
        super().__init__(mask, factor, layer)
        self._begun = begun

    def apply(self, args: Any, kwargs: Any, output: Any) -> Any:
        """Return the blended output of the module."""
        module, mode = self.layer, self.mask.mode
        assert module is not None

        def run() -> Any:
            return module.forward(*args, **kwargs)

        buffers = any(m._buffers for m in module.modules())
        with keep_buffers(module) if buffers else nullcontext():
            middle = mode.functions
            other = mode.replay(self.mask, run)
        kept, dropped = middle - self._begun, mode.functions - middle
        if kept != dropped:  # the branch that drops calls fewer functions
            self.mask.used(drops=self.mask.keeps == (kept < dropped))
        return self._both(other, output)

    def _both(self, other: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and isinstance(other, Tensor) and other.shape == output.shape:
            return self._mixed(other, output)
        same = type(output) in (tuple, list) and type(other) is type(output)
        if same and len(output) == len(other):
            return type(output)([self._both(z, y) for z, y in zip(other, output, strict=True)])
        if output is other:
            return output
        raise self.mask.refuse("a branch between results of different kinds", branch=True)
