"""undrop in the Trainer of Hugging Face Transformers.

>>> from undrop.integrations.transformers import UndropTrainer
>>> UndropTrainer.__mro__[1].__name__
'UndropMixin'

Use it in place of ``Trainer``. ``objective`` is any objective of undrop, by default
``undrop.Analytic()``. Evaluation and prediction do not change.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from undrop.errors import MissingExtraError, OptionError, TargetError
from undrop.files import replacing
from undrop.integrations.policy import PolicyStep, StandIn, label_statistics
from undrop.intercept import (
    Interception,
    RngSnapshot,
    call,
    keep_statistics,
    logits_of,
    no_noise,
    uncompiled,
)
from undrop.losses import ModelLoss, Task
from undrop.losses.model_loss import check_attention, check_same_loss, decoder_inputs, find_task
from undrop.objectives import Analytic, Objective, Step
from undrop.objectives.checks import has_no_effect
from undrop.tensor_files import from_bytes, load_tensors, save_tensors, to_bytes
from undrop.tuning import Tuner

try:
    from transformers import Trainer
except ImportError as error:
    raise MissingExtraError(
        "undrop.integrations.transformers", "Transformers and Accelerate", "transformers"
    ) from error

_log = logging.getLogger("undrop")

_Base: Any = Trainer if TYPE_CHECKING else object  # for type checkers, the mixin is a Trainer


class _Sums:
    """An objective's parts, summed since they were last logged."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._since = 0

    def add(self, parts: dict[str, float], scale: float, step: int) -> None:
        """Add the parts of a micro-batch; ``step`` is the number of steps before it."""
        if not self.parts:
            self._since = step
        for name, value in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + scale * value

    def take(self, step: int) -> dict[str, float]:
        """Return the means over the steps since the last log, and set the sums to 0."""
        parts, self.parts = self.parts, {}
        return {name: value / max(1, step - self._since) for name, value in parts.items()}


