"""Losses of trainers that use a model's log-probabilities, such as DPO, KTO and GRPO.

The trainer computes such a loss itself: it calls the model, which returns scores, or (with TRL's
``fused_lm_head``) the log-probabilities of the labels. So undrop runs the trainer's own
``compute_loss`` twice with a stand-in for the model. In the first run, the stand-in records the inputs
of the call, and undrop computes the model's output F and u = ∂F/∂ε. In the second run, the stand-in
returns F, so the trainer returns ℓ(F), which torch differentiates twice in F. This module does not
import TRL.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from undrop.errors import OptionError
from undrop.intercept import Interception, logits_of, no_noise, tensors_in
from undrop.losses import Derivatives
from undrop.losses.generic import Generic
from undrop.objectives import Objective, Step

OwnLoss: TypeAlias = Callable[[Any], Tensor]
"""Computes a trainer's own loss, given a model to call."""
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
"""The outputs of TRL's fused head for each token; losses differentiate only the first one."""
FLAGS = ("is_top1", "label_mask")
"""The boolean fields."""


class ModelCalled(Exception):
    """Raised when the trainer calls the model; holds the inputs of the call."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs = inputs


class Policy(nn.Module):
    """Wraps a model so that it returns one tensor (examples, …, fields), as a stacked pass needs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._undrop_policy = model  # names of sites omit this attribute
        self.fields: tuple[str, ...] = ()

    def forward(self, **inputs: Any) -> Tensor:
        """Return log-probabilities and statistics of every token, or the logits if there are none."""
        output = self._undrop_policy(**inputs)
        if getattr(output, "log_probs", None) is None:
            self.fields = ("logits",)
            return logits_of(output).unsqueeze(-1)
        self.fields = tuple(name for name in FIELDS if output.get(name) is not None)
        dtype = output.log_probs.dtype
        return torch.stack([output[name].to(dtype) for name in self.fields], -1)

    def as_model_output(self, values: Tensor) -> SimpleNamespace:
        """Return the tensor of :meth:`forward` as a model output; only the first field has a graph."""
        output = dict.fromkeys((*FIELDS, "logits", "aux_loss", "loss"))
        first, *statistics = self.fields
        output[first] = values[..., 0]
        for i, name in enumerate(statistics, 1):
            field = values[..., i].detach()
            output[name] = field > 0.5 if name in FLAGS else field
        return SimpleNamespace(**output)


class StandIn:
    """Replaces the model in the ``compute_loss`` of the trainer named ``trainer_name``.

    A call without gradients, such as for the log-probabilities of a reference, runs the model without
    noise. A call with gradients returns ``output``; if it is None, the call raises :class:`ModelCalled`.
    """

    def __init__(self, model: nn.Module, output: Any, trainer_name: str) -> None:
        self._model, self._output, self._trainer_name = model, output, trainer_name
        self.calls = 0

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Return the output in place of the model's, or raise ``ModelCalled``."""
        if not torch.is_grad_enabled():
            with Interception(self._model, no_noise):
                return self._model(*args, **inputs)
        if args or inputs.get("output_router_logits"):
            raise OptionError(
                f"{self._trainer_name} requests router logits or passes inputs by position, which "
                "undrop does not support: use router_aux_loss_coef=0, or train without undrop."
            )
        if self._output is None:
            raise ModelCalled(inputs)
        self.calls += 1
        if self.calls > 1:
            raise OptionError(
                f"the loss of {self._trainer_name} calls the model more than once with gradients, and "
                "undrop supports one call: use a loss that calls the policy once."
            )
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class PolicyLoss(Generic):
    """The trainer's loss as a function of the policy's output.

    H is the Hessian in the log-probabilities of the labels. For DPO, -log σ(β·margin), H is β²σ(1-σ)
    along the margin. For losses with a ratio exp(log p - log p_old)·advantage, H has the sign of
    -advantage. The explicit part is never negative with ``explicit="identity"``, which penalizes the
    variance of the log-probabilities, and with ``"loss-jacobian"``.

    The targets are the indices of the examples. A stacked pass reorders the examples, and with the
    indices the loss restores the order of the batch.
    """

    has_side_effects = True

    def __init__(self) -> None:
        super().__init__(self._loss_in_batch_order, whole_output=False)
        # A test of other methods would count in the trainer's metrics.
        self._method = "reverse mode"
        self.trainer_loss: Callable[[Tensor], Tensor] | None = None
        """The trainer's loss, given the policy's output in the order of the batch."""

    def _loss_in_batch_order(self, values: Tensor, order: Tensor) -> Tensor:
        assert self.trainer_loss is not None
        return self.trainer_loss(values.index_select(0, order.argsort()))

    def _derivatives_of_part(
        self, output: Any, u: Any, target: Any, form: str, dim: int
    ) -> Derivatives:
        is_first = torch.arange(u.shape[-1], device=u.device) == 0
        u = torch.where(
            is_first, u, 0.0
        )  # no loss differentiates the statistics in the other fields
        return super()._derivatives_of_part(output, u, target, form, dim)

    def count(self, output: Any, target: Any) -> Tensor:
        """Return the number of log-probabilities."""
        return super().count(output[..., 0].unsqueeze(-1), target)


