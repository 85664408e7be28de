"""The paper's analytic regularizers, in place of dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from undrop.engines import Engine, Evaluation, Request, as_engine
from undrop.errors import OptionError
from undrop.intercept import Batch, Selection
from undrop.losses import FORMS, Coefficients
from undrop.objectives.base import OBJECTIVES, LossLike, Objective
from undrop.options import as_float, check_int

PAPER = 1.0
"""The strength of the paper's experiments, λ₁ = q/(1-q)."""
TAYLOR = 0.5
"""The strength that Taylor's formula gives: half of the paper's."""


@OBJECTIVES.register("analytic", about="R_approx and ξ_approx in place of dropout (Algorithm 2)")
class Analytic(Objective):
    """ℓ + strength·R_approx + ξ_approx (Algorithm 2), with no dropout at all.

    u = ∂F/∂ε is the output tangent along the noise that each dropout of the model would add. Then

    - the explicit part is ``strength`` · mean uᵀHu, the paper's R_approx (eq. 4.4) with the factor
      q/(1-q) of each site. ``explicit`` can replace H by the identity or the loss Jacobian (R̃_approx);
    - the implicit part is mean ∂ℓ/∂ε for the drawn η. Its gradient is ξ_approx (eq. 4.6), noise with
      mean zero. u contains σ, so the paper's λ₂ is 1 here.

    η is ±1. The explicit part is even in η and the implicit part is odd, so both can use the same draw
    and are uncorrelated.

    Args:
        explicit: "hessian", "identity", "loss-jacobian", or None for no explicit part.
        implicit: whether to add the noise.
        engine: "auto", "antithetic", "tangent", "reverse", "exact", or an ``Engine``.
        strength: the factor of the explicit part: 1 is the paper's, 0.5 is Taylor's. A function of
            the step number makes a schedule.
        fraction: ρ, the share of the batch that carries noise. Every step chooses the examples at
            random. A step costs about 1 + ρ plain steps. The mean of the explicit part does not depend
            on ρ, nor does the covariance of the implicit part.
        samples: n, the number of draws of η per step. The explicit part is the mean over the draws. The
            implicit part is the sum over the draws divided by sqrt(n), so its covariance does not depend
            on n.
        mask: "as-declared": entries share η as each dropout declares; "independent": each entry has
            its own η, as in the paper.
        sites: name patterns, or a mapping from pattern to a weight on σ²; dropouts that match no pattern
            are off.
        interval: regularize every ``interval`` steps, with the explicit part times ``interval`` and the
            implicit part times its square root.
        batch_dim: the dimension of the batch in the targets; None finds it.
        exact_output: evaluate the loss at the output without noise, and return that output as
            ``step.output``. A step then costs about 1 + 2ρ plain steps. By default both have an error of
            O(ε₀²), or, with noise on weights and fraction < 1, of O(ε₀) with mean O(ε₀²).
        loss: as for every objective.
        generator: as for every objective.
    """

    def __init__(
        self,
        *,
        explicit: str | None = "hessian",
        implicit: bool = True,
        engine: str | Engine = "auto",
        strength: float | Callable[[int], float] = PAPER,
        fraction: float = 1.0,
        samples: int = 1,
        mask: str = "as-declared",
        sites: str | Iterable[str] | Mapping[str, float] | None = None,
        interval: int = 1,
        batch_dim: int | None = None,
        exact_output: bool = False,
        loss: LossLike = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(loss=loss, generator=generator)
        _check_options(explicit, implicit, fraction)
        if fraction < 1.0 and engine in ("reverse", "exact", "tangent"):
            raise OptionError(
                f"fraction < 1 is for the antithetic engine, got engine={engine!r}: use "
                "engine='antithetic', or fraction=1."
            )
        self.explicit = explicit
        self.implicit = implicit
        self.engine = as_engine(engine)
        self.strength = strength if callable(strength) else _check_strength(strength)
        self.fraction = fraction
        self.samples = check_int("samples", samples)
        self.mask = mask
        self.selection = Selection(sites)
        self.interval = check_int("interval", interval)
        self.batch_dim = batch_dim
        self.exact_output = exact_output
        self._sign_draw()  # raises an error for an unknown mask, before the first step

    @property
    def implicit_factor(self) -> float:
        """1, or 0 if the noise is off or the engine computes expectations."""
        return float(self.implicit and self.engine.name != "exact")

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield one evaluation per draw of η, or the plain loss in steps that do not regularize."""
        if self.steps % self.interval:
            yield replace(self.plain_loss(batch), last=True)
            return
        coefficients = self._coefficients()
        for sample in range(1, self.samples + 1):
            evaluation = self.run_engine(self.request(batch, coefficients))
            evaluation.last = sample == self.samples
            yield evaluation

    def _coefficients(self) -> Coefficients:
        n, m, strength = self.samples, self.interval, self.strength
        if callable(strength):
            strength = _check_strength(strength(self.steps))
        return Coefficients(
            loss=1.0 / n,
            quadratic=strength * m / n if self.explicit else 0.0,
            directional=math.sqrt(m / n) if self.implicit else 0.0,
        )

    def request(self, batch: Batch, coefficients: Coefficients, **options: Any) -> Request:
        """Return the request for the engine, with a new draw of η."""
        options |= {"form": self.explicit or "hessian", "fraction": self.fraction}
        options |= {"batch_dim": self.batch_dim, "exact_output": self.exact_output}
        return super().request(batch, coefficients, **options)


OBJECTIVES.register("explicit", about="R_approx alone in place of dropout")(
    partial(Analytic, implicit=False)
)
OBJECTIVES.register("implicit", about="ξ_approx alone in place of dropout")(
    partial(Analytic, explicit=None)
)


def _check_options(explicit: str | None, implicit: bool, fraction: float) -> None:
    if explicit is not None and explicit not in FORMS:
        raise OptionError(
            f"explicit must be one of {', '.join(map(repr, FORMS))} or None, got {explicit!r}."
        )
    if explicit is None and not implicit:
        raise OptionError(
            "explicit=None and implicit=False leave no regularizer: use undrop.NoRegularization()."
        )
    if not 0.0 < as_float(fraction) <= 1.0:
        raise OptionError(f"fraction must lie in (0, 1], got {fraction!r}.")


def _check_strength(strength: Any) -> float:
    number = as_float(strength)
    if not 0.0 <= number < math.inf:
        raise OptionError(
            f"strength must be finite and not negative, got {strength!r}: pass a number, or a function "
            "of the step number that returns one."
        )
    return number
