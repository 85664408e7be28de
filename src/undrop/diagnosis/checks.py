"""The analytic terms against Monte Carlo on the user's own batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from undrop.diagnosis.measure.analytic import AnalyticNoise
from undrop.diagnosis.measure.estimates import Draws, Estimate, percent
from undrop.diagnosis.measure.expansion import Expanded, Expander
from undrop.diagnosis.measure.gradients import GradientNoise
from undrop.diagnosis.measure.model import Batch, Subject, collect
from undrop.diagnosis.measure.timing import Budget, checked_seconds, progress_bar
from undrop.diagnosis.report.advice import GOOD
from undrop.errors import OptionError
from undrop.generators import Generators
from undrop.objectives import Analytic, Dropout, Objective

__all__ = ["Check", "check"]

_ROUGH = 0.5
_LEAST = 4  # draws

VERDICTS: Mapping[str, str] = {
    "good": "second order carries this dropout",
    "rough": "second order gives the order of magnitude",
    "poor": "p is too large for second order on this batch",
    "unclear": "the error is too large to tell: take more seconds",
}


@dataclass(frozen=True, repr=False)
class Check:
    """The analytic terms of an objective beside what dropout does, on one batch.

    Errors are over masks: the batch is given.
    """

    objective: str
    r_drop: Estimate
    """E ℓ(F(x; 1, η)) - ℓ(F(x)) by Monte Carlo, at the objective's sites."""
    taylor: Estimate
    """½E[uᵀHu]."""
    taylor_error: Estimate
    """R_drop - ½E[uᵀHu]."""
    taylor_share: Estimate
    """½E[uᵀHu] / R_drop."""
    explicit: Estimate | None
    """The objective's own explicit part, strength and all; None where it has none."""
    noise_ratio: Estimate | None
    """The trace of the objective's implicit noise over that of dropout's at the same sites.

    The objective's is its own, with its weights on sites, its mask structure and its factor, as a mean
    over steps: 1 - 1/k is all that ``Dropout(k, noise="analytic")`` has to put back. None where there is
    no such noise: where it is switched off, for k = 1, and for the exact engine's expectations."""
    verdict: str
    """"good", "rough", "poor" or "unclear"."""
    draws: int

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        names = ("r_drop", "taylor", "taylor_error", "taylor_share", "explicit", "noise_ratio")
        figures = {name: getattr(self, name) for name in names}
        return {
            "objective": self.objective,
            **{k: None if v is None else v.to_json() for k, v in figures.items()},
            "verdict": self.verdict,
            "draws": self.draws,
        }

    def __repr__(self) -> str:
        told = not self.r_drop.vanishes
        share = f"  ({percent(self.taylor_share)} of R_drop)" if told else ""
        rows = {
            "R_drop by Monte Carlo": f"{self.r_drop}{'' if told else '  (not told from 0)'}",
            "½E[uᵀHu]": f"{self.taylor}{share}",
            "Taylor error": f"{self.taylor_error}",
        }
        if self.explicit is not None:
            ratio = (
                f"  ({self.explicit.value / self.r_drop.value:.2f} times R_drop)" if told else ""
            )
            rows[f"{self.objective}'s explicit part"] = f"{self.explicit}{ratio}"
        if self.noise_ratio is not None:
            rows["its noise over dropout's"] = f"{self.noise_ratio}  (traces)"
        width = max(map(len, rows))
        lines = [f"{label:<{width}}  {value}" for label, value in rows.items()]
        return "\n".join(
            [*lines, f"{self.verdict}: {VERDICTS[self.verdict]} ({self.draws} masks)."]
        )


