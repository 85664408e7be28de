"""Convert what a user passes as a loss; the default is a Transformers model's loss or cross-entropy.

Nothing here imports Transformers: a model is recognized by the loss function that it gets from there.
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
"""The label that does not count, in all of Transformers."""


class Task(NamedTuple):
    """A loss, and how its targets follow from the labels of a batch."""

    loss: Loss
    targets: Callable[[Tensor], Tensor]


TASK_BUILDERS: Registry[str, Callable[[Any, Tensor, float], Task]] = Registry("Transformers head")
"""From the name of a model's loss function to a function (model, labels, smoothing) -> ``Task``."""


def _same(labels: Tensor) -> Tensor:
    return labels


def _next_token(labels: Tensor) -> Tensor:
    """Position t predicts the label at t + 1; the last predicts nothing."""
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def _numbers(labels: Tensor) -> Tensor:
    """One row per example, like the logits."""
    return labels.float().reshape(len(labels), -1)


def _classes(labels: Tensor) -> Tensor:
    return labels.reshape(len(labels))


@TASK_BUILDERS.register("ForCausalLMLoss")
def _language_model(model: Any, labels: Tensor, smoothing: float) -> Task:
    loss = CrossEntropy(ignore_index=IGNORED, label_smoothing=smoothing)
    # The labels of an encoder-decoder are already aligned with the decoder's outputs.
    return Task(loss, _same if model.config.is_encoder_decoder else _next_token)


@TASK_BUILDERS.register("ForMaskedLMLoss", "ForTokenClassification")
def _each_token(model: Any, labels: Tensor, smoothing: float) -> Task:
    return Task(CrossEntropy(ignore_index=IGNORED, label_smoothing=smoothing), _same)


@TASK_BUILDERS.register("ForSequenceClassificationLoss")
def _classifier(model: Any, labels: Tensor, smoothing: float) -> Task:
    """Predict one class, several classes or numbers: ``problem_type``, or what Transformers guesses."""
    problem = model.config.problem_type
    if problem is None and model.config.num_labels == 1:
        problem = "regression"
    elif problem is None:
        whole = not labels.is_floating_point()
        problem = "single_label_classification" if whole else "multi_label_classification"
    if problem == "regression":
        return Task(MSE(), _numbers)
    if problem == "multi_label_classification":
        return Task(BCEWithLogits(), _numbers)
    return Task(CrossEntropy(ignore_index=IGNORED, label_smoothing=smoothing), _classes)


def loss_function_name(model: nn.Module) -> str | None:
    """The name of a Transformers model's loss function; None for a model without one.

    Transformers gives every model a ``loss_function``, even one without a head, which takes no labels.
    """
    if not any(c.__module__.split(".")[0] in ("transformers", "peft") for c in type(model).__mro__):
        return None
    named = getattr(model, "loss_type", None) or getattr(model, "_loss_function", None)
    if named is None and "labels" not in inspect.signature(model.forward).parameters:
        return None
    return getattr(getattr(model, "loss_function", None), "__name__", None)


def find_task(model: nn.Module, labels: Tensor, smoothing: float = 0.0) -> Task:
    """The task of a ``…ForCausalLM``, ``…ForMaskedLM``, ``…ForConditionalGeneration`` or classifier.

    Args:
        model: the model, without wrappers.
        labels: those of a batch; their type tells classes from numbers if the config does not.
        smoothing: label smoothing, for class labels.

    Raises:
        OptionError: for a head of another kind, or smoothing of labels that are not classes.
    """
    kind = loss_function_name(model)
    task = None if kind is None else TASK_BUILDERS.find(kind)
    if task is None:
        raise OptionError(
            f"{type(model).__name__} is trained with {kind or 'no loss function'}, which undrop does "
            "not know: pass loss= to the objective, or override `undrop_task` of the trainer."
        )
    found = task(model, labels, smoothing)
    if smoothing and not isinstance(found.loss, CrossEntropy):
        raise OptionError(
            f"label_smoothing_factor is for class labels, and {type(model).__name__} is trained with "
            f"{type(found.loss).__name__}: set it to 0."
        )
    return found


