"""Compare the analytic terms of an objective with dropout itself, on one batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import nn

from undrop.diagnosis.measure.estimates import Estimate, Samples, percent
from undrop.diagnosis.measure.gradients import GradientNoise, inner_product
from undrop.diagnosis.measure.model import MeasuredModel, collect
from undrop.diagnosis.measure.r_drop import Expander, Expansion, MaskSample, sample_parts
from undrop.diagnosis.measure.timing import Budget, check_seconds
from undrop.diagnosis.report.verdict import verdict
from undrop.engines import Exact
from undrop.errors import OptionError
from undrop.objectives import Objective
from undrop.report import Progress, Table, as_json
from undrop.report.html import fragment, paragraph
from undrop.report.plain import as_frame

_MIN_DRAWS = 4

VERDICTS: Mapping[str, str] = {
    "good": "the second-order approximation describes this dropout well",
    "rough": "the second-order approximation gives the order of magnitude",
    "poor": "p is too large for the second-order approximation on this batch",
    "unclear": "too little data to say: allow more seconds",
}


@dataclass(frozen=True, repr=False)
class Check:
    """The analytic terms of an objective, compared with dropout itself on one batch.

    Standard errors are over masks only, because the batch is fixed.
    """

    objective: str
    r_drop: Estimate
    """E ℓ(F(x; 1, η)) - ℓ(F(x)) by Monte Carlo, at the objective's sites."""
    half_quadratic: Estimate
    """½E[uᵀHu]."""
    taylor_error: Estimate
    """R_drop - ½E[uᵀHu]."""
    quadratic_share: Estimate
    """½E[uᵀHu] / R_drop."""
    explicit: Estimate | None
    """The objective's explicit part, with its strength; None if it has no explicit part."""
    noise_ratio: Estimate | None
    """The trace of the objective's gradient noise, divided by that of dropout's noise at the same sites.

    The objective's site weights, mask structure and ``implicit_factor`` are part of its noise: for a
    small p, the ratio is near 1 - 1/k with ``Dropout(k, noise="analytic")``. None if the objective has
    no analytic noise: with implicit=False, k = 1, or the exact engine."""
    verdict: str
    """"good", "rough", "poor" or "unclear"."""
    draws: int

    def to_json(self) -> dict[str, Any]:
        """Return every field; an estimate becomes ``{"value", "stderr", "low", "high"}``."""
        return {field.name: as_json(getattr(self, field.name)) for field in fields(self)}

    def table(self) -> Table:
        """Return the figures as a table."""
        may_be_zero = self.r_drop.includes_zero
        share = "" if may_be_zero else f"{percent(self.quadratic_share)} of R_drop"
        rows = [
            ("R_drop by Monte Carlo", str(self.r_drop), "may be 0" if may_be_zero else ""),
            ("½E[uᵀHu]", str(self.half_quadratic), share),
            ("R_drop - ½E[uᵀHu]", str(self.taylor_error), ""),
        ]
        if self.explicit is not None:
            label, r_drop = f"{self.objective}'s explicit part", self.r_drop.value
            times = "" if may_be_zero else f"{self.explicit.value / r_drop:.2f} times R_drop"
            rows.append((label, str(self.explicit), times))
        if self.noise_ratio is not None:
            label = "its noise / dropout's noise"
            rows.append((label, str(self.noise_ratio), "ratio of their traces"))
        return Table(("figure", "value", "remark"), rows)

    @property
    def conclusion(self) -> str:
        """The verdict in one sentence."""
        return f"{self.verdict}: {VERDICTS[self.verdict]} ({self.draws} masks)."

    def __repr__(self) -> str:
        return f"{self.conclusion}\n\n{self.table().text()}"

    def _repr_html_(self) -> str:
        return fragment(paragraph(self.conclusion), self.table().html())

    def to_frame(self) -> Any:
        """Return the figures as a pandas DataFrame, one row per figure."""
        figures = {name: x for name, x in vars(self).items() if isinstance(x, Estimate)}
        return as_frame([figure._asdict() for figure in figures.values()], list(figures))


class _CheckSample(NamedTuple):
    """A sample of every figure: from one mask, one step of the objective and one draw of each noise."""

    mask: MaskSample
    explicit: float | None
    dropout_trace: float | None
    """The squared norm of dropout's gradient noise."""
    analytic_trace: float | None
    """The squared norm of the objective's gradient noise."""


