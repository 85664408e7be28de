"""Finding p of every site within one training run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from undrop.errors import DataError, NoDropoutError, OptionError
from undrop.generators import Generators
from undrop.intercept import Selection, unwrapped
from undrop.objectives import Analytic, Dropout, Objective, Step
from undrop.options import as_float, check_int
from undrop.report import Table
from undrop.tuning.history import DECAY, Entry, History
from undrop.tuning.rule import CENTRE, Knob, log_odds, probability
from undrop.tuning.signal import Look, signal
from undrop.tuning.validation import Validation, set_aside

__all__ = ["Tuner"]

AVERAGE = 0.9
"""The factor of the running mean of the weights, at which the signal is taken: at the weights
themselves more noise always seems to help, because it damps the noise of SGD."""


class Tuner:
    """Adjusts p of every site while the model trains, by what it does to the validation loss.

    Every ``interval`` steps it measures, for all sites at once, how much the site's explicit
    regularizer takes off the validation loss with each step (its benefit), and moves the site's p by
    the evidence. A measurement is one plain step and two passes with a backward pass to the sites, on
    validation batches: about 7/3 of a plain step's arithmetic, 12 % of a step at the default interval.

    Every site starts at p = 0.2, whatever p the model declares; a site that declares 0 is not tuned.

    >>> import torch, undrop
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
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
        validation: batches (inputs, targets) that training does not see, at least two and as large as
            those of training, or the share of ``training`` to set aside.
        training: the training set, for a share: train on what :attr:`training` holds then.
        optimizer: also adjust the weight decay of this optimizer, which must not be 0.
        interval: steps between measurements.
        rate: how fast p follows the evidence, in (0, 1].
        batch_size: examples per validation batch that is set aside.
        generator: where random numbers come from; None makes one that ``torch.manual_seed`` seeds.

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
        interval: int = 20,
        rate: float = 0.3,
        batch_size: int = 32,
        generator: torch.Generator | None = None,
    ) -> None:
        if not isinstance(objective, Analytic | Dropout):
            raise OptionError(
                f"a tuner adjusts Analytic and Dropout, got {type(objective).__name__}, which has no p."
            )
        if isinstance(objective, Analytic) and objective.explicit != "hessian":
            raise OptionError(
                f"a tuner measures the explicit part in the form 'hessian', got "
                f"{objective.explicit!r}: use Analytic(explicit='hessian')."
            )
        if objective.loss.whole_output:
            raise OptionError(
                f"a tuner needs a loss of one tensor, but {type(objective.loss).__name__} takes "
                "all that the model returns: tune with a loss on one of its outputs."
            )
        if not 0.0 < as_float(rate) <= 1.0:
            raise OptionError(f"rate must lie in (0, 1], got {rate!r}.")
        if training is not None and not isinstance(validation, int | float):
            raise OptionError(
                "training= is what a share is set aside from: give validation as a share, or leave "
                "training out."
            )
        self.objective = objective
        self.training = training
        if isinstance(validation, int | float):
            if training is None:
                raise OptionError(
                    f"validation={validation!r} is a share: pass training=DATASET to set it aside from."
                )
            self.training, validation = set_aside(training, validation, batch_size=batch_size)
        self.validation = Validation(validation)
        self.optimizer = optimizer
        self.interval = check_int("interval", interval)
        self.rate = float(rate)
        self.history = History()
        self.steps = 0
        self._generators = Generators(generator)
        self._knobs: dict[str, Knob] = {}
        self._declared: dict[str, float] = {}
        self._mean: list[Tensor] = []
        if optimizer is not None:
            self._knobs[DECAY] = _decay_knob(optimizer)

    @property
    def probabilities(self) -> dict[str, float]:
        """The p of every site; empty before the first step."""
        return {n: probability(k.value) for n, k in self._knobs.items() if n != DECAY}

    def step(self, model: nn.Module, inputs: Any, targets: Any) -> Step:
        """Evaluate the objective on a batch, and every ``interval`` calls adjust p before it.

        Args:
            model: in train mode.
            inputs: as for the objective.
            targets: as for the objective.
        """
        self.observe(model, inputs)
        return self.objective(model, inputs, targets)

    def observe(self, model: nn.Module, inputs: Any) -> dict[str, float] | None:
        """Count a step, and adjust p every ``interval`` steps; for loops that call the objective.

        Returns:
            ``p/SITE`` and ``benefit/SITE`` after a measurement, else None.
        """
        model = unwrapped(model)
        weights = self.objective.trainable_parameters(model)
        if not self._declared:
            self._begin(model, inputs)
        self.validation.compare(inputs, getattr(self.objective, "batch_dim", None) or 0)
        self._average(weights)
        self.steps += 1
        if self.steps % self.interval:
            return None
        self._measure(model, weights)
        self._apply()
        return self.figures()

    def figures(self) -> dict[str, float]:
        """Return the newest ``p/SITE``, ``benefit/SITE`` and ``weight decay``, for a log."""
        newest = self.history.last()
        return {
            **{n if n == DECAY else f"p/{n}": entry.value for n, entry in newest.items()},
            **{f"benefit/{name}": entry.benefit for name, entry in newest.items()},
        }

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        """Find the sites; a saved state may know their p already."""
        found = self.objective.sites(model, inputs)
        chosen = {
            s.name: s.sigma**2 for s in found if self.objective.selection.weight(s.name) > 0.0
        }
        if not chosen:
            raise NoDropoutError(
                f"every dropout of {type(model).__name__} has p = 0, and a tuner leaves those alone: "
                "give the ones to tune a p above 0; any will do."
            )
        if self.probabilities and self.probabilities.keys() != chosen.keys():
            raise DataError(
                f"the saved state is of a model with the sites {', '.join(self.probabilities)}, but "
                f"{type(model).__name__} has {', '.join(chosen)}: load the state of the same model."
            )
        self._declared = chosen
        for name in chosen:
            self._knobs.setdefault(name, Knob(log_odds(CENTRE), log_odds(CENTRE)))
        self._apply()

    def _average(self, weights: list[Tensor]) -> None:
        with torch.no_grad():
            if len(self._mean) != len(weights):
                self._mean = [w.detach().clone() for w in weights]
            torch._foreach_lerp_(self._mean, [w.detach() for w in weights], 1.0 - AVERAGE)

    def _measure(self, model: nn.Module, weights: list[Tensor]) -> None:
        generator = self._generators(weights[0].device)
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        look = Look(model, self.objective.loss, self._mask, self._selection(), seed)
        prepare = self.objective.loss.prepare
        held, other = (prepare(model, *batch)[1:] for batch in self.validation.next_two())
        found = signal(look, weights, self._mean, other, held)
        for name, knob in self._knobs.items():
            slope = found.decay if name == DECAY else found.slopes.get(name)
            if slope is not None:
                knob.move(slope, self.rate)
                self.history.entries.append(self._entry(name, knob, slope))

    @property
    def _mask(self) -> str:
        return self.objective.mask

    def _entry(self, name: str, knob: Knob, slope: float) -> Entry:
        strength = math.exp(knob.value)
        value = strength if name == DECAY else probability(knob.value)
        if name != DECAY:
            strength *= self._strength
        benefit, error = strength * knob.slope, strength * knob.error
        return Entry(self.steps, name, value, benefit, error, slope)

    @property
    def _strength(self) -> float:
        """The factor of E[uᵀHu]: Taylor's ½ for dropout."""
        if isinstance(self.objective, Dropout):
            return 0.5
        strength = self.objective.strength
        return strength(self.objective.steps) if callable(strength) else strength

    def _selection(self) -> Selection:
        names = [name for name in self._knobs if name != DECAY]
        weights = {n: math.exp(self._knobs[n].value) / self._declared[n] for n in names}
        return Selection.exactly(weights)

    def _apply(self) -> None:
        """Make training use the values."""
        self.objective.selection = self._selection()
        if isinstance(self.objective, Dropout):
            self.objective.site_p = self.probabilities
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = math.exp(self._knobs[DECAY].value)

    def table(self) -> Table:
        """Return p and benefit of every site, as they are now; prints with ``.text()``."""
        return self.history.table()

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs, the objective's state included."""
        return {
            "steps": self.steps,
            "position": self.validation.position,
            "knobs": {name: knob.state_dict() for name, knob in self._knobs.items()},
            "mean": [m.clone() for m in self._mean],
            "history": [list(entry) for entry in self.history.entries],
            "generators": self._generators.state_dict(),
            "objective": self.objective.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state.

        Raises:
            DataError: for a state that is not a tuner's, or that differs in whether weight decay is
                tuned.
        """
        if missing := self.state_dict().keys() - state.keys():
            raise DataError(f"this is no state of a tuner: it lacks {', '.join(sorted(missing))}.")
        if (DECAY in state["knobs"]) != (self.optimizer is not None):
            had, has = ("tuned", "leaves") if self.optimizer is None else ("left", "tunes")
            raise DataError(
                f"the saved run {had} weight decay and this tuner {has} it: pass optimizer= as before."
            )
        self.steps = int(state["steps"])
        self.validation.position = int(state["position"])
        self._knobs = {name: Knob(**values) for name, values in state["knobs"].items()}
        self._mean = [m.clone() for m in state["mean"]]
        self.history.entries = [Entry(*values) for values in state["history"]]
        self._generators.load_state_dict(state["generators"])
        self.objective.load_state_dict(state["objective"])
        self._declared = {}


def _decay_knob(optimizer: Optimizer) -> Knob:
    found = {float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups}
    if len(found) != 1 or min(found) <= 0.0:
        raise OptionError(
            f"the optimizer has a weight decay of {', '.join(map(str, sorted(found)))}: to tune it, "
            "give all groups the same positive one to start from."
        )
    start = math.log(found.pop())
    return Knob(start, start)
