"""undrop in the Trainer of Hugging Face Transformers.

>>> from undrop.integrations.transformers import UndropTrainer
>>> UndropTrainer.__mro__[1].__name__
'UndropMixin'

Use ``UndropTrainer`` in place of ``Trainer``. Its argument ``objective`` is any objective of undrop, by
default ``undrop.Analytic()``. Evaluation and prediction do not change.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from undrop.errors import MissingExtraError, OptionError, TargetError
from undrop.files import replacing
from undrop.integrations.policy import OwnLoss, PolicyStep, StandIn, label_statistics
from undrop.intercept import Interception, call, keep_statistics, logits_of, no_noise, uncompiled
from undrop.losses import ModelLoss, Task
from undrop.losses.model_loss import check_attention, check_same_loss, decoder_inputs, find_task
from undrop.objectives import Analytic, Objective, Step
from undrop.objectives.checks import has_no_effect
from undrop.rng_snapshot import RngSnapshot
from undrop.tensor_files import from_bytes, load_tensors, save_tensors, to_bytes
from undrop.torch_compat import force_eager
from undrop.tuning import Tuner

try:
    from transformers import Trainer
except ImportError as error:
    raise MissingExtraError(__name__, "Transformers and Accelerate", "transformers") from error

_log = logging.getLogger("undrop")

_Base: Any = Trainer if TYPE_CHECKING else object  # for type checkers, the mixin is a Trainer


class _PartMeans:
    """The means of an objective's parts over the steps since the last log."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self._first_step = 0

    def add(self, parts: dict[str, float], scale: float, step: int) -> None:
        """Add the parts of a micro-batch, times ``scale``; ``step`` is the number of steps before it."""
        if not self.sums:
            self._first_step = step
        for name, value in parts.items():
            self.sums[name] = self.sums.get(name, 0.0) + scale * value

    def take(self, step: int) -> dict[str, float]:
        """Return the means, and start again; ``step`` is the number of steps so far."""
        sums, self.sums = self.sums, {}
        return {name: value / max(1, step - self._first_step) for name, value in sums.items()}


@contextmanager
def _keep_metrics(trainer: Any) -> Iterator[None]:
    """Restore the metrics that TRL's trainers collect in ``compute_loss``."""
    names = [n for n in ("_metrics", "_total_train_tokens") if hasattr(trainer, n)]
    saved = {name: copy.deepcopy(getattr(trainer, name)) for name in names}
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(trainer, name, value)


