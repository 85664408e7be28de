"""Dropout within a loss, which no objective sees."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from undrop.errors import OptionError

_DROPOUTS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
}


class RefuseDropout(TorchFunctionMode):
    """A context in which dropout that drops is an error.

    Args:
        loss: the name of the loss that runs in it.
    """

    def __init__(self, loss: str) -> None:
        super().__init__()
        self._loss = loss

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, if it does not drop.

        Raises:
            OptionError: naming the loss and what to do.
        """
        kwargs = kwargs or {}
        if func in _DROPOUTS and _drops(func, args, kwargs):
            raise OptionError(
                f"the loss {self._loss} has dropout in it, which undrop can't replace there: move that "
                "part into the model, or call eval() on the loss."
            )
        return func(*args, **kwargs)


def _drops(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        given = inspect.signature(func).bind(*args, **kwargs)
    except ValueError:  # a function in C: (input, p, train)
        p, train = (kwargs.get(k, v) for k, v in zip(("p", "train"), args[1:], strict=True))
    else:
        given.apply_defaults()
        p, train = given.arguments["p"], given.arguments["training"]
    return bool(p and train)
