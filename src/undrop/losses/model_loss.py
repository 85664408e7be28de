"""Convert the user's ``loss=`` argument; the default is a Transformers model's loss or cross-entropy.

This module does not import Transformers: it recognizes a model by the name of its loss function.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrop.errors import EngineError, OptionError, TargetError
from undrop.intercept import (
    Batch,
    Interception,
    RngSnapshot,
    bare,
    call,
    keep_statistics,
    logits_of,
    no_noise,
)
from undrop.intercept.model_call import arguments
from undrop.losses.base import CONVERTERS, GivenLoss, Loss, split_labels
from undrop.losses.cross_entropy import CrossEntropy
from undrop.losses.elementwise import MSE, BCEWithLogits
from undrop.losses.generic import Generic
from undrop.registry import Registry

IGNORED = -100
"""The label that all losses of Transformers ignore."""


class Task(NamedTuple):
    """A loss, and the function that computes its targets from the labels of a batch."""

    loss: Loss
    targets: Callable[[Tensor], Tensor]


TASK_BUILDERS: Registry[str, Callable[[Any, Tensor, float], Task]] = Registry("Transformers head")
"""The name of a model's loss function → a function of (model, labels, smoothing) that returns a task."""


def _unchanged(labels: Tensor) -> Tensor:
    return labels


def _shift(labels: Tensor) -> Tensor:
    """Move the label of t + 1 to position t; the last position has no target."""
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def _to_numbers(labels: Tensor) -> Tensor:
    """Return one row of numbers per example, like the logits."""
    return labels.float().reshape(len(labels), -1)


def _to_classes(labels: Tensor) -> Tensor:
    """Return one class per example."""
    return labels.reshape(len(labels))


@TASK_BUILDERS.register("ForCausalLMLoss")
def _language_model(model: Any, labels: Tensor, smoothing: float) -> Task:
    loss = CrossEntropy(ignore_index=IGNORED, label_smoothing=smoothing)
    # The labels of an encoder-decoder are already aligned with the decoder's outputs.
    return Task(loss, _unchanged if model.config.is_encoder_decoder else _shift)


@TASK_BUILDERS.register("ForMaskedLMLoss", "ForTokenClassification")
def _token_classifier(model: Any, labels: Tensor, smoothing: float) -> Task:
    return Task(CrossEntropy(ignore_index=IGNORED, label_smoothing=smoothing), _unchanged)


@TASK_BUILDERS.register("ForSequenceClassificationLoss")
def _classifier(model: Any, labels: Tensor, smoothing: float) -> Task:
    """Predict one class, several classes or numbers, by ``problem_type`` or as Transformers guesses."""
    problem = model.config.problem_type
    if problem == "regression" or (problem is None and model.config.num_labels == 1):
        return Task(MSE(), _to_numbers)
    if problem == "multi_label_classification" or (problem is None and labels.is_floating_point()):
        return Task(BCEWithLogits(), _to_numbers)
    return Task(CrossEntropy(ignore_index=IGNORED, label_smoothing=smoothing), _to_classes)


def loss_function_name(model: nn.Module) -> str | None:
    """Return the name of a Transformers model's loss function; None for a model without one.

    Transformers gives every model a ``loss_function``, even a model without a head, whose ``forward``
    takes no labels.
    """
    if not any(c.__module__.split(".")[0] in ("transformers", "peft") for c in type(model).__mro__):
        return None
    loss_type = getattr(model, "loss_type", None) or getattr(model, "_loss_function", None)
    if loss_type is None and "labels" not in inspect.signature(model.forward).parameters:
        return None
    return getattr(getattr(model, "loss_function", None), "__name__", None)


