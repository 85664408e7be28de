"""LayerDrop: run a layer that a random branch may skip, and blend its output with its input.

When a model evaluates ``if torch.rand([]) < p: continue``, the interception gives the condition the
value with which the layer runs. The layer is the next module that the model calls. Its output y becomes
x + m·(y - x), where x is its input and m is the mask of the branch.

If the branch does not skip a layer, the enclosing module (the module that evaluates the branch) runs a
second time, with the other value of the condition. Its output y becomes z + m·(y - z), where z is its
output in the second run.
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
    from undrop.intercept.hand_masks import HandMaskMixin
    from undrop.intercept.random_values import Mask


class ModuleTracker:
    """Tracks which modules this thread is running.

    It writes into torch's dictionaries of hooks itself, because torch.compile can't trace
    ``register_module_forward_hook``.
    """

    def __init__(self, mode: HandMaskMixin) -> None:
        self._mode = mode
        self.running: list[tuple[nn.Module, int]] = []
        """The running modules, innermost last, each with ``mode.call_count`` before its call."""
        self.blends: list[Blend] = []
        """One for each branch whose module has not returned yet."""
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

    def pending_blend(self) -> Blend | None:
        """Return the blend of the latest branch if no module has been called since."""
        return self.blends[-1] if self.blends and self.blends[-1].layer is None else None

    def check(self, at_end: bool = False) -> None:
        """Raise ``NotAMask`` for a branch that no module follows; at the end, for any blend left."""
        if self.pending_blend() or (at_end and self.blends):
            raise self.blends[-1].mask.refuse("a branch that no module follows", branch=True)

    def _in_other_thread(self) -> bool:
        return self._thread is not None and self._thread != threading.get_ident()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._in_other_thread():
            return
        self.running.append((module, self._mode.call_count))
        blend = self.pending_blend()
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
    """Blends the input and the output of ``layer``, the next module that the model calls.

    ``factor`` is m, the mask in the form that is 1 if the layer runs. ``layer`` is None until the model
    calls it.
    """

    def __init__(self, mask: Mask, factor: Tensor, layer: nn.Module | None = None) -> None:
        self.mask, self.factor, self.layer = mask, factor, layer

    def apply(self, args: Any, kwargs: Any, output: Any) -> Any:
        """Return the blended output of the module."""
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not inputs:
            raise self.mask.refuse("a branch around a module without tensors", branch=True)
        self.mask.record_use(drops_at_one=not self.mask.keeps_at_one)
        return self._blend(inputs[0], output)

    def _blend(self, x: Tensor, output: Any) -> Any:
        """Return the output with x + m·(y - x) in place of its first tensor y."""
        if isinstance(output, Tensor) and output.shape == x.shape:
            return self._interpolate(x, output)
        if isinstance(output, Mapping) and output:
            name = next(iter(output))
            output[name] = self._blend(x, output[name])  # type: ignore[index]
            return output
        if isinstance(output, (tuple, list)) and output and not hasattr(output, "_fields"):
            return type(output)((self._blend(x, output[0]), *output[1:]))
        use = "a branch around a module whose output is not like its input"
        raise self.mask.refuse(use, branch=True)

    def _interpolate(self, x: Tensor, y: Tensor) -> Tensor:
        return x + self.factor.reshape(()).to(y.dtype) * (y - x)


class EnclosingBlend(Blend):
    """Blends two outputs of the module that evaluates the branch, one for each value of the condition.

    ``calls_before`` is how many functions the model had called before it called the module.
    """

    def __init__(self, mask: Mask, factor: Tensor, layer: nn.Module, calls_before: int) -> None:
        super().__init__(mask, factor, layer)
        self._calls_before = calls_before

    def apply(self, args: Any, kwargs: Any, output: Any) -> Any:
        """Return the blended output of the module."""
        module, mode = self.layer, self.mask.mode
        assert module is not None

        calls = mode.call_count - self._calls_before
        has_buffers = any(m._buffers for m in module.modules())
        with keep_buffers(module) if has_buffers else nullcontext():
            calls_before = mode.call_count
            other = mode.replay(self.mask, lambda: module.forward(*args, **kwargs))
        other_calls = mode.call_count - calls_before
        if calls != other_calls:  # the branch that drops calls fewer functions
            self.mask.record_use(drops_at_one=self.mask.keeps_at_one == (calls < other_calls))
        return self._blend_outputs(other, output)

    def _blend_outputs(self, other: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and isinstance(other, Tensor) and other.shape == output.shape:
            return self._interpolate(other, output)
        sequences = type(output) in (tuple, list) and type(other) is type(output)
        if sequences and len(output) == len(other):
            return type(output)(
                [self._blend_outputs(z, y) for z, y in zip(other, output, strict=True)]
            )
        if output is other:
            return output
        raise self.mask.refuse("a branch between results of different kinds", branch=True)
