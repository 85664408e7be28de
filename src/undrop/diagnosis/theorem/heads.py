"""Find the last layer of a network, and its inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrop.diagnosis.measure.model import collect
from undrop.errors import OutputError
from undrop.intercept import Interception, call, logits_of, no_noise, preserve_model, uncompiled


class Head(NamedTuple):
    """A linear output layer, its inputs and their labels, as ``undrop.bound`` needs them."""

    weight: Tensor
    bias: Tensor | None
    features: Tensor
    """(n, features)."""
    labels: Tensor
    """(n,)."""


@torch.no_grad()
def last_layer(
    model: nn.Module, batches: Iterable[Any], *, ignore_index: int = -100, max_batches: int = 1000
) -> Head:
    """Return the linear layer that computes a model's output, and the inputs of this layer in eval mode.

    Args:
        model: a classifier that ends with a linear layer; its weights may be tied.
        batches: pairs (inputs, targets) with class indices as targets.
        ignore_index: targets of this value are left out.
        max_batches: the largest number of batches to take.

    Raises:
        OutputError: if the model does not end with a linear layer.
    """
    model = uncompiled(model)
    features, labels = [], []
    last_call: list[Any] = []  # the output and the arguments of the last call of F.linear

    def linear(mode: Interception, input: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        output = F.linear(input, weight, bias)
        last_call[:] = output, input, weight, bias
        return output

    with preserve_model(model):
        model.eval()
        for inputs, targets in collect(batches, max_batches):
            last_call.clear()
            with Interception(model, no_noise, {F.linear: linear}):
                logits = logits_of(call(model, inputs))
            if not last_call or not _is_same_memory(last_call[0], logits):
                raise OutputError(
                    f"the output of {type(model).__name__} is not that of a linear layer, and the bound "
                    "is for linear layers: pass a weight and its features to undrop.bound yourself."
                )
            _, x, weight, bias = last_call
            target = targets.reshape(-1)
            counts = target != ignore_index
            features.append(x.reshape(-1, x.shape[-1])[counts])
            labels.append(target[counts].long())
    bias = None if bias is None else bias.detach()
    return Head(weight.detach(), bias, torch.cat(features), torch.cat(labels))


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()
