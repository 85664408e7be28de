"""The last layer of a network on its frozen features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from undrop.diagnosis.measure.model import collect
from undrop.errors import OutputError
from undrop.intercept import call, logits_of, preserve_model, unwrapped


class Head(NamedTuple):
    """A linear output layer with its inputs: what ``undrop.bound`` takes."""

    weight: Tensor
    bias: Tensor | None
    features: Tensor
    """(n, features)."""
    labels: Tensor
    """(n,)."""


class _LastLinear(TorchFunctionMode):
    """Remembers the last call of ``F.linear``, wherever it is made from."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: tuple[Tensor, Tensor, Tensor | None] | None = None
        self.output: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call every function, and record the linear ones."""
        out = func(*args, **(kwargs or {}))
        if func is F.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
            self.inputs = (given["input"], given["weight"], given.get("bias"))
            self.output = out
        return out


@torch.no_grad()
def last_layer(
    model: nn.Module, batches: Iterable[Any], *, ignore_index: int = -100, max_batches: int = 1000
) -> Head:
    """The linear layer that makes a model's output, and its inputs in eval mode.

    Args:
        model: a classifier whose output is that of a linear layer; tied weights are fine.
        batches: pairs (inputs, targets) with class indices as targets.
        ignore_index: targets of this value are left out.
        max_batches: the largest number of batches to take.

    Raises:
        OutputError: if the output is not that of a linear layer.
    """
    model = unwrapped(model)
    features, labels = [], []
    with preserve_model(model):
        model.eval()
        for batch in collect(batches, max_batches):
            with _LastLinear() as seen:
                logits = logits_of(call(model, batch.inputs))
            if seen.inputs is None or seen.output is None or not _same(seen.output, logits):
                raise OutputError(
                    f"the output of {type(model).__name__} is not that of a linear layer, which the "
                    "bound is about: pass its weight and features to undrop.bound yourself."
                )
            x, weight, bias = seen.inputs
            target = batch.targets.reshape(-1)
            kept = target != ignore_index
            features.append(x.reshape(-1, x.shape[-1])[kept])
            labels.append(target[kept].long())
    return Head(
        weight.detach(),
        None if bias is None else bias.detach(),
        torch.cat(features),
        torch.cat(labels),
    )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()
