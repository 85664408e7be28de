"""What a user passes as a loss, and the default: a Transformers model's own, or cross-entropy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from undrop.errors import OptionError, TargetError
from undrop.intercept import (
    Interception,
    RngSnapshot,
    call,
    keep_statistics,
    logits_of,
    no_noise,
)
from undrop.losses.base import CONVERTERS, GivenLoss, Prepared, labels_apart
from undrop.losses.cross_entropy import CrossEntropy
from undrop.losses.generic import Generic
from undrop.losses.heads import (
    Task,
    check_attention,
    check_not_shifted,
    check_same_loss,
    decoder_inputs,
    head_of,
    read_head,
)


class ModelLoss(GivenLoss):
    """A Transformers model's own loss, if undrop knows it; otherwise cross-entropy.

    For a Transformers model the targets are its ``labels``, as the model itself takes them: a causal
    language model predicts the next label, a masked one the label in place. On the first batch it
    must agree with the loss that the model reports, both without noise.
    """

    def __init__(self) -> None:
        self._tasks: weakref.WeakKeyDictionary[nn.Module, Task] = weakref.WeakKeyDictionary()
        self._verified: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __reduce__(self) -> tuple[type[ModelLoss], tuple[()]]:
        """Another process examines its models again."""
        return ModelLoss, ()

    def prepare(self, model: nn.Module, inputs: Any, targets: Any) -> Prepared:
        """Return a batch in the form that the model's loss takes.

        Raises:
            OptionError: if the model's own loss is unknown, or differs on the first batch.
            TargetError: if there are no labels, or they are shifted already.
        """
        inputs, targets = labels_apart(inputs, targets)
        bare = _bare(model)
        if head_of(bare) is None:
            return Prepared(_CROSS_ENTROPY, inputs, targets)
        if not isinstance(targets, Tensor):
            raise TargetError(
                f"{type(bare).__name__} needs `labels`, in the batch or as targets, got "
                f"{type(targets).__name__}."
            )
        task = self._tasks.get(bare)
        if task is None:
            check_attention(bare)
            check_not_shifted(bare, inputs, targets)
            task = self._tasks[bare] = read_head(bare, targets)
        if bare not in self._verified and _agrees(model, inputs, targets, task):
            self._verified.add(bare)
        return Prepared(task.loss, decoder_inputs(bare, inputs, targets), task.targets(targets))


_CROSS_ENTROPY = CrossEntropy()


def _bare(model: nn.Module) -> nn.Module:
    """The module within ``torch.compile`` and DistributedDataParallel."""
    while True:
        inner = model._modules.get("_orig_mod")
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _agrees(model: nn.Module, inputs: Any, labels: Tensor, task: Task) -> bool:
    """Whether the task's loss is the one that the model reports; ask again for an empty batch."""
    with torch.no_grad(), RngSnapshot(), keep_statistics(model), Interception(model, no_noise):
        if isinstance(inputs, Mapping):
            output = model(**inputs, labels=labels)
        elif isinstance(inputs, (tuple, list)):
            output = model(*inputs, labels=labels)
        else:
            output = model(inputs, labels=labels)
        fused = isinstance(output, Mapping) and output.get("logits") is None
        logits = logits_of(call(model, inputs) if fused else output)
    theirs = output["loss"] if isinstance(output, Mapping) else output[0]
    ours = task.loss.value(logits.float(), task.targets(labels))
    return check_same_loss(
        ours,
        theirs,
        whose=type(model).__name__,
        loss=task.loss,
        way_out="its loss has a part that undrop does not know; pass loss= and the targets for it",
    )


def as_loss(loss: GivenLoss | Callable[[Tensor, Any], Tensor] | None) -> GivenLoss:
    """A loss from what a user passes.

    None is the model's own loss, or cross-entropy. A torch loss module becomes the ``Loss`` that is
    registered for its class in ``CONVERTERS``; any other callable is wrapped in ``Generic``.

    Raises:
        OptionError: for a class in place of an instance, or for something that can't be called.
    """
    if loss is None:
        return ModelLoss()
    if isinstance(loss, GivenLoss):
        return loss
    if isinstance(loss, type):
        name = loss.__name__
        raise OptionError(f"loss must be an instance, got the class {name}: pass {name}().")
    convert = CONVERTERS.find(type(loss))  # the class itself: a subclass may compute something else
    found = convert(loss) if convert is not None else None
    if found is not None:
        return found
    if callable(loss):
        return Generic(loss)
    raise OptionError(f"loss must be a Loss or a callable, got {type(loss).__name__}.")