class UndropMixin(_Base):
    """Adds undrop to your own Trainer: ``class Mine(UndropMixin, MyTrainer)``.

    The model's head determines the loss (next token, masked token, class of a token or a sequence, or
    regression). On the first batch, without noise, the loss must agree with the Trainer's own
    ``compute_loss``, so training never uses a different loss silently. The parts of a step, ``loss``,
    ``explicit`` and ``implicit``, are logged as ``undrop/…``; they add up to the Trainer's ``loss``.

    With gradient accumulation, all three parts are means over all targets of the step. Each micro-batch
    draws its own noise, so the implicit part has the covariance of one large batch.

    Args:
        objective: the objective to minimize, without a loss; :class:`~undrop.Analytic` by default.
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
        self._undrop_tune_examples = tune
        self._undrop_tuner_state: Path | None = None  # loaded when the tuner is created
        if tune is not None and self.args.world_size > 1:
            raise OptionError("tune= works in one process: leave it out, or start one process.")
        self.objective = Analytic() if objective is None else objective
        self._undrop_task: Task | None = None
        self._undrop_verified = False
        self._undrop_means = _PartMeans()
        self._undrop_reported = False
        self._undrop_policy_step: PolicyStep | None = None
        if getattr(self.args, "disable_dropout", False) and self.objective.needs_dropout:
            raise OptionError(
                f"{type(self).__name__} has set every p to 0: pass disable_dropout=False. With "
                "undrop.Analytic nothing is dropped, and log-probabilities stay reproducible."
            )
        if callable(self.compute_loss_func):  # in TRL's trainers it is a string
            raise OptionError(
                "compute_loss_func receives only the model's output, but undrop runs the model itself: "
                "leave it out and override `undrop_task` to say which loss and targets to use."
            )
        if not isinstance(self.objective.loss, ModelLoss):
            raise OptionError(
                f"the objective has the loss {type(self.objective.loss).__name__}, but the model's "
                "head determines it: leave it out and override `undrop_task`."
            )

    def undrop_task(self, model: nn.Module, labels: Tensor) -> Task:
        """Return the loss of a model and the targets of a batch; override it for your own head.

        Args:
            model: the model without its wrappers (distributed, compiled).
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
        """Return the objective in train mode, and the Trainer's own loss in eval mode."""
        if not model.training:
            return super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
            )
        own_loss = self._undrop_own_loss(model, inputs, num_items_in_batch)
        if not isinstance(inputs.get("labels"), Tensor):
            if own_loss is not None:
                return self._undrop_policy_loss(model, own_loss)
            raise TargetError(
                f"undrop's objective needs `labels` in the batch, got {', '.join(inputs)}: let the "
                "dataset or the data collator add them."
            )
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        # Accelerate's own autocast is active only inside forward, and the engines need to see it.
        with self.accelerator.autocast():
            task = self._undrop_find_task(model, inputs, labels)
            inputs = decoder_inputs(self._undrop_unwrap(model), inputs, labels)
            targets = task.targets(labels)
            if self._undrop_tune_examples is not None:
                if self.tuner is None:
                    self.tuner = self._undrop_make_tuner(model, task, self._undrop_tune_examples)
                self.tuner.observe(model, inputs, targets)
            step = self.objective(model, inputs, targets)
        self._undrop_report(model, inputs, step)
        scale, log_factor = self._undrop_scales(step, targets, num_items_in_batch)
        self._undrop_means.add(step.parts, log_factor, self.state.global_step)
        if own_loss is not None and hasattr(self, "_metrics"):  # TRL logs entropy, accuracy, tokens
            own_loss(StandIn(model, label_statistics(logits_of(step.output), labels), ""))
        total = step.total if scale == 1.0 else step.total * scale
        return (total, step.output) if return_outputs else total

    def _undrop_own_loss(
        self, model: nn.Module, inputs: dict[str, Any], count: Tensor | int | None
    ) -> OwnLoss | None:
        """Return the Trainer's own loss as a function of the model; None for a plain Trainer."""
        compute = super().compute_loss
        if getattr(compute, "__func__", None) is Trainer.compute_loss:
            return None

        def own_loss(model_or_stand_in: Any) -> Tensor:
            with Interception(uncompiled(model), no_noise):
                result = compute(model_or_stand_in, dict(inputs), num_items_in_batch=count)
            loss: Tensor = result[0] if isinstance(result, tuple) else result
            return loss

        return own_loss

    def _undrop_policy_loss(self, model: nn.Module, own_loss: OwnLoss) -> Tensor:
        """Return the objective on a loss of log-probabilities, as in DPO or GRPO."""
        if self._undrop_policy_step is None:
            if self._undrop_tune_examples is not None or self.args.world_size > 1:
                raise OptionError(
                    f"with {type(self).__name__}, undrop supports neither tune= nor several processes: "
                    "leave tune= out, and start a single process."
                )
            check_attention(self._undrop_unwrap(model))
            self._undrop_policy_step = PolicyStep(self.objective, type(self).__name__)
        with self.accelerator.autocast():
            step = self._undrop_policy_step(model, own_loss)
        self._undrop_report(model, None, step)
        divides_later = self.compute_loss_func is None  # then the Trainer divides the loss itself
        log_factor = 1.0 / self.current_gradient_accumulation_steps if divides_later else 1.0
        self._undrop_means.add(step.parts, log_factor, self.state.global_step)
        return step.total

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Prepare without noise: some trainers generate text or compute log-probabilities here."""
        if not self.model.training:
            return super()._prepare_inputs(inputs)
        with Interception(uncompiled(self.model), no_noise):
            return super()._prepare_inputs(inputs)

    def _undrop_unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module inside the wrappers of Accelerate and ``torch.compile``."""
        return uncompiled(self.accelerator.unwrap_model(model))

    def _undrop_find_task(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> Task:
        """Return the task, found in the first call; its loss is compared with the Trainer's once."""
        if self._undrop_task is None:
            inner = self._undrop_unwrap(model)
            check_attention(inner)
            self._undrop_task = self.undrop_task(inner, labels)
            self.objective.loss = self._undrop_task.loss
            # A subclass that overrides the task may want another loss than the Trainer's.
            self._undrop_verified = type(self).undrop_task is not UndropMixin.undrop_task
        if not self._undrop_verified:
            self._undrop_verified = self._undrop_same_loss(model, inputs, labels, self._undrop_task)
        return self._undrop_task

    def _undrop_same_loss(
        self, model: nn.Module, inputs: dict[str, Any], labels: Tensor, task: Task
    ) -> bool:
        """Check that the task's loss is the Trainer's own; return False if the batch has no targets."""
        inner = self._undrop_unwrap(model)
        noiseless = Interception(uncompiled(model), no_noise)
        with (
            torch.no_grad(),
            RngSnapshot(),
            keep_statistics(model),
            _keep_metrics(self),
            force_eager(),
            noiseless,
        ):
            trainer_loss = super().compute_loss(model, {**inputs, "labels": labels})
            logits = logits_of(call(model, decoder_inputs(inner, inputs, labels)))
        loss = task.loss.value(logits.float(), task.targets(labels))
        owner = f"{type(self).__name__}'s own compute_loss, with {type(inner).__name__},"
        way_out = "override `undrop_task` to say which loss and targets to use"
        return check_same_loss(loss, trainer_loss, owner=owner, loss=task.loss, way_out=way_out)

    def _undrop_make_tuner(self, model: nn.Module, task: Task, examples: Dataset[Any]) -> Tuner:
        """Return a tuner on batches of the examples; it continues from a checkpoint if there is one."""
        inner, batches = self._undrop_unwrap(model), []
        for batch in self.get_test_dataloader(examples):
            inputs = dict(self._prepare_inputs(batch))
            labels = inputs.pop("labels")
            batches.append((decoder_inputs(inner, inputs, labels), task.targets(labels)))
        tuner = Tuner(self.objective, batches)
        if self._undrop_tuner_state is not None:
            load_state(tuner, self._undrop_tuner_state)
        return tuner

    def _undrop_scales(
        self, step: Step, targets: Tensor, num_items_in_batch: Tensor | int | None
    ) -> tuple[float, float]:
        """Return the factors of a micro-batch's parts: one for the loss and one for the log.

        A Trainer that counts the targets of the whole step expects the loss times the micro-batch's
        share of the targets. Any other Trainer divides by the number of micro-batches itself.
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
        """Log once that undrop is active, with the objective, the model, its sites and the parts."""
        reported, self._undrop_reported = self._undrop_reported, True
        if reported or not self.is_world_process_zero():
            return
        sites = "dropout off"
        if self.objective.needs_dropout:
            policy = self._undrop_policy_step
            trained = model if policy is None else policy.policy(model)
            sites = f"{len(self.objective.sites(uncompiled(trained), inputs))} sites"
            if has_no_effect(step.parts):
                sites += ", no effect yet (LoRA starts with B = 0)"
        parts = ", ".join(f"{name} = {value:.4g}" for name, value in step.parts.items())
        names = type(self.objective).__name__, type(self._undrop_unwrap(model)).__name__
        _log.warning("undrop is active: %s on %s, %s, %s", *names, sites, parts)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the mean parts and the tuned p to the logs of training, as means over all processes."""
        if "loss" in logs and self._undrop_means.sums:
            means = self._undrop_means.take(self.state.global_step)
            values = torch.tensor(list(means.values()), device=self.args.device)
            means_over_processes = self.accelerator.reduce(values, reduction="mean").tolist()
            parts = dict(zip(means, means_over_processes, strict=True))
            tuned = {} if self.tuner is None else self.tuner.metrics()
            logs = {**logs, **{f"undrop/{n}": value for n, value in {**parts, **tuned}.items()}}
        super().log(logs, *args, **kwargs)

    def _undrop_state_file(self, folder: str) -> Path:
        rank = f"_{self.args.process_index}" if self.args.world_size > 1 else ""
        return Path(folder) / f"undrop{rank}.safetensors"

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the objective's state with the other random states, so that resuming is exact."""
        super()._save_rng_state(output_dir)
        save_state(self.tuner or self.objective, self._undrop_state_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        path = self._undrop_state_file(checkpoint)
        if path.exists() and self._undrop_tune_examples is not None:
            self._undrop_tuner_state = path
        elif path.exists():
            load_state(self.objective, path)
        else:
            _log.warning(
                "undrop found no state in %s: the noise and the step count start again.", path
            )


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
    """Save the state of an objective or a tuner atomically."""
    with replacing(path) as temporary:
        save_tensors(temporary, {"objective": to_bytes(objective.state_dict())})


def load_state(objective: Objective | Tuner, path: Path) -> None:
    """Restore the state of an objective or a tuner; the file must be complete and unchanged."""
    objective.load_state_dict(from_bytes(load_tensors(path)["objective"]))
