"""Losses of trainers that use a model's log-probabilities, such as DPO, KTO and GRPO.

Such a loss is not a function of one batch of logits. It calls the model, gets the log-probabilities of
the labels (TRL's ``fused_lm_head``) or scores, and computes the rest itself. So the trainer's own
``compute_loss`` runs twice with a stand-in for the model. The first time, the stand-in records the
inputs of the call, and undrop computes its output F and u = ∂F/∂ε. The second time, the stand-in returns
F. The trainer's result is ℓ(F), which torch differentiates twice in F. Nothing here imports TRL.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from undrop.errors import OptionError
from undrop.intercept import Interception, logits_of, no_noise, tensors_in
from undrop.losses import Derivatives
from undrop.losses.generic import Generic
from undrop.objectives import Objective, Step

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
"""What TRL's fused head returns for each token; only the first is differentiated."""
FLAGS = ("is_top1", "label_mask")
"""The fields that are true or false."""


class ModelCalled(Exception):
    """Raised when the trainer calls the model; holds the inputs of the call."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs = inputs


class Policy(nn.Module):
    """A model with one tensor (examples, …, fields) as its output, so that a pass can be stacked."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._undrop_policy = model  # site names leave this attribute out
        self.fields: tuple[str, ...] = ()

    def forward(self, **inputs: Any) -> Tensor:
        """Return log-probabilities and statistics of every token, or scores if the model has none."""
        output = self._undrop_policy(**inputs)
        if getattr(output, "log_probs", None) is None:
            self.fields = ("logits",)
            return logits_of(output).unsqueeze(-1)
        self.fields = tuple(name for name in FIELDS if output.get(name) is not None)
        like = output.log_probs
        return torch.stack([output[name].to(like.dtype) for name in self.fields], -1)

    def as_model_output(self, values: Tensor) -> SimpleNamespace:
        """Return ``values`` in the form of a model output; only its first field has a graph."""
        found = dict.fromkeys((*FIELDS, "logits", "aux_loss", "loss"))
        for i, name in enumerate(self.fields):
            field = values[..., i]
            found[name] = (
                field if i == 0 else field.detach() > 0.5 if name in FLAGS else field.detach()
            )
        return SimpleNamespace(**found)


class StandIn:
    """Replaces the model in the ``compute_loss`` of the trainer named ``trainer_name``.

    A call without gradients (for a reference, or an estimate of a divergence) runs the model without
    noise. A call with gradients returns ``output``; if that is None, it raises :class:`ModelCalled`.
    """

    def __init__(self, model: nn.Module, output: Any, trainer_name: str) -> None:
        self._model, self._output, self._trainer_name = model, output, trainer_name
        self.calls = 0

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Return the output for the model, or raise ``ModelCalled``."""
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
    """The trainer's loss as a function of what the policy returns.

    H is the Hessian in the log-probabilities of the labels. For DPO, -log σ(β·margin), H is β²σ(1-σ)
    along the margin. For losses with a ratio exp(log p - log p_old)·advantage, H has the sign of
    -advantage. ``explicit="identity"``, which penalizes the variance of the log-probabilities, and
    ``"loss-jacobian"`` are never negative.

    The targets are the indices of the examples: they tell the loss the order of a stacked pass.
    """

    has_side_effects = True

    def __init__(self) -> None:
        super().__init__(self._in_order, whole_output=False)
        self._method = "reverse mode"  # trying it out would add a call to the trainer's metrics
        self.trainer_loss: Callable[[Tensor], Tensor] | None = None
        """The trainer's loss of the policy's output in the order of the batch."""

    def _in_order(self, values: Tensor, order: Tensor) -> Tensor:
        assert self.trainer_loss is not None
        return self.trainer_loss(values.index_select(0, order.argsort()))

    def _derivatives_of_part(
        self, output: Any, u: Any, target: Any, form: str, dim: int
    ) -> Derivatives:
        return super()._derivatives_of_part(output, _first_field(u), target, form, dim)

    def count(self, output: Any, target: Any) -> Tensor:
        """Return the number of log-probabilities."""
        return super().count(output[..., 0].unsqueeze(-1), target)


def _first_field(u: Tensor) -> Tensor:
    """Return u of the log-probabilities, and 0 for statistics, which no loss differentiates."""
    keep = u.new_zeros(u.shape[-1])
    keep[0] = 1.0
    return torch.where(keep.bool(), u, 0.0)


@torch.no_grad()
def label_statistics(logits: Tensor, labels: Tensor) -> SimpleNamespace:
    """Compute from logits what TRL's fused head returns, one example at a time to save memory."""
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
    """An objective on a trainer's own loss: ``step(model, own_loss)``."""

    def __init__(self, objective: Objective, trainer_name: str) -> None:
        engine = getattr(objective, "engine", None)
        if engine is not None and engine.name not in ("auto", "antithetic"):
            raise OptionError(
                f"the {engine.name} engine can't differentiate the fused output layer of "
                f"{trainer_name}: use engine='antithetic'."
            )
        self.objective, self.trainer_name, self.loss = objective, trainer_name, PolicyLoss()
        self._policy: Policy | None = None

    def __call__(self, model: nn.Module, own_loss: Callable[[Any], Tensor]) -> Step:
        """Evaluate the objective; ``own_loss`` is the trainer's, which calls the model once."""
        inputs = self._inputs_of_call(model, own_loss)
        policy = self.policy(model)

        def trainer_loss(values: Tensor) -> Tensor:
            return own_loss(StandIn(model, policy.as_model_output(values), self.trainer_name))

        self.loss.trainer_loss = trainer_loss
        self.objective.loss = self.loss
        first = next(x for x in tensors_in(inputs))
        return self.objective(policy, inputs, torch.arange(len(first), device=first.device))

    def policy(self, model: nn.Module) -> Policy:
        """Return the model as undrop runs it."""
        if self._policy is None or self._policy._undrop_policy is not model:
            self._policy = Policy(model)
        return self._policy

    def _inputs_of_call(
        self, model: nn.Module, own_loss: Callable[[Any], Tensor]
    ) -> dict[str, Any]:
        """Run the trainer's loss up to its call of the model, and return the inputs of that call."""
        try:
            own_loss(StandIn(model, None, self.trainer_name))
        except ModelCalled as call:
            return call.inputs
        raise OptionError(
            f"{self.trainer_name} computes its loss without calling the model, so undrop can't compute "
            "the policy's log-probabilities: train with a loss of log-probabilities, or without undrop."
        )