@contextmanager
def _keep_metrics(trainer: Any) -> Iterator[None]:
    """Restore the metrics that TRL's trainers collect in ``compute_loss``."""
    names = [n for n in ("_metrics", "_total_train_tokens") if hasattr(trainer, n)]
    before = {name: copy.deepcopy(getattr(trainer, name)) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(trainer, name, value)


class UndropMixin(_Base):
    """Adds undrop to your own Trainer: ``class Mine(UndropMixin, MyTrainer)``.

    The model's head determines the loss (next token, masked token, class of a token or a sequence, or
    numbers). On the first batch, without noise, the loss must agree with the Trainer's own
    ``compute_loss``, so training never uses a different loss silently. ``loss``, ``explicit`` and
    ``implicit`` are logged as ``undrop/…``; they add up to the Trainer's ``loss``.

    With gradient accumulation, all three parts are means over all targets of the step. Each micro-batch
    draws its own noise, so the implicit part has the covariance of one large batch.

    Args:
        objective: what to minimize. The model's head determines its loss.
        tune: examples that training does not see. A :class:`~undrop.Tuner` tunes p of every site on
            them, in evaluation batches, and logs it as ``undrop/p/SITE``. It works in one process only.
        args: passed to the Trainer, like all other arguments.
    """

    def __init__(
        self,
        *args: Any,
        objective: Objective | None = None,
        tune: Dataset[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.tuner: Tuner | None = None
        self._undrop_tune = tune
        self._undrop_saved: Path | None = None
        if tune is not None and self.args.world_size > 1:
            raise OptionError(
                "tune= works in one process: leave it out, or start a single process."
            )
        self.objective = Analytic() if objective is None else objective
        self._undrop_task: Task | None = None
        self._undrop_verified = False
        self._undrop_sums = _Sums()
        self._undrop_reported = False
        self._undrop_policy_step: PolicyStep | None = None
        if getattr(self.args, "disable_dropout", False) and self.objective.needs_dropout:
            raise OptionError(
                f"{type(self).__name__} has set every p to 0: pass disable_dropout=False. With "
                "undrop.Analytic nothing is dropped, and log-probabilities stay reproducible."
            )
        if callable(self.compute_loss_func):  # TRL puts a string there
            raise OptionError(
                "compute_loss_func receives only the model's output, and undrop needs the whole pass: "
                "leave it out and override `undrop_task` to say which loss and targets to use."
            )
        if not isinstance(self.objective.loss, ModelLoss):
            raise OptionError(
                f"the objective has the loss {type(self.objective.loss).__name__}, but the model's "
                "head determines it: leave it out and override `undrop_task`."
            )

    def undrop_task(self, model: nn.Module, labels: Tensor) -> Task:
        """Return the loss of this model and its targets; override it for your own head.

        Args:
            model: the model, without wrappers.
            labels: the labels of the first batch.
        """
        return find_task(model, labels, self.args.label_smoothing_factor)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Evaluate the objective in training; in eval mode, leave the loss to the Trainer."""
        if not model.training:
            return super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
            )
        own = self._undrop_own_loss(model, inputs, num_items_in_batch)
        if not isinstance(inputs.get("labels"), Tensor):
            if own is not None:
                return self._undrop_on_policy(model, own)
            raise TargetError(
                f"undrop's objective needs `labels` in the batch, got {', '.join(inputs)}."
            )
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        # Accelerate's own autocast is inside forward, where the engines would not see it.
        with self.accelerator.autocast():
            task = self._undrop_checked_task(model, inputs, labels)
            inputs = decoder_inputs(self.accelerator.unwrap_model(model), inputs, labels)
            targets = task.targets(labels)
            if self._undrop_tune is not None:
                self._undrop_tuner(model, task, self._undrop_tune).observe(model, inputs, targets)
            step = self.objective(model, inputs, targets)
        if not self._undrop_reported:
            self._undrop_report(model, inputs, step)
        scale, logged = self._undrop_scales(step, targets, num_items_in_batch)
        self._undrop_sums.add(step.parts, logged, self.state.global_step)
        if own is not None and hasattr(self, "_metrics"):  # TRL's own entropy, accuracy and tokens
            own(StandIn(model, label_statistics(logits_of(step.output), labels), ""))
        total = step.total if scale == 1.0 else step.total * scale
        return (total, step.output) if return_outputs else total

    def _undrop_own_loss(
        self, model: nn.Module, inputs: dict[str, Any], count: Tensor | int | None
    ) -> Callable[[Any], Tensor] | None:
        """Return the wrapped Trainer's loss as a function of the model; None for a plain Trainer."""
        compute = super().compute_loss
        if getattr(compute, "__func__", None) is Trainer.compute_loss:
            return None

        def own(model_or_stand_in: Any) -> Tensor:
            with Interception(uncompiled(model), no_noise):
                found = compute(model_or_stand_in, dict(inputs), num_items_in_batch=count)
            loss: Tensor = found[0] if isinstance(found, tuple) else found
            return loss

        return own

    def _undrop_on_policy(self, model: nn.Module, own: Callable[[Any], Tensor]) -> Tensor:
        """Evaluate the objective on a loss of log-probabilities, as in DPO or GRPO."""
        if self._undrop_policy_step is None:
            if self._undrop_tune is not None or self.args.world_size > 1:
                raise OptionError(
                    f"with {type(self).__name__}, undrop supports neither tune= nor several processes: "
                    "leave tune= out, and start a single process."
                )
            check_attention(self.accelerator.unwrap_model(model))
            self._undrop_policy_step = PolicyStep(self.objective, type(self).__name__)
        with self.accelerator.autocast():
            step = self._undrop_policy_step(model, own)
        if not self._undrop_reported:
            self._undrop_report(model, None, step)
        divided = self.compute_loss_func is None  # the Trainer divides the loss later
        logged = 1.0 / self.current_gradient_accumulation_steps if divided else 1.0
        self._undrop_sums.add(step.parts, logged, self.state.global_step)
        return step.total

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Prepare without noise: some trainers generate text and compute old log-probabilities here."""
        if not self.model.training:
            return super()._prepare_inputs(inputs)
        with Interception(uncompiled(self.model), no_noise):
            return super()._prepare_inputs(inputs)

    def _undrop_checked_task(
        self, model: nn.Module, inputs: dict[str, Any], labels: Tensor
    ) -> Task:
        """Return the model's task, found at the first step and compared with the Trainer's own loss."""
        if self._undrop_task is None:
            inner = self.accelerator.unwrap_model(model)
            check_attention(inner)
            self._undrop_task = self.undrop_task(inner, labels)
            self.objective.loss = self._undrop_task.loss
            # A subclass that overrides the task wants a different loss.
            self._undrop_verified = type(self).undrop_task is not UndropMixin.undrop_task
        if not self._undrop_verified:
            self._undrop_verified = self._undrop_agrees(model, inputs, labels, self._undrop_task)
        return self._undrop_task

    def _undrop_agrees(
        self, model: nn.Module, inputs: dict[str, Any], labels: Tensor, task: Task
    ) -> bool:
        """Return whether the task's loss is the Trainer's own; False if the batch has no targets."""
        inner = self.accelerator.unwrap_model(model)
        without_noise = Interception(uncompiled(model), no_noise)
        with (
            torch.no_grad(),
            RngSnapshot(),
            keep_statistics(model),
            without_noise,
            _keep_metrics(self),
        ):
            theirs = super().compute_loss(model, {**inputs, "labels": labels})
            logits = logits_of(call(model, decoder_inputs(inner, inputs, labels)))
        return check_same_loss(
            task.loss.value(logits.float(), task.targets(labels)),
            theirs,
            whose=f"{type(self).__name__}'s own compute_loss, with {type(inner).__name__},",
            loss=task.loss,
            way_out="override `undrop_task` to say which loss and targets to use",
        )

    def _undrop_tuner(self, model: nn.Module, task: Task, examples: Dataset[Any]) -> Tuner:
        """Return the tuner, which is made at the first step, when the loss is known."""
        if self.tuner is None:
            inner, batches = self.accelerator.unwrap_model(model), []
            for batch in self.get_test_dataloader(examples):
                rest = dict(self._prepare_inputs(batch))
                labels = rest.pop("labels")
                batches.append((decoder_inputs(inner, rest, labels), task.targets(labels)))
            self.tuner = Tuner(self.objective, batches)
            if self._undrop_saved is not None:
                load_state(self.tuner, self._undrop_saved)
        return self.tuner

    def _undrop_scales(
        self, step: Step, targets: Tensor, num_items_in_batch: Tensor | int | None
    ) -> tuple[float, float]:
        """Return the share of a micro-batch in its step: a factor for the loss and one for the log.

        A Trainer that counts the targets of the whole step expects the share of the targets. Any other
        Trainer divides by the number of micro-batches itself.
        """
        if num_items_in_batch is None or not self.model_accepts_loss_kwargs:
            return 1.0, 1.0 / self.current_gradient_accumulation_steps
        assert self._undrop_task is not None
        count = self._undrop_task.loss.count(logits_of(step.output), targets)
        share = float(count) / float(num_items_in_batch)
        if self.args.average_tokens_across_devices:  # gradients will be averaged over the processes
            share *= int(self.accelerator.num_processes)
        return share, share

    def _undrop_report(self, model: nn.Module, inputs: dict[str, Any] | None, step: Step) -> None:
        """Log one line that says that undrop is active, and which model it trains."""
        self._undrop_reported = True
        if not self.is_world_process_zero():
            return
        found = "dropout off"
        if self.objective.needs_dropout:
            policy = self._undrop_policy_step
            trained = model if policy is None else policy.policy(model)
            found = f"{len(self.objective.sites(uncompiled(trained), inputs))} sites"
            if has_no_effect(step.parts):
                found += ", no effect yet (LoRA starts with B = 0)"
        _log.warning(
            "undrop is active: %s on %s, %s, %s",
            type(self.objective).__name__,
            type(self.accelerator.unwrap_model(model)).__name__,
            found,
            ", ".join(f"{name} = {value:.4g}" for name, value in step.parts.items()),
        )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the parts, averaged as the Trainer averages its loss, to the logs of training."""
        if "loss" in logs and self._undrop_sums.parts:
            means = self._undrop_sums.take(self.state.global_step)
            values = torch.tensor(list(means.values()), device=self.args.device)
            over_all = self.accelerator.reduce(values, reduction="mean").tolist()
            names = (f"undrop/{name}" for name in means)
            tuned = {} if self.tuner is None else self.tuner.metrics()
            figures = {f"undrop/{name}": value for name, value in tuned.items()}
            logs = {**logs, **dict(zip(names, over_all, strict=True)), **figures}
        super().log(logs, *args, **kwargs)

    def _undrop_file(self, folder: str) -> Path:
        rank = f"_{self.args.process_index}" if self.args.world_size > 1 else ""
        return Path(folder) / f"undrop{rank}.safetensors"

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the objective's state with the other random states, so that resuming is exact."""
        super()._save_rng_state(output_dir)
        save_state(self.tuner or self.objective, self._undrop_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        path = self._undrop_file(checkpoint)
        if path.exists() and self._undrop_tune is not None:
            self._undrop_saved = path  # the tuner is made at the first step
        elif path.exists():
            load_state(self.objective, path)
        else:
            _log.warning("undrop found no state in %s: its noise and step count start again.", path)


class UndropTrainer(UndropMixin, Trainer):
    """Transformers' ``Trainer`` with one more argument, ``objective``; see :class:`UndropMixin`.

    Examples:
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> model = BertForSequenceClassification(BertConfig(num_hidden_layers=1))
        >>> trainer = UndropTrainer(model, TrainingArguments("out", report_to=[], use_cpu=True))
        >>> type(trainer.objective).__name__
        'Analytic'
    """


def save_state(objective: Objective | Tuner, path: Path) -> None:
    """Write the state of an objective atomically."""
    with replacing(path) as temporary:
        save_tensors(temporary, {"objective": to_bytes(objective.state_dict())})


def load_state(objective: Objective | Tuner, path: Path) -> None:
    """Restore an objective's saved state from a file, which must be complete and unchanged."""
    objective.load_state_dict(from_bytes(load_tensors(path)["objective"]))