def check(
    objective: Objective,
    model: nn.Module,
    batch: Any,
    *,
    seconds: float = 10.0,
    draws: int = 256,
    generator: torch.Generator | None = None,
    progress: bool = True,
) -> Check:
    """Compare an objective's analytic terms with dropout itself on one batch.

    Neither the model nor the objective is changed.

    Args:
        objective: one with an analytic part: ``Analytic``, or ``Dropout(noise="analytic")``.
        model: the model it is for.
        batch: a pair (inputs, targets).
        seconds: the time there is.
        draws: the most masks.
        generator: where masks come from.
        progress: whether to show a bar on stderr, where that is a terminal.

    Raises:
        OptionError: if the objective has no analytic part.
    """
    checked_seconds(seconds)
    made = _analytic_noise(objective)
    subject = Subject(model, collect([batch], 1), loss=objective.loss, generator=generator)
    objective.selection.check(subject.sites.names)
    probe = _probe(objective, generator)
    table = Draws()
    with progress_bar(progress) as show, subject.studied():
        budget = Budget(seconds, show, what="comparing with dropout")
        only = subject.batches[0]
        expanded = Expander(subject)(only)
        base = subject.value(only, {})
        noise = GradientNoise(subject, *made) if made is not None else None
        while table.masks < _LEAST or not (
            budget.spent(table.masks / draws) or table.masks >= draws
        ):
            row = _row(subject, expanded, only, base, probe)
            if noise is not None:
                row |= _noise_row(noise, only)
            table.add(0, 1.0, row)
    return _result(objective, table)


def _analytic_noise(objective: Objective) -> tuple[AnalyticNoise, float] | None:
    """How the objective makes its analytic noise, and its factor; refuses one without analytic part.

    Neither several samples nor an interval changes the mean covariance of a step.
    """
    if isinstance(objective, Analytic):
        if not objective.implicit or objective.engine.name == "exact":
            return None
        made = AnalyticNoise(
            objective.engine,
            objective.mask,
            objective.selection,
            objective.fraction,
            objective.batch_dim,
        )
        return made, 1.0
    if isinstance(objective, Dropout) and objective.noise == "analytic":
        factor = math.sqrt(1.0 - 1.0 / objective.k)
        made = AnalyticNoise(objective.engine, objective.mask, objective.selection)
        return (made, factor) if factor else None
    raise OptionError(
        f"{type(objective).__name__} has no analytic part to check: pass undrop.Analytic() or "
        "undrop.Dropout(k, noise='analytic')."
    )


def _probe(objective: Objective, generator: torch.Generator | None) -> Objective:
    """A copy at a step that regularizes, with a generator of its own: the user's stays put."""
    probe = copy.copy(objective)
    probe.randomness = Generators(generator)
    if isinstance(probe, Analytic):
        probe.steps -= probe.steps % probe.interval
    return probe


def _row(
    subject: Subject, expanded: Expanded, batch: Batch, base: float, probe: Objective
) -> dict[str, float]:
    """One mask at the objective's sites, and one draw of its explicit part."""
    noise = {
        name: value
        for name, value in subject.masks(expanded.found).items()
        if probe.selection.weight(name) > 0.0
    }
    terms = expanded.along(noise)
    row = {
        "r_drop": subject.value(batch, noise) - base - terms.total.first,
        "psd": terms.total.psd,
    }
    if isinstance(probe, Analytic) and probe.explicit is not None:
        step = probe(subject.model, batch.inputs, batch.targets)
        probe.steps -= 1  # so that a schedule stands still
        row["explicit"] = step.parts.get("explicit", 0.0) / probe.interval
    return row


def _noise_row(noise: GradientNoise, batch: Batch) -> dict[str, float]:
    samples = {"dropout": noise.dropout(batch), "analytic": noise.analytic(batch)}
    return {
        kind: sum(float(part.double().square().sum()) for part in sample)
        for kind, sample in samples.items()
    }


def _result(objective: Objective, table: Draws) -> Check:
    share = table.ratio({"psd": 1.0}, {"r_drop": 1.0})
    has_noise = "dropout" in table
    return Check(
        objective=type(objective).__name__,
        r_drop=table.mean("r_drop"),
        taylor=table.mean("psd"),
        taylor_error=table.linear({"r_drop": 1.0, "psd": -1.0}),
        taylor_share=share,
        explicit=table.mean("explicit") if "explicit" in table else None,
        noise_ratio=table.ratio({"analytic": 1.0}, {"dropout": 1.0}) if has_noise else None,
        verdict=_verdict(share),
        draws=table.masks,
    )


def _verdict(share: Estimate) -> str:
    """From where the share of ½E[uᵀHu] in R_drop lies with two standard errors."""

    def within(part: float) -> bool:
        return share.low >= part and share.high <= 1.0 / part

    def beyond(part: float) -> bool:
        return share.high < part or share.low > 1.0 / part

    if within(GOOD):
        return "good"
    if beyond(_ROUGH):
        return "poor"
    return "rough" if within(_ROUGH) else "unclear"