def find_task(model: nn.Module, labels: Tensor, smoothing: float = 0.0) -> Task:
    """Return the task of a causal or masked language model, an encoder-decoder or a classifier.

    Args:
        model: the model, without wrappers.
        labels: the labels of a batch. Their dtype tells classes from numbers if the config does not.
        smoothing: label smoothing, for class labels.

    Raises:
        OptionError: for a model with another loss function, or smoothing of labels that are not classes.
    """
    name = loss_function_name(model)
    build = None if name is None else TASK_BUILDERS.find(name)
    if build is None:
        raise OptionError(
            f"{type(model).__name__} is trained with {name or 'no loss function'}, which undrop does "
            "not know: pass loss= to the objective, or override `undrop_task` of the trainer."
        )
    task = build(model, labels, smoothing)
    if smoothing and not isinstance(task.loss, CrossEntropy):
        raise OptionError(
            f"label_smoothing_factor is for class labels, and {type(model).__name__} is trained with "
            f"{type(task.loss).__name__}: set it to 0."
        )
    return task


def decoder_inputs(model: nn.Module, inputs: Any, labels: Tensor) -> Any:
    """Add the decoder's inputs, computed from the labels, to the inputs of an encoder-decoder."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return inputs
    if not isinstance(inputs, Mapping):
        raise TargetError(
            f"{type(model).__name__} has an encoder and a decoder: pass its inputs as a dict."
        )
    if {"decoder_input_ids", "decoder_inputs_embeds"} & inputs.keys():
        return inputs
    prepare: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is None:
        raise TargetError(
            f"{type(model).__name__} can't derive its decoder's inputs from the labels: put "
            "decoder_input_ids into the batch."
        )
    return {**inputs, "decoder_input_ids": prepare(labels=labels)}


def check_not_shifted(model: nn.Module, inputs: Any, labels: Tensor) -> None:
    """Raise a ``TargetError`` if the labels of a language model are already the next tokens."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if loss_function_name(model) != "ForCausalLMLoss" or not isinstance(ids, Tensor):
        return
    if ids.shape != labels.shape or ids.shape[-1] < 2:
        return
    counted = labels != IGNORED
    if not bool(counted[..., :-1].any()) or bool((labels == ids)[counted].all()):
        return
    if bool((labels[..., :-1] == ids[..., 1:])[counted[..., :-1]].all()):
        raise TargetError(
            f"the labels are already the next tokens of input_ids, and {type(model).__name__} shifts "
            "them itself: pass labels that are aligned with input_ids, or loss=undrop.CrossEntropy() to "
            "compare position by position."
        )


def check_attention(model: nn.Module) -> None:
    """Raise an ``EngineError`` if attention drops inside a kernel that no interception sees."""
    for config in _configs(getattr(model, "config", None)):
        implementation = getattr(config, "_attn_implementation", None)
        if implementation in (None, "eager", "sdpa"):
            continue
        for name, p in vars(config).items():
            is_dropout = name == "dropout_rate" or ("att" in name and "drop" in name)
            if not is_dropout or not p:
                continue
            raise EngineError(
                f"the attention dropout of {type(model).__name__} ({name} = {p:g}) is hidden inside "
                f"{implementation!r}: load the model with attn_implementation='sdpa' or 'eager', or "
                f"set {name} to 0."
            )


def _configs(config: Any) -> Iterator[Any]:
    """Yield a model's config and its sub-configs."""
    if config is None:
        return
    yield config
    for name in getattr(config, "sub_configs", {}):
        yield from _configs(getattr(config, name, None))


def check_same_loss(ours: Tensor, theirs: Tensor, *, owner: str, loss: Loss, way_out: str) -> bool:
    """Check that undrop's loss agrees with the model's, and return True; False if that is not finite.

    Args:
        ours: the value of undrop's loss.
        theirs: the loss that the model reports.
        owner: the name of the model, for the error.
        loss: undrop's loss, for the error.
        way_out: the end of the error.

    Raises:
        OptionError: if the two losses differ.
    """
    if not bool(torch.isfinite(theirs)):
        return False
    tolerance = 1e-4 if theirs.dtype in (torch.float32, torch.float64) else 2e-2
    if abs(float(ours) - float(theirs)) > tolerance * max(1.0, abs(float(theirs))):
        raise OptionError(
            f"{owner} computes a loss of {float(theirs):.6g} on the first batch, but undrop's "
            f"{type(loss).__name__} is {float(ours):.6g}: {way_out}."
        )
    return True