@torch.no_grad()
def label_statistics(logits: Tensor, labels: Tensor) -> SimpleNamespace:
    """Return the outputs of TRL's fused head, given logits; one example at a time to save memory."""
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    mask = labels[:, 1:] != -100
    for scores, label in zip(logits[:, :-1], labels[:, 1:].clamp(min=0), strict=True):
        log_p = scores.float().log_softmax(-1)
        chosen = log_p.gather(-1, label.unsqueeze(-1)).squeeze(-1)
        rows.append((chosen, -(log_p.exp() * log_p).sum(-1), log_p.argmax(-1) == label))
    log_probs, entropy, is_top1 = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return SimpleNamespace(
        log_probs=log_probs.masked_fill(~mask, 0.0),
        entropy=entropy.masked_fill(~mask, 0.0),
        is_top1=is_top1 & mask,
        label_mask=mask,
        aux_loss=None,
    )


class PolicyStep:
    """Evaluates an objective on a trainer's own loss: ``step = policy_step(model, own_loss)``."""

    def __init__(self, objective: Objective, trainer_name: str) -> None:
        engine = getattr(objective, "engine", None)
        if engine is not None and engine.name not in ("auto", "antithetic"):
            raise OptionError(
                f"the {engine.name} engine can't differentiate the fused output layer of "
                f"{trainer_name}: use engine='antithetic'."
            )
        self.objective, self.trainer_name, self.loss = objective, trainer_name, PolicyLoss()
        self._policy: Policy | None = None

    def __call__(self, model: nn.Module, own_loss: OwnLoss) -> Step:
        """Evaluate the objective on the trainer's own loss."""
        inputs = self._inputs_of_call(model, own_loss)
        policy = self.policy(model)

        def trainer_loss(values: Tensor) -> Tensor:
            return own_loss(StandIn(model, policy.as_model_output(values), self.trainer_name))

        self.loss.trainer_loss = trainer_loss
        self.objective.loss = self.loss
        first = next(iter(tensors_in(inputs)))
        return self.objective(policy, inputs, torch.arange(len(first), device=first.device))

    def policy(self, model: nn.Module) -> Policy:
        """Return the model with one output tensor; the same object for the same model."""
        if self._policy is None or self._policy._undrop_policy is not model:
            self._policy = Policy(model)
        return self._policy

    def _inputs_of_call(self, model: nn.Module, own_loss: OwnLoss) -> dict[str, Any]:
        """Run the trainer's loss up to its call of the model, and return the inputs of that call."""
        try:
            own_loss(StandIn(model, None, self.trainer_name))
        except ModelCalled as call:
            return call.inputs
        raise OptionError(
            f"{self.trainer_name} computes its loss without calling the model, so undrop can't compute "
            "the policy's log-probabilities: train with a loss of log-probabilities, or without undrop."
        )
