"""Call a model on a batch, and find the tensor for the loss in the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from undrop.errors import OutputError

__all__ = ["Batch", "call", "logits_of"]


class Batch(NamedTuple):
    """A model and the data of one step."""

    model: nn.Module
    inputs: Any
    targets: Any
    compiled: bool = False
    """Whether the user compiled the model."""

    def forward(self) -> Any:
        """Return everything that the model returns for the inputs."""
        return call(self.model, self.inputs)


def call(model: nn.Module, inputs: Any) -> Any:
    """Return ``model(inputs)``; a tuple or list is spread over positions, a dict over keywords.

    The model's own forward is called where ``model.compile()`` has put compiled code in its place.
    """
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def logits_of(output: Any) -> Tensor:
    """Return the tensor that the loss sees: the output, its ``logits``, or its first element.

    Raises:
        OutputError: if there is none.
    """
    if isinstance(output, Tensor):
        return output
    logits = (
        output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    )
    if logits is None and isinstance(output, (tuple, list)) and output:
        logits = output[0]
    if isinstance(logits, Tensor):
        return logits
    if getattr(output, "loss", None) is not None:
        raise OutputError(
            f"the model returned {type(output).__name__} with a loss but no logits, so that its output "
            "layer is fused with its loss: switch that off (in Liger fused_linear_cross_entropy=False), "
            "or return the features and pass loss=undrop.losses.LinearCrossEntropy(weight)."
        )
    raise OutputError(
        f"the model returned {type(output).__name__}, in which undrop finds no tensor for the loss: "
        "return a tensor, a tuple whose first element is one, or something with `logits`."
    )
