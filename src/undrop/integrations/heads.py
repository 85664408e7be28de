"""What the head of a Transformers model is trained for: its loss, and its targets from the labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrop.errors import EngineError, OptionError, TargetError
from undrop.intercept import Interception, keep_statistics, logits_of, no_noise
from undrop.losses import MSE, BCEWithLogits, CrossEntropy, Loss

__all__ = ["Task", "check_attention", "decoder_inputs", "read_head", "same_as_the_models_own"]

IGNORED = -100
"""The label that takes no part, in all of Transformers."""


class Task(NamedTuple):
    """A loss, and how the targets that it compares the logits with come from the batch's labels."""

    loss: Loss
    targets: Callable[[Tensor], Tensor]


def _aligned(labels: Tensor) -> Tensor:
    return labels


def _next_token(labels: Tensor) -> Tensor:
    """Position t predicts the label at t + 1; the last predicts nothing."""
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def _numbers(labels: Tensor) -> Tensor:
    """One row an example, as the logits are."""
    return labels.float().reshape(len(labels), -1)


def _classes(labels: Tensor) -> Tensor:
    return labels.reshape(len(labels))


def read_head(model: nn.Module, labels: Tensor, smoothing: float = 0.0) -> Task:
    """The task of a ``…ForCausalLM``, ``…ForMaskedLM``, ``…ForConditionalGeneration`` or classifier.

    Args:
        model: the model, without wrappers.
        labels: those of a batch; where the config does not say, they tell classes from numbers.
        smoothing: the trainer's ``label_smoothing_factor``.

    Raises:
        OptionError: for a head of another kind, or smoothing of labels that are not classes.
    """
    kind = getattr(getattr(model, "loss_function", None), "__name__", "no loss of its own")
    task = _TASKS.get(kind)
    if task is None:
        raise OptionError(
            f"{type(model).__name__} is trained with {kind}, which undrop does not know: override "
            "`undrop_task` to say which loss and targets take its place."
        )
    found = task(model, labels, smoothing)
    if smoothing and not isinstance(found.loss, CrossEntropy):
        raise OptionError(
            f"label_smoothing_factor is for class labels, and {type(model).__name__} is trained with "
            f"{type(found.loss).__name__}: set it to 0."
        )
    return found


def _language_model(model: Any, labels: Tensor, smoothing: float) -> Task:
    loss = CrossEntropy(ignore_index=IGNORED, label_smoothing=smoothing)
    # The decoder of an encoder-decoder is fed labels that were shifted already.
    return Task(loss, _aligned if model.config.is_encoder_decoder else _next_token)


def _each_token(model: Any, labels: Tensor, smoothing: float) -> Task:
    return Task(CrossEntropy(ignore_index=IGNORED, label_smoothing=smoothing), _aligned)


def _classifier(model: Any, labels: Tensor, smoothing: float) -> Task:
    """One class, several, or numbers: ``problem_type``, and where that is None as Transformers does."""
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


_TASKS: Mapping[str, Callable[[Any, Tensor, float], Task]] = {
    "ForCausalLMLoss": _language_model,
    "ForMaskedLMLoss": _each_token,
    "ForTokenClassification": _each_token,
    "ForSequenceClassificationLoss": _classifier,
}
"""By the name of the loss function that Transformers gives a model."""


def decoder_inputs(model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> dict[str, Any]:
    """The inputs of an encoder-decoder with what its decoder reads, which it would make of labels."""
    config = getattr(model, "config", None)
    given = {"decoder_input_ids", "decoder_inputs_embeds"} & inputs.keys()
    if given or not getattr(config, "is_encoder_decoder", False):
        return inputs
    prepare: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is None:
        raise TargetError(
            f"{type(model).__name__} can't tell what its decoder reads from labels alone: put "
            "decoder_input_ids into the batch."
        )
    return {**inputs, "decoder_input_ids": prepare(labels=labels)}


def same_as_the_models_own(
    model: nn.Module, inputs: dict[str, Any], labels: Tensor, task: Task
) -> bool:
    """Whether the task's loss is the one that the model itself reports, both without noise.

    Returns False where the model's is not a number, as for a batch without a label: ask again then.

    Raises:
        OptionError: if they differ: the head has a loss, weights or a part of the loss of its own.
    """
    loss = task.loss
    if isinstance(loss, CrossEntropy):  # smoothing is the trainer's, not the model's
        loss = CrossEntropy(ignore_index=loss.ignore_index)
    with torch.no_grad(), keep_statistics(model), Interception(model, no_noise):
        output = model(**inputs, labels=labels)
    own = output["loss"] if isinstance(output, Mapping) else output[0]
    if not bool(torch.isfinite(own)):
        return False
    logits = logits_of(output).float()
    ours = float(loss.value(logits, task.targets(labels)))
    precise = own.dtype in (torch.float32, torch.float64)
    if abs(ours - float(own)) > (1e-4 if precise else 2e-2) * max(1.0, abs(float(own))):
        raise OptionError(
            f"{type(model).__name__} reports a loss of {float(own):.6g} on the first batch, where "
            f"undrop's {type(loss).__name__} gives {ours:.6g}: it adds something of its own; override "
            "`undrop_task` to say which loss and targets to use."
        )
    return True


def check_attention(model: nn.Module) -> None:
    """Raise where attention drops inside of a kernel that no interception sees.

    Raises:
        EngineError: naming the implementations that can be seen.
    """
    for config in _configs(getattr(model, "config", None)):
        implementation = getattr(config, "_attn_implementation", None)
        dropped = {n: p for n, p in vars(config).items() if _is_attention_dropout(n) and p}
        if implementation not in (None, "eager", "sdpa") and dropped:
            name, p = next(iter(dropped.items()))
            raise EngineError(
                f"the attention dropout of {type(model).__name__} ({name} = {p:g}) is hidden inside of "
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
