"""A tuner finds p of every site within one training run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from undrop.diagnosis.measure.branches import Branches
from undrop.diagnosis.measure.estimates import Estimate
from undrop.errors import DataError, NoDropoutError, OptionError
from undrop.generators import Generators
from undrop.intercept import Selection, uncompiled
from undrop.objectives import Analytic, Dropout, Objective, Step
from undrop.options import as_float, check_int
from undrop.report import Table
from undrop.tuning.history import DECAY, EVERY_SITE, Entry, History
from undrop.tuning.moves import MAX_P, MIN_P, START_P, MoveSize, log_odds, probability
from undrop.tuning.trial import RecentSteps, run_trial
from undrop.tuning.validation import Validation, set_aside

INTERVAL = 100
"""The default number of steps between trials."""
BRANCH_STEPS = 10
"""The number of steps of each branch of a trial."""
TRIAL_BATCHES = 4
"""The number of validation batches on which a trial compares its branches."""
LOG_FACTOR = math.log(3.0)
"""One branch has three times the σ² or λ of the run, the other branch a third of it."""


class Tuner:
    """Adjusts p of every site while the model trains, by comparing validation losses.

    Every ``interval`` steps the tuner makes a trial. It trains two branches for ten steps each, from the
    weights of the run and on its last batches, one with more noise and one with less. Then it compares
    their validation losses, and moves p towards the better branch. Two trials vary all sites together,
    the next one varies a single site, and so on. A trial takes 12 forward passes and 20 training steps
    that do not run the optimizer. At the default interval, this adds 25 to 32 % to the average step.

    Every site starts at p = 0.1, whatever p the model declares. Before the first trial, σ² rises from 0
    to its value at p = 0.1. While the model overfits, no p falls below 0.1; otherwise no p rises above
    0.1. A site that declares p = 0 is not tuned. Weight decay, if it is tuned, stays at or above its
    starting value while the model overfits. It falls while the validation loss is clearly below the
    training loss.

    Examples:
        >>> import torch, undrop
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
        >>> held = [(torch.randn(16, 4), torch.randint(2, (16,))) for _ in range(2)]
        >>> tuner = undrop.Tuner(undrop.Dropout(), held)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for _ in range(20):
        ...     step = tuner.step(model, torch.randn(16, 4), torch.randint(2, (16,)))
        ...     optimizer.zero_grad()
        ...     step.backward()
        ...     optimizer.step()
        >>> sorted(tuner.probabilities)
        ['1']

    Args:
        objective: an ``Analytic`` or a ``Dropout``.
        validation: at least two batches (inputs, targets) that training does not see, as large as the
            training batches; or the share of ``training`` to set aside.
        training: the whole training set, if ``validation`` is a share. The attribute of the same name is
            *not* this set but the rest of it, without the validation examples: train on
            ``tuner.training``.
        optimizer: the optimizer whose weight decay the tuner also adjusts; its weight decay must be
            positive.
        interval: the number of steps between trials.
        rate: how far the first clear trial moves log σ² or log λ; moves grow while trials agree.
        batch_size: examples per validation batch, if ``validation`` is a share.
        generator: the generator that seeds the trials; None makes a new one, whose seed comes from
            torch's global generator, so ``torch.manual_seed`` determines the trials.

    Raises:
        OptionError: for an objective without p, or an option out of range.
        DataError: for validation data that can't be used.
    """

    def __init__(
        self,
        objective: Objective,
        validation: Iterable[Any] | float,
        *,
        training: Dataset[Any] | None = None,
        optimizer: Optimizer | None = None,
        interval: int = INTERVAL,
        rate: float = 0.7,
        batch_size: int = 32,
        generator: torch.Generator | None = None,
    ) -> None:
        if not isinstance(objective, Analytic | Dropout):
            raise OptionError(
                f"a tuner needs an Analytic or a Dropout objective, got {type(objective).__name__}."
            )
        if not 0.0 < as_float(rate) < math.inf:
            raise OptionError(f"rate must be positive, got {rate!r}.")
        self.objective: Analytic | Dropout = objective
        # The training set without the examples of `batches`; None if the user passed the batches.
        self.training, batches = _split_data(training, validation, batch_size)
        self.validation = Validation(batches)
        self.optimizer = optimizer
        self.interval = check_int("interval", interval)
        self.rate = float(rate)
        self.history = History()
        self.steps = 0
        self._generators = Generators(generator)
        self._log_values: dict[str, float] = {}  # log σ² of every site, and log λ under DECAY
        self._starts: dict[str, float] = {}  # the log values at the first trial
        self._move_sizes: dict[str, MoveSize] = {}
        self._sites: list[str] = []
        self._recent = RecentSteps()
        self._previous_batches: list[tuple[Any, Any]] = []  # training batches of the last trial
        if optimizer is not None:
            self._log_values[DECAY] = self._starts[DECAY] = _log_decay(optimizer)

    @property
    def probabilities(self) -> dict[str, float]:
        """The p of every site; empty before the first step."""
        return {n: probability(v) for n, v in self._log_values.items() if n != DECAY}

    def step(self, model: nn.Module, inputs: Any, targets: Any) -> Step:
        """Adjust p like :meth:`observe`, and evaluate the objective on a batch.

        Args:
            model: the model, in train mode.
            inputs: the inputs of the batch, as the objective takes them.
            targets: the targets of the batch, as the objective takes them.
        """
        self.observe(model, inputs, targets)
        return self.objective(model, inputs, targets)

    def observe(self, model: nn.Module, inputs: Any, targets: Any) -> dict[str, float] | None:
        """Count a step, and adjust p if a change is due.

        This method is for a training loop that calls the objective itself. p rises in the first steps,
        and then changes every ``interval`` steps.

        Returns:
            The :meth:`metrics` after a trial, else None.
        """
        plain_model = uncompiled(model)
        if not self._sites:
            self._initialize(plain_model, inputs)
        self.validation.check_unseen(inputs, getattr(self.objective, "batch_dim", None) or 0)
        self.steps += 1
        self._warm_up()
        steps_to_trial = -self.steps % self.interval
        if steps_to_trial >= BRANCH_STEPS:
            return None
        weights = self.objective.trainable_parameters(plain_model)
        self._recent.add(weights, inputs, targets)
        if steps_to_trial:
            return None
        recent, self._recent = self._recent, RecentSteps()
        if recent.update_lengths is None:
            return None
        self._make_trial(model, weights, recent.update_lengths, recent.batches[-BRANCH_STEPS:])
        return self.metrics()

    def _initialize(self, model: nn.Module, inputs: Any) -> None:
        """Find the sites to tune, and set p of each: from a loaded state if there is one, else 0.1."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise OptionError(
                f"a tuner works in one process, and there are {dist.get_world_size()}, each of which "
                "would find a different p: tune in a run of one process, and train here with its p."
            )
        selection = self.objective.selection
        sites = [n for n in self.objective.sites(model, inputs).names if selection.weight(n) > 0.0]
        if not sites:
            raise NoDropoutError(
                f"every dropout of {type(model).__name__} has p = 0, and a tuner skips such sites: "
                "set any p above 0 at the sites to tune."
            )
        if self.probabilities and self.probabilities.keys() != set(sites):
            raise DataError(
                f"the saved state belongs to a model with the sites {', '.join(self.probabilities)}, "
                f"but {type(model).__name__} has {', '.join(sites)}: load the state of the same model."
            )
        self._sites = sites
        for name in sites:
            self._starts[name] = log_odds(START_P)
            self._log_values.setdefault(name, self._starts[name])
        self._apply_values(self._log_values)

    def _warm_up(self) -> None:
        """Raise σ² linearly from 0 to its starting value before the first trial.

        Strong noise in the first steps can damage a training run permanently: in a ConvNet, p = 0.6
        turned 9 of 10 ReLU units off.
        """
        duration = min(self.interval, INTERVAL) - BRANCH_STEPS
        if self.steps <= duration:
            self._apply_values(self._shift(self._sites, math.log(self.steps / duration)))

    def _make_trial(
        self, model: nn.Module, weights: list[Tensor], lengths: Tensor, batches: list[Any]
    ) -> None:
        """Make one trial, move the values that it varied, and add it to the history."""
        generator = self._generators(weights[0].device)
        seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        validation = self.validation.next(TRIAL_BATCHES)
        branches = Branches(self.objective, model, weights, batches, validation, seed)
        tried = self._next_to_try()
        names = self._sites if tried == EVERY_SITE else [tried]
        set_up_more = partial(self._set_up_branch, weights, self._shift(names, LOG_FACTOR))
        set_up_less = partial(self._set_up_branch, weights, self._shift(names, -LOG_FACTOR))
        try:
            result = run_trial(branches, lengths, set_up_more, set_up_less, self._previous_batches)
        finally:
            self._apply_values(self._log_values)
        self._previous_batches = batches[-TRIAL_BATCHES:]
        move_size = self._move_sizes.setdefault(tried, MoveSize(self.rate))
        move = move_size.next_move(self.history.z_score(tried, result.benefit))
        self._log_values = self._restrict(self._shift(names, move), result.gap)
        self._apply_values(self._log_values)
        log_values = self._log_values.items()
        values = {n: math.exp(v) if n == DECAY else probability(v) for n, v in log_values}
        self.history.entries.append(Entry(self.steps, tried, result.benefit.value, values))

    def _next_to_try(self) -> str:
        """Return what the next trial varies: a site, all sites or weight decay.

        All sites together, and weight decay if it is tuned, come twice. Then one site has its turn.
        """
        sites = self._sites
        repeated = [EVERY_SITE if len(sites) > 1 else sites[0]]
        if self.optimizer is not None:
            repeated.append(DECAY)
        turn, position = divmod(len(self.history.entries), 2 * len(repeated) + 1)
        return [*repeated, *repeated, sites[turn % len(sites)]][position]

    def _shift(self, names: list[str], by: float) -> dict[str, float]:
        """Return the log values, with ``by`` added to those of ``names``."""
        return {n: value + by * (n in names) for n, value in self._log_values.items()}

    def _restrict(self, log_values: dict[str, float], gap: Estimate) -> dict[str, float]:
        """Return the log values, bounded according to the trial's gap; λ falls if it can't help.

        Ten steps undervalue regularization, which slows learning first and pays later. So while the
        model clearly overfits, nothing falls below its start. Otherwise there is no reason for much
        noise, whatever a trial measures by chance, so no p rises above its start. While the validation
        loss is clearly below the training loss, weight decay can't help, and falls to a third.
        """
        overfits = gap.low > 0.0
        restricted = dict(log_values)
        for name in self._sites:
            start = self._starts[name]
            lowest = start if overfits else log_odds(MIN_P)
            highest = log_odds(MAX_P) if overfits else max(self._log_values[name], start)
            restricted[name] = min(max(restricted[name], lowest), highest)
        if self.optimizer is not None:
            if gap.high < 0.0:
                restricted[DECAY] -= LOG_FACTOR
            if overfits:
                restricted[DECAY] = max(restricted[DECAY], self._starts[DECAY])
        return restricted

    def _set_up_branch(self, weights: list[Tensor], log_values: dict[str, float]) -> list[float]:
        """Apply the values of a branch; return the share of each tensor that weight decay removes.

        The share is lr·λ, as in AdamW: what decoupled weight decay removes in one step.
        """
        self._apply_values(log_values)
        if self.optimizer is None:
            return [0.0] * len(weights)
        rates = {w: float(g["lr"]) for g in self.optimizer.param_groups for w in g["params"]}
        return [rates.get(w, 0.0) * math.exp(log_values[DECAY]) for w in weights]

    def _apply_values(self, log_values: dict[str, float]) -> None:
        """Set σ and p of every site in the objective, and λ in the optimizer."""
        sigmas = {name: math.exp(0.5 * log_values[name]) for name in self._sites}
        self.objective.selection = Selection.with_sigma(sigmas)
        if isinstance(self.objective, Dropout):
            self.objective.site_p = {name: probability(log_values[name]) for name in self._sites}
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = math.exp(log_values[DECAY])

    def metrics(self) -> dict[str, float]:
        """Return the newest ``p/SITE``, ``benefit/SITE`` and ``weight decay``, for logging."""
        values, benefits = self.history.values, self.history.benefits()
        return {
            **{name if name == DECAY else f"p/{name}": value for name, value in values.items()},
            **{f"benefit/{name}": benefit.value for name, benefit in benefits.items()},
        }

    def table(self) -> Table:
        """Return a table of the newest p, benefit and evidence; ``.text()`` formats it."""
        return self.history.table()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, including the objective's state."""
        # These keys are in files that users have saved, so they keep their names.
        return {
            "steps": self.steps,
            "position": self.validation.position,
            "log_values": dict(self._log_values),
            "starts": dict(self._starts),
            "paces": {name: asdict(size) for name, size in self._move_sizes.items()},
            "recent": self._recent.state_dict(),
            "earlier": self._previous_batches,
            "history": [list(entry) for entry in self.history.entries],
            "generators": self._generators.state_dict(),
            "objective": self.objective.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state.

        Raises:
            DataError: if this is not the state of a tuner, or if the saved tuner tunes weight decay and
                this one does not, or the reverse.
        """
        if missing := self.state_dict().keys() - state.keys():
            raise DataError(f"this is not a tuner's state: it lacks {', '.join(sorted(missing))}.")
        if (DECAY in state["log_values"]) != (self.optimizer is not None):
            had, has = ("did", "does not") if self.optimizer is None else ("did not", "does")
            raise DataError(
                f"the saved tuner {had} adjust weight decay, but this one {has}: pass or omit "
                "optimizer= as before."
            )
        self.steps = int(state["steps"])
        self.validation.position = int(state["position"])
        self._log_values, self._starts = dict(state["log_values"]), dict(state["starts"])
        self._move_sizes = {name: MoveSize(**size) for name, size in state["paces"].items()}
        self._recent = RecentSteps()
        self._recent.load_state_dict(state["recent"])
        self._previous_batches = [(inputs, targets) for inputs, targets in state["earlier"]]
        self.history.entries = [Entry(*values) for values in state["history"]]
        self._generators.load_state_dict(state["generators"])
        self.objective.load_state_dict(state["objective"])
        self._sites = []


def _split_data(
    training: Dataset[Any] | None, validation: Iterable[Any] | float, batch_size: int
) -> tuple[Any, Iterable[Any]]:
    """Return the data to train on, if the tuner has split it, and the validation batches."""
    if not isinstance(validation, int | float):
        if training is not None:
            raise OptionError(
                "training= is only for a validation share: pass the share as validation, e.g. 0.05, or "
                "leave training= out."
            )
        return None, validation
    if training is None:
        raise OptionError(
            f"validation={validation!r} is a share: pass training=DATASET, the data to take it from."
        )
    return set_aside(training, validation, batch_size=batch_size)


def _log_decay(optimizer: Optimizer) -> float:
    """Return the log of the optimizer's weight decay, which must be the same in all groups."""
    decays = {float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups}
    if len(decays) != 1 or min(decays) <= 0.0:
        raise OptionError(
            f"the optimizer has a weight decay of {', '.join(map(str, sorted(decays)))}: to tune it, "
            "give all parameter groups the same positive value to start from."
        )
    return math.log(decays.pop())
