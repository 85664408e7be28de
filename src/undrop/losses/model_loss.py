"""What a user passes as a loss, and the default: a Transformers model's own, or cross-entropy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
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
from undrop.kernels.softmax import Coefficients
from undrop.losses.base import (
    CONVERTERS,
    ByClass,
    ClosedForm,
    Derivatives,
    Loss,
    Prepared,
    WithGradients,
)
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


class ModelLoss(ClosedForm):
    """A Transformers model's own loss, if undrop knows it; otherwise cross-entropy.

    For a Transformers model the targets are its ``labels``, as the model itself takes them: a causal
    language model predicts the next label, a masked one the label in place. On the first batch it
    must agree with the loss that the model reports, both without noise.
    """

    def __init__(self) -> None:
        self.current: Loss = CrossEntropy()
        self._forget()

    def _forget(self) -> None:
        self._tasks: weakref.WeakKeyDictionary[nn.Module, Task] = weakref.WeakKeyDictionary()
        self._verified: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._user: weakref.ref[nn.Module] | None = None  # the model of the last batch

    def prepare(self, model: nn.Module, inputs: Any, targets: Any) -> Prepared:
        """Return a batch in the form that the model's loss takes.

        Raises:
            OptionError: if the model's own loss is unknown, differs on the first batch, or is of
                another kind than that of a model before it.
            TargetError: if there are no labels, or they are shifted already.
        """
        _, inputs, targets = super().prepare(model, inputs, targets)
        bare = _bare(model)
        if head_of(bare) is None:
            self._use(CrossEntropy(), bare)
            return Prepared(self.current, inputs, targets)
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
        self._use(task.loss, bare)
        if bare not in self._verified and _agrees(model, inputs, targets, task):
            self._verified.add(bare)
        return Prepared(task.loss, decoder_inputs(bare, inputs, targets), task.targets(targets))

    def _use(self, loss: Loss, model: nn.Module) -> None:
        """Use this loss from now on.

        Raises:
            OptionError: if another model, whose step may still run, needs another loss.
        """
        other = None if self._user is None else self._user()
        if type(loss) is not type(self.current):
            if other is not None and other is not model:
                raise OptionError(
                    f"this objective trains {type(other).__name__} with "
                    f"{type(self.current).__name__}, and {type(model).__name__} needs "
                    f"{type(loss).__name__}: make one objective for each model."
                )
            self.current = loss
        self._user = weakref.ref(model)

    def __getstate__(self) -> dict[str, Any]:
        """The loss alone: another process examines its models again."""
        return {"current": self.current}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the loss."""
        self.current = state["current"]
        self._forget()

    @property
    def in_any_order(self) -> bool:  # type: ignore[override]
        """Whether the current loss allows any order of the examples."""
        return self.current.in_any_order

    def parameters(self) -> Sequence[Tensor]:
        """The parameters of the current loss."""
        return self.current.parameters()

    def check(self, output: Tensor, target: Tensor) -> None:
        """Check shapes and types as the current loss does."""
        self.current.check(output, target)

    def check_values(self, output: Tensor, target: Tensor) -> None:
        """Check values as the current loss does."""
        self.current.check_values(output, target)

    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """The number of terms of the loss."""
        return self.current.count(output, target)

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean of the loss."""
        return self.current.value(output, target)

    def twice_differentiable_value(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean of the loss in twice differentiable ops."""
        return self.current.twice_differentiable_value(output, target)

    def _derivatives_of_part(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, dim: int
    ) -> Derivatives:
        return self.current._derivatives_of_part(output, u, target, form, dim)

    def _combined(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, c: Coefficients, dim: int
    ) -> tuple[Tensor, Derivatives]:
        return self.current._combined(output, u, target, form, c, dim)

    @property
    def forms_gradients(self) -> bool:  # type: ignore[override]
        """Whether the current loss may form its own gradient."""
        return self.current.forms_gradients

    def with_gradients(self, *args: Any, **options: Any) -> WithGradients | None:
        """Call the current loss."""
        return self.current.with_gradients(*args, **options)

    def by_class(self, output: Tensor, u: Tensor, target: Tensor) -> ByClass | None:
        """Call the current loss."""
        return self.current.by_class(output, u, target)

    def sampled(
        self, output: Tensor, target: Tensor, form: str, generator: torch.Generator | None
    ) -> Tensor:
        """Call the current loss."""
        return self.current.sampled(output, target, form, generator)


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


def as_loss(loss: Loss | Callable[[Tensor, Any], Tensor] | None) -> Loss:
    """A ``Loss`` from what a user passes.

    None is the model's own loss, or cross-entropy. A torch loss module becomes the ``Loss`` that is
    registered for its class in ``CONVERTERS``; any other callable is wrapped in ``Generic``.

    Raises:
        OptionError: for a class in place of an instance, or for something that can't be called.
    """
    if loss is None:
        return ModelLoss()
    if isinstance(loss, Loss):
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