def check(
    objective: Objective,
    model: nn.Module,
    batch: Any,
    *,
    seconds: float = 10.0,
    draws: int | None = None,
    generator: torch.Generator | None = None,
    progress: bool = True,
) -> Check:
    """Compare an objective's analytic terms with dropout itself on one batch.

    The model and the objective do not change.

    Args:
        objective: an objective with analytic terms: ``Analytic``, or ``Dropout(noise="analytic")``.
        model: the model that the objective trains.
        batch: a pair (inputs, targets).
        seconds: the time to spend.
        draws: the largest number of masks; None uses all the time.
        generator: seeds the masks.
        progress: whether to show a bar on stderr, if that is a terminal.

    Raises:
        OptionError: if the objective has no analytic terms.
    """
    check_seconds(seconds)
    implicit_factor = getattr(objective, "implicit_factor", None)
    if implicit_factor is None:
        raise OptionError(
            f"{type(objective).__name__} has no analytic terms to check: call undrop.check(objective, "
            "model, (inputs, targets)) with undrop.Analytic() or undrop.Dropout(k, noise='analytic')."
        )
    subject = MeasuredModel(model, collect([batch], 1), loss=objective.loss, generator=generator)
    objective.selection.check(subject.sites.names)
    objective = _copy_at_regularizing_step(objective, subject)
    samples: Samples[_CheckSample] = Samples()
    with Progress(progress) as bars, subject.preserve():
        budget = Budget(seconds, bars.bar("comparing with dropout").show)
        expansion = Expander(subject)(subject.batches[0])
        noise = GradientNoise(subject, objective, implicit_factor) if implicit_factor else None
        rounds = None if draws is None else max(draws, _MIN_DRAWS)
        for _ in budget.visits(subject.batches, rounds, minimum=_MIN_DRAWS):
            samples.add(0, 1.0, _sample(expansion, objective, noise))
    return _result(objective, samples)


def _copy_at_regularizing_step(objective: Objective, subject: MeasuredModel) -> Objective:
    """Return a copy with the loss and generators of ``subject``, at a step that regularizes."""
    copied = copy.copy(objective)
    copied.loss = subject.loss  # the batch is prepared for this loss
    copied.generators = subject.generators
    copied.steps -= copied.steps % copied.interval
    return copied


def _sample(
    expansion: Expansion, objective: Objective, noise: GradientNoise | None
) -> _CheckSample:
    subject, batch = expansion.subject, expansion.batch
    masks = subject.draw_masks(expansion.sites_and_leaves)
    masks = {name: mask for name, mask in masks.items() if objective.selection.weight(name) > 0.0}
    mask_sample, _ = sample_parts(expansion, masks)
    explicit = dropout_trace = analytic_trace = None
    if getattr(objective, "explicit", None) is not None:
        step = objective(subject.model, batch.inputs, batch.targets)
        objective.steps -= 1  # so that a schedule of the strength does not advance
        explicit = step.parts.get("explicit", 0.0) / objective.interval
    if noise is not None:
        dropout, analytic = noise.sample_dropout(batch), noise.sample_analytic(batch)
        dropout_trace = inner_product(dropout, dropout)
        analytic_trace = inner_product(analytic, analytic)
    return _CheckSample(mask_sample, explicit, dropout_trace, analytic_trace)


def _result(objective: Objective, samples: Samples[_CheckSample]) -> Check:
    first, explicit = next(iter(samples)), samples.mean(lambda s: s.explicit)
    if isinstance(getattr(objective, "engine", None), Exact):  # it computes the expectation
        explicit = Estimate.of(explicit.value, 0.0)
    share = samples.ratio(lambda s: s.mask.half_quadratic, lambda s: s.mask.r_drop)
    noise_ratio = samples.ratio(lambda s: s.analytic_trace, lambda s: s.dropout_trace)
    return Check(
        objective=type(objective).__name__,
        r_drop=samples.mean(lambda s: s.mask.r_drop),
        half_quadratic=samples.mean(lambda s: s.mask.half_quadratic),
        taylor_error=samples.mean(lambda s: s.mask.r_drop - s.mask.half_quadratic),
        quadratic_share=share,
        explicit=None if first.explicit is None else explicit,
        noise_ratio=None if first.dropout_trace is None else noise_ratio,
        verdict=verdict(share),
        draws=samples.count,
    )
