"""Find p of every site within one training run."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
from undrop.tuning.history import DECAY, EVERY, Entry, History
from undrop.tuning.rule import HIGHEST, LOWEST, START, Pace, log_odds, probability
from undrop.tuning.trial import RecentSteps, compare
from undrop.tuning.validation import Validation, set_aside

INTERVAL = 100
"""The steps between trials."""
STEPS = 10
"""The steps of each branch of a trial."""
HELD = 4
"""The validation batches that a trial compares its branches on."""
APART = math.log(3.0)
"""One branch has three times the σ² or λ of the run, the other branch a third of it."""


class Tuner:
    """Adjusts p of every site while the model trains, by what it does to the validation loss.

    Every ``interval`` steps it makes a trial: it trains two branches for ten steps each, from the
    weights of the run and on its last batches, one with more noise and one with less, compares their
    validation losses, and moves p towards the better one. Trials of all sites together alternate with
    trials of single sites. A trial is 20 steps without an optimizer's update and 12 passes: this adds
    25 to 32 % to the average step at the default interval.

    Every site starts at p = 0.1, whatever p the model declares; before the first trial, σ² rises from
    0 to its value there. While the model overfits, p does not fall below 0.1; otherwise it does not
    rise above 0.1. A site that declares 0 is not tuned. Weight decay does not fall below its start while
    the model overfits, and falls while the validation loss is clearly below the training loss.

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
        training: the training set, if ``validation`` is a share. Then train on :attr:`training`.
        optimizer: also adjust the weight decay of this optimizer, which must not be 0.
        interval: steps between trials.
        rate: how far the first clear trial moves log σ² or log λ; moves grow while trials agree.
        batch_size: examples per validation batch that is set aside.
        generator: the source of random numbers; None makes a generator that ``torch.manual_seed`` seeds.

    Raises:
        OptionError: for an objective that has nothing to adjust, or an option out of range.
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
                f"a tuner adjusts Analytic and Dropout, got {type(objective).__name__}, which has no p."
            )
        if not 0.0 < as_float(rate) < math.inf:
            raise OptionError(f"rate must be positive, got {rate!r}.")
        self.objective: Analytic | Dropout = objective
        self.training, batches = _divided(training, validation, batch_size)
        self.validation = Validation(batches)
        self.optimizer = optimizer
        self.interval = check_int("interval", interval)
        self.rate = float(rate)
        self.history = History()
        self.steps = 0
        self._generators = Generators(generator)
        self._log_values: dict[str, float] = {}  # log σ² of every site, log λ
        self._starts: dict[str, float] = {}  # the same, at the first trial
        self._paces: dict[str, Pace] = {}
        self._sites: list[str] = []
        self._recent = RecentSteps()
        self._earlier: list[tuple[Any, Any]] = []  # training batches of the last trial
        if optimizer is not None:
            self._log_values[DECAY] = self._starts[DECAY] = _log_decay(optimizer)

    @property
    def probabilities(self) -> dict[str, float]:
        """The p of every site; empty before the first step."""
        return {
            name: probability(value) for name, value in self._log_values.items() if name != DECAY
        }

    def step(self, model: nn.Module, inputs: Any, targets: Any) -> Step:
        """Adjust p as :meth:`observe` does, and evaluate the objective on a batch.

        Args:
            model: in train mode.
            inputs: as for the objective.
            targets: as for the objective.
        """
        self.observe(model, inputs, targets)
        return self.objective(model, inputs, targets)

    def observe(self, model: nn.Module, inputs: Any, targets: Any) -> dict[str, float] | None:
        """Count a step, and adjust p if it is due; for a training loop that calls the objective itself.

        p rises in the first steps, and changes every ``interval`` steps after that.

        Returns:
            The ``figures()`` after a trial, else None.
        """
        inner = uncompiled(model)
        if not self._sites:
            self._begin(inner, inputs)
        self.validation.compare(inputs, getattr(self.objective, "batch_dim", None) or 0)
        self.steps += 1
        self._rise()
        if -self.steps % self.interval >= STEPS:
            return None
        weights = self.objective.trainable_parameters(inner)
        self._recent.add(weights, inputs, targets)
        if self.steps % self.interval:
            return None
        recent, self._recent = self._recent, RecentSteps()
        if recent.lengths is None:
            return None
        self._try(model, weights, recent.lengths, recent.batches[-STEPS:])
        return self.figures()

    def _rise(self) -> None:
        """Raise σ² from 0 to its start before the first trial.

        Strong noise in the first steps can damage a training run permanently: in a ConvNet, p = 0.6
        turned 9 of 10 ReLU units off.
        """
        last = min(self.interval, INTERVAL) - STEPS
        if self.steps <= last:
            by = math.log(self.steps / last)
            self._apply({n: v if n == DECAY else v + by for n, v in self._log_values.items()})

    def figures(self) -> dict[str, float]:
        """Return the newest ``p/SITE``, ``benefit/SITE`` and ``weight decay``, for a log."""
        values, benefits = self.history.values, self.history.benefits()
        return {
            **{name if name == DECAY else f"p/{name}": value for name, value in values.items()},
            **{f"benefit/{name}": found.value for name, found in benefits.items()},
        }

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        """Find the sites; a saved state may know their p already."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise OptionError(
                f"a tuner works in one process, and there are {dist.get_world_size()}, which would find "
                "different p: tune in a run of one process, and use the p that it finds here."
            )
        found = self.objective.sites(model, inputs)
        chosen = [name for name in found.names if self.objective.selection.weight(name) > 0.0]
        if not chosen:
            raise NoDropoutError(
                f"every dropout of {type(model).__name__} has p = 0, and a tuner skips such sites: "
                "set any p above 0 at the sites to tune."
            )
        if self.probabilities and self.probabilities.keys() != set(chosen):
            raise DataError(
                f"the saved state belongs to a model with the sites {', '.join(self.probabilities)}, "
                f"but {type(model).__name__} has {', '.join(chosen)}: load the state of the same model."
            )
        self._sites = chosen
        for name in chosen:
            self._starts[name] = log_odds(START)
            self._log_values.setdefault(name, self._starts[name])
        self._apply(self._log_values)

    def _try(
        self,
        model: nn.Module,
        weights: list[Tensor],
        lengths: Tensor,
        batches: list[tuple[Any, Any]],
    ) -> None:
        """Make one trial, and move what it tried."""
        generator = self._generators(weights[0].device)
        seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        held = self.validation.next(HELD)
        branches = Branches(self.objective, model, weights, batches, held, seed)
        tried = self._next()
        more, less = (partial(self._branch, weights, tried, sign * APART) for sign in (1.0, -1.0))
        try:
            found = compare(branches, lengths, more, less, self._earlier)
        finally:
            self._apply(self._log_values)
        self._earlier = batches[-HELD:]
        pace = self._paces.setdefault(tried, Pace(self.rate))
        by = pace.move(self.history.z_score(tried, found.benefit))
        self._log_values = self._bounded(self._shifted(tried, by), found.gap)
        self._apply(self._log_values)
        values = {
            n: math.exp(v) if n == DECAY else probability(v) for n, v in self._log_values.items()
        }
        self.history.entries.append(Entry(self.steps, tried, found.benefit.value, values))

    def _next(self) -> str:
        """Return what to try: all sites together more often than single sites, which take turns."""
        names = self._sites
        often = [EVERY if len(names) > 1 else names[0]] + [DECAY] * (self.optimizer is not None)
        turn, place = divmod(len(self.history.entries), 2 * len(often) + 1)
        return [*often, *often, names[turn % len(names)]][place]

    def _shifted(self, tried: str, by: float) -> dict[str, float]:
        names = self._sites if tried == EVERY else [tried]
        return {n: value + by * (n in names) for n, value in self._log_values.items()}

    def _bounded(self, logs: dict[str, float], gap: Estimate) -> dict[str, float]:
        """Return the values within their bounds, given how far L_val is above the training loss.

        Ten steps undervalue regularization, which slows learning first and pays later. So nothing
        falls below its start while the model clearly overfits. Otherwise there is no reason for much
        noise, whatever a trial finds by chance, so p does not rise above its start. While the model
        clearly does not overfit, weight decay has nothing to gain, and falls to a third.
        """
        fall = APART if gap.high < 0.0 else 0.0
        logs = {n: v - fall * (n == DECAY) for n, v in logs.items()}
        lowest = dict.fromkeys(self._sites, log_odds(LOWEST))
        highest = {n: max(self._log_values[n], self._starts[n]) for n in self._sites}
        if gap.low > 0.0:
            lowest, highest = self._starts, dict.fromkeys(self._sites, log_odds(HIGHEST))
        raised = {n: max(v, lowest.get(n, v)) for n, v in logs.items()}
        return {n: min(v, highest.get(n, v)) for n, v in raised.items()}

    def _branch(self, weights: list[Tensor], tried: str, by: float) -> list[float]:
        """Set up a branch; return the share of each tensor that weight decay removes in a step."""
        logs = self._shifted(tried, by)
        self._apply(logs)
        if self.optimizer is None:
            return [0.0] * len(weights)
        rates = {w: float(g["lr"]) for g in self.optimizer.param_groups for w in g["params"]}
        return [rates.get(w, 0.0) * math.exp(logs[DECAY]) for w in weights]

    def _apply(self, logs: dict[str, float]) -> None:
        """Set σ and p of every site in the objective, and λ in the optimizer."""
        sigmas = {name: math.exp(0.5 * logs[name]) for name in self._sites}
        self.objective.selection = Selection.with_sigma(sigmas)
        if isinstance(self.objective, Dropout):
            self.objective.site_p = {name: probability(logs[name]) for name in self._sites}
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = math.exp(logs[DECAY])

    def table(self) -> Table:
        """Return p and benefit of every site, as they are now; prints with ``.text()``."""
        return self.history.table()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, including the objective's state."""
        return {
            "steps": self.steps,
            "position": self.validation.position,
            "log_values": dict(self._log_values),
            "starts": dict(self._starts),
            "paces": {name: pace.state_dict() for name, pace in self._paces.items()},
            "recent": self._recent.state_dict(),
            "earlier": self._earlier,
            "history": [list(entry) for entry in self.history.entries],
            "generators": self._generators.state_dict(),
            "objective": self.objective.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state.

        Raises:
            DataError: if this is not the state of a tuner, or if only one of the two runs tunes weight
                decay.
        """
        if missing := self.state_dict().keys() - state.keys():
            raise DataError(f"this is not a tuner's state: it lacks {', '.join(sorted(missing))}.")
        if (DECAY in state["log_values"]) != (self.optimizer is not None):
            had, has = ("tuned", "leaves") if self.optimizer is None else ("left", "tunes")
            raise DataError(
                f"the saved run {had} weight decay and this tuner {has} it: pass optimizer= as before."
            )
        self.steps = int(state["steps"])
        self.validation.position = int(state["position"])
        self._log_values, self._starts = dict(state["log_values"]), dict(state["starts"])
        self._paces = {name: Pace(**values) for name, values in state["paces"].items()}
        self._recent = RecentSteps()
        self._recent.load_state_dict(state["recent"])
        self._earlier = [(inputs, targets) for inputs, targets in state["earlier"]]
        self.history.entries = [Entry(*values) for values in state["history"]]
        self._generators.load_state_dict(state["generators"])
        self.objective.load_state_dict(state["objective"])
        self._sites = []


def _divided(
    training: Dataset[Any] | None, validation: Iterable[Any] | float, batch_size: int
) -> tuple[Any, Iterable[Any]]:
    """Return what is left to train on, and the validation batches."""
    if not isinstance(validation, int | float):
        if training is not None:
            raise OptionError(
                "training= goes with a share: pass validation as a share of it, or leave training= out."
            )
        return None, validation
    if training is None:
        raise OptionError(
            f"validation={validation!r} is a share: pass training=DATASET, the data to take it from."
        )
    return set_aside(training, validation, batch_size=batch_size)


def _log_decay(optimizer: Optimizer) -> float:
    found = {float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups}
    if len(found) != 1 or min(found) <= 0.0:
        raise OptionError(
            f"the optimizer has a weight decay of {', '.join(map(str, sorted(found)))}: to tune it, "
            "give all groups the same positive one to start from."
        )
    return math.log(found.pop())
