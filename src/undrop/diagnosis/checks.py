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
from undrop.diagnosis.measure.r_drop import Expander, Expansion, MaskSample, sample_mask
from undrop.diagnosis.measure.timing import Budget, check_seconds
from undrop.diagnosis.report.advice import GOOD
from undrop.engines import Exact
from undrop.errors import OptionError
from undrop.generators import Generators
from undrop.objectives import Objective
from undrop.report import Progress, Table, as_json
from undrop.report.html import fragment, paragraph
from undrop.report.plain import as_frame

_ROUGH = 0.5
_LEAST = 4  # draws

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
    """The objective's own explicit part, with its strength; None if it has none."""
    noise_ratio: Estimate | None
    """The trace of the objective's implicit noise divided by the trace of dropout's at the same sites.

    The objective's noise has its own site weights, mask structure and factor, as a mean over steps:
    ``Dropout(k, noise="analytic")`` adds back only the part 1 - 1/k. None if there is no such
    noise: implicit=False, k = 1, or the exact engine."""
    verdict: str
    """"good", "rough", "poor" or "unclear"."""
    draws: int

    def to_json(self) -> dict[str, Any]:
        """Every field, each figure as ``{"value", "stderr", "low", "high"}``."""
        return {field.name: as_json(getattr(self, field.name)) for field in fields(self)}

    def table(self) -> Table:
        """The figures as a table."""
        known = not self.r_drop.includes_zero
        share = f"{percent(self.quadratic_share)} of R_drop" if known else ""
        rows = [
            ("R_drop by Monte Carlo", str(self.r_drop), "" if known else "may be 0"),
            ("½E[uᵀHu]", str(self.half_quadratic), share),
            ("R_drop - ½E[uᵀHu]", str(self.taylor_error), ""),
        ]
        if self.explicit is not None:
            times = f"{self.explicit.value / self.r_drop.value:.2f} times R_drop" if known else ""
            rows.append((f"{self.objective}'s explicit part", str(self.explicit), times))
        if self.noise_ratio is not None:
            rows.append(
                ("its noise / dropout's noise", str(self.noise_ratio), "ratio of their traces")
            )
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
        """The figures as a pandas DataFrame, one row per figure."""
        figures = {n: x for n, x in vars(self).items() if isinstance(x, Estimate)}
        return as_frame([figure._asdict() for figure in figures.values()], list(figures))


class _Sample(NamedTuple):
    """One mask, and one step of the objective."""

    mask: MaskSample
    explicit: float | None
    dropout_trace: float | None
    analytic_trace: float | None


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

    Neither the model nor the objective is changed.

    Args:
        objective: an objective with analytic terms: ``Analytic``, or ``Dropout(noise="analytic")``.
        model: the model that it trains.
        batch: a pair (inputs, targets).
        seconds: the time to spend.
        draws: the largest number of masks; None uses all the time.
        generator: seeds the masks.
        progress: whether to show a bar on stderr, if that is a terminal.

    Raises:
        OptionError: if the objective has no analytic terms.
    """
    check_seconds(seconds)
    factor = _implicit_factor(objective)
    measured = MeasuredModel(model, collect([batch], 1), loss=objective.loss, generator=generator)
    objective.selection.check(measured.sites.names)
    copied = _copy_at_regularizing_step(objective, measured.generators)
    copied.loss = measured.loss  # the batch is prepared for it
    samples: Samples[_Sample] = Samples()
    with Progress(progress) as shown, measured.preserved():
        bar = shown.bar("comparing with dropout")
        budget = Budget(seconds, lambda done, what: bar.show(done))
        expanded = Expander(measured)(measured.batches[0])
        noise = GradientNoise(measured, copied, factor) if factor else None
        rounds = None if draws is None else max(draws, _LEAST)
        for _ in budget.visits(measured.batches, rounds, least=_LEAST):
            samples.add(0, 1.0, _sample(expanded, copied, noise))
    return _result(objective, samples)


def _implicit_factor(objective: Objective) -> float:
    factor = objective.implicit_factor
    if factor is None:
        raise OptionError(
            f"{type(objective).__name__} has no analytic terms to check: pass undrop.Analytic() or "
            "undrop.Dropout(k, noise='analytic')."
        )
    return factor


def _copy_at_regularizing_step(objective: Objective, generators: Generators) -> Objective:
    """Return a copy with its own generator, at a step that regularizes."""
    copied = copy.copy(objective)
    copied.generators = generators
    copied.steps -= copied.steps % copied.interval
    return copied


def _sample(expanded: Expansion, objective: Objective, noise: GradientNoise | None) -> _Sample:
    measured, batch = expanded.measured, expanded.batch
    masks = measured.draw_masks(expanded.found)
    chosen = {n: v for n, v in masks.items() if objective.selection.weight(n) > 0.0}
    sample, _ = sample_mask(expanded, chosen)
    explicit = None
    if getattr(objective, "explicit", None) is not None:
        step = objective(measured.model, batch.inputs, batch.targets)
        objective.steps -= 1  # so that a schedule of the strength does not advance
        explicit = step.parts.get("explicit", 0.0) / objective.interval
    traces: list[float | None] = [None, None]
    if noise is not None:
        traces = [inner_product(g, g) for g in (noise.dropout(batch), noise.analytic(batch))]
    return _Sample(sample, explicit, *traces)


def _result(objective: Objective, samples: Samples[_Sample]) -> Check:
    share = samples.ratio(lambda s: s.mask.half_quadratic, lambda s: s.mask.r_drop)
    first = next(iter(samples))
    explicit = samples.mean(lambda s: s.explicit)
    if isinstance(getattr(objective, "engine", None), Exact):  # it computes the expectation
        explicit = Estimate.of(explicit.value, 0.0)
    noise = samples.ratio(lambda s: s.analytic_trace, lambda s: s.dropout_trace)
    return Check(
        objective=type(objective).__name__,
        r_drop=samples.mean(lambda s: s.mask.r_drop),
        half_quadratic=samples.mean(lambda s: s.mask.half_quadratic),
        taylor_error=samples.mean(lambda s: s.mask.r_drop - s.mask.half_quadratic),
        quadratic_share=share,
        explicit=None if first.explicit is None else explicit,
        noise_ratio=None if first.dropout_trace is None else noise,
        verdict=_verdict(share),
        draws=samples.count,
    )


def _verdict(share: Estimate) -> str:
    """Return the verdict from the 95 % interval of ½E[uᵀHu] / R_drop."""

    def within(part: float) -> bool:
        return share.low >= part and share.high <= 1.0 / part

    def beyond(part: float) -> bool:
        return share.high < part or share.low > 1.0 / part

    if within(GOOD):
        return "good"
    if beyond(_ROUGH):
        return "poor"
    return "rough" if within(_ROUGH) else "unclear"