def decoder_inputs(model: nn.Module, inputs: Any, labels: Tensor) -> Any:
    """Add the decoder's inputs, which are computed from the labels, for an encoder-decoder."""
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
    here, ahead = labels != IGNORED, labels[..., :-1] != IGNORED
    copies = bool((labels == ids)[here].all())
    if bool(ahead.any()) and not copies and bool((labels[..., :-1] == ids[..., 1:])[ahead].all()):
        raise TargetError(
            f"the labels are already the next tokens of input_ids, and {type(model).__name__} shifts "
            "them itself: pass labels that are aligned with input_ids, or loss=undrop.CrossEntropy() to "
            "compare position by position."
        )


def check_attention(model: nn.Module) -> None:
    """Raise an ``EngineError`` if attention drops inside a kernel that no interception sees."""
    for config in _configs(getattr(model, "config", None)):
        implementation = getattr(config, "_attn_implementation", None)
        dropped = {n: p for n, p in vars(config).items() if _is_attention_dropout(n) and p}
        if implementation not in (None, "eager", "sdpa") and dropped:
            name, p = next(iter(dropped.items()))
            raise EngineError(
                f"the attention dropout of {type(model).__name__} ({name} = {p:g}) is hidden inside "
                f"{implementation!r}: load the model with attn_implementation='sdpa' or 'eager', or "
                f"set {name} to 0."
            )


def _configs(config: Any) -> Iterator[Any]:
    """A model's config and those within it."""
    if config is None:
        return
    yield config
    for name in getattr(config, "sub_configs", {}):
        yield from _configs(getattr(config, name, None))


def _is_attention_dropout(name: str) -> bool:
    return name == "dropout_rate" or ("att" in name and "drop" in name)


def check_same_loss(ours: Tensor, theirs: Tensor, *, whose: str, loss: Loss, way_out: str) -> bool:
    """Raise an error if two losses differ; return False if theirs is not finite, True otherwise."""
    if not bool(torch.isfinite(theirs)):
        return False
    exact = theirs.dtype in (torch.float32, torch.float64)
    mine, other = float(ours), float(theirs)
    if abs(mine - other) > (1e-4 if exact else 2e-2) * max(1.0, abs(other)):
        raise OptionError(
            f"{whose} computes a loss of {other:.6g} on the first batch, but undrop's "
            f"{type(loss).__name__} is {mine:.6g}: {way_out}."
        )
    return True


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
        """Pickle nothing: another process examines its models itself."""
        return ModelLoss, ()

    def prepare(self, model: nn.Module, inputs: Any, targets: Any) -> Batch:
        """Return a batch in the form that the model's loss takes.

        Raises:
            OptionError: if the model's own loss is unknown, or differs on the first batch.
            TargetError: if there are no labels, or if they are already shifted.
        """
        inputs, targets = split_labels(inputs, targets)
        inner = bare(model)
        if loss_function_name(inner) is None:
            return Batch(model, inputs, targets, loss=_CROSS_ENTROPY)
        if not isinstance(targets, Tensor):
            raise TargetError(
                f"{type(inner).__name__} needs `labels`, in the batch or as targets, got "
                f"{type(targets).__name__}."
            )
        task = self._tasks.get(inner)
        if task is None:
            check_attention(inner)
            check_not_shifted(inner, inputs, targets)
            task = self._tasks[inner] = find_task(inner, targets)
        if inner not in self._verified and _agrees(model, inputs, targets, task):
            self._verified.add(inner)
        inputs = decoder_inputs(inner, inputs, targets)
        return Batch(model, inputs, task.targets(targets), loss=task.loss)


_CROSS_ENTROPY = CrossEntropy()


def _agrees(model: nn.Module, inputs: Any, labels: Tensor, task: Task) -> bool:
    """Whether the task's loss equals the loss that the model reports; False without targets."""
    with torch.no_grad(), RngSnapshot(), keep_statistics(model), Interception(model, no_noise):
        args, kwargs = arguments(inputs)
        output = model(*args, **kwargs, labels=labels)
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
    """Return the loss for what a user passes as ``loss``.

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