class ModelLoss(GivenLoss):
    """The loss of a Transformers model with a loss function; cross-entropy for any other model.

    For a Transformers model the targets are its ``labels``, as the model itself takes them: a causal
    language model predicts the next label, a masked language model the label at the same position. On
    the first batch, undrop's loss must agree with the loss that the model reports, both without noise.
    """

    def __init__(self) -> None:
        self._tasks: weakref.WeakKeyDictionary[nn.Module, Task] = weakref.WeakKeyDictionary()
        self._verified: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __reduce__(self) -> tuple[type[ModelLoss], tuple[()]]:
        """Pickle no state: it depends on the models of this process."""
        return ModelLoss, ()

    def prepare(self, model: nn.Module, inputs: Any, targets: Any) -> Batch:
        """Return the batch with its loss, and with the targets of that loss.

        Raises:
            OptionError: if the model's own loss is unknown, or differs on the first batch.
            TargetError: if there are no labels, or if they are already shifted.
        """
        inputs, targets = split_labels(inputs, targets)
        unwrapped = bare(model)
        if loss_function_name(unwrapped) is None:
            return Batch(model, inputs, targets, loss=_CROSS_ENTROPY)
        if not isinstance(targets, Tensor):
            raise TargetError(
                f"{type(unwrapped).__name__} needs `labels`, in the batch or as targets, got "
                f"{type(targets).__name__}."
            )
        task = self._tasks.get(unwrapped)
        if task is None:
            check_attention(unwrapped)
            check_not_shifted(unwrapped, inputs, targets)
            task = self._tasks[unwrapped] = find_task(unwrapped, targets)
        if unwrapped not in self._verified and _check_reported_loss(model, inputs, targets, task):
            self._verified.add(unwrapped)
        inputs = decoder_inputs(unwrapped, inputs, targets)
        return Batch(model, inputs, task.targets(targets), loss=task.loss)


_CROSS_ENTROPY = CrossEntropy()


def _check_reported_loss(model: nn.Module, inputs: Any, labels: Tensor, task: Task) -> bool:
    """Check that the task's loss is what the model reports; return False if that is not finite."""
    with torch.no_grad(), RngSnapshot(), keep_statistics(model), Interception(model, no_noise):
        args, kwargs = arguments(inputs)
        output = model(*args, **kwargs, labels=labels)
        # A model that fuses its loss with its output layer returns no logits if it gets labels.
        fused = isinstance(output, Mapping) and output.get("logits") is None
        logits = logits_of(call(model, inputs) if fused else output)
    return check_same_loss(
        task.loss.value(logits.float(), task.targets(labels)),
        output["loss"] if isinstance(output, Mapping) else output[0],
        owner=type(model).__name__,
        loss=task.loss,
        way_out="its loss has a part that undrop does not know; pass loss= and the targets for it",
    )


def as_loss(loss: GivenLoss | Callable[[Tensor, Any], Tensor] | None) -> GivenLoss:
    """Return the loss for the user's ``loss=`` argument.

    None stands for the model's own loss or cross-entropy. ``CONVERTERS`` has the ``Loss`` for torch's
    loss modules. Any other callable becomes a ``Generic``.

    Raises:
        OptionError: for a class in place of an instance, or for an object that can't be called.
    """
    if loss is None:
        return ModelLoss()
    if isinstance(loss, GivenLoss):
        return loss
    if isinstance(loss, type):
        name = loss.__name__
        raise OptionError(f"loss must be an instance, got the class {name}: pass {name}().")
    convert = CONVERTERS.find(type(loss))  # the class itself: a subclass may compute something else
    converted = None if convert is None else convert(loss)
    if converted is not None:
        return converted
    if callable(loss):
        return Generic(loss)
    raise OptionError(f"loss must be a Loss or a callable, got {type(loss).__name__}.")
