"""Plain sentences drawn from the figures, each with the figure behind it.

A sentence is said only where its figure bears it out by two standard errors.
"""

from __future__ import annotations

from collections.abc import Iterator

from undrop.diagnosis.measure.estimates import percent
from undrop.diagnosis.measure.explicit import Explicit, Point
from undrop.diagnosis.measure.implicit import Implicit
from undrop.intercept import Sites

__all__ = ["advise"]

GOOD = 0.8
"""The share of R_drop that ½E[uᵀHu] makes in the paper, and from which on it counts as good here."""
_POOR = 0.5
_NOTHING = 0.01  # a share that does not matter
_SOME = 0.2  # a part that does
_ROUNDING = 1e-9  # of R_drop: less is no curvature


def advise(sites: Sites, explicit: Explicit, implicit: Implicit | None) -> list[str]:
    """What the figures say, the most urgent first."""
    sentences = [*_mistakes(sites)]
    if explicit.parts.r_drop.vanishes:
        sentences.append(
            "The explicit effect can't be told from zero (R_drop = "
            f"{explicit.parts.r_drop}): take more batches or more seconds before acting on it."
        )
    else:
        sentences += _quadratic(explicit)
    sentences += _where(explicit)
    if implicit is not None:
        sentences += _noise(implicit)
    return sentences


def _mistakes(sites: Sites) -> Iterator[str]:
    for site in sites:
        if site.active_in_eval:
            yield (
                f"Dropout at `{site.name}` (p = {site.p:g}) is active in eval mode too, which is "
                "hardly meant: make it depend on `self.training`."
            )


def _quadratic(explicit: Explicit) -> Iterator[str]:
    share, parts = explicit.quadratic_share, explicit.parts
    whole = abs(parts.r_drop.value)
    if share.low >= GOOD and share.high <= 2.0 - GOOD:
        yield (
            f"The quadratic picture holds: ½E[uᵀHu] is {percent(share)} of R_drop, so "
            "undrop.Analytic(strength=undrop.TAYLOR) stands in for the explicit effect."
        )
    elif abs(parts.psd.value) <= _ROUNDING * whole:
        yield (
            "½E[uᵀHu] is 0 whatever p, since the loss is linear in the model's output, as NLLLoss is in "
            "log-probabilities: let the model return logits and take cross-entropy as the loss."
        )
    elif share.high < _POOR or share.low > 2.0 - _POOR:
        yield (
            f"The quadratic picture breaks down: ½E[uᵀHu] is {percent(share)} of R_drop, so the "
            "analytic explicit regularizer is another one than this dropout; a smaller p brings "
            "them together."
        )
    second = explicit.second_order_share
    if parts.non_psd.low > _SOME * whole or parts.non_psd.high < -_SOME * whole:
        yield (
            "The model's own curvature matters: the non-PSD term, which the analytic regularizer "
            f"leaves out, is {parts.non_psd} of R_drop = {parts.r_drop}; with it second order makes "
            f"{percent(second)}."
        )
    yield from _breakdown(explicit.curve)


def _breakdown(curve: list[Point]) -> Iterator[str]:
    """From which p on second order misses much, if it holds below."""
    bad = [point for point in curve if _misses(point)]
    good = [point for point in curve if point.q < min((b.q for b in bad), default=0.0)]
    if bad and good:
        point = min(bad, key=lambda b: b.q)
        yield (
            f"Scaled to a largest p of {point.q:.2g}, dropout leaves second order behind: Taylor "
            f"misses {point.parts.rest} of R_drop = {point.parts.r_drop}."
        )


def _misses(point: Point) -> bool:
    rest, whole = point.parts.rest, abs(point.parts.r_drop.value)
    return rest.low > _SOME * whole or rest.high < -_SOME * whole


def _where(explicit: Explicit) -> Iterator[str]:
    effects = sorted(explicit.sites.items(), key=lambda item: -item[1].share.value)
    if len(effects) == 1:
        return
    name, most = effects[0]
    if most.share.low > 1.0 / len(effects) and most.share.value > effects[1][1].share.high:
        yield f"{percent(most.share)} of the explicit effect is at `{name}`."
    idle = [
        f"`{name}` ({percent(effect.share)})"
        for name, effect in effects
        if effect.share.high < _NOTHING
    ]
    if idle:
        yield (
            f"Dropout at {', '.join(idle)} adds nothing measurable to the explicit effect: it can be "
            "left out, or made stronger if it was meant to act."
        )


def _noise(implicit: Implicit) -> Iterator[str]:
    ratio = implicit.batch_ratio
    if ratio is not None and ratio.low > 1.0:
        yield (
            f"Dropout makes {ratio} times the gradient noise of mini-batching: its implicit effect "
            "is in play, and averaging over masks (Drop_k) or larger batches would take it away."
        )
    elif ratio is not None and ratio.high < _SOME:
        yield (
            f"Dropout makes only {ratio} times the gradient noise of mini-batching: its implicit "
            "effect is small here, and averaging over masks would change little."
        )
    kept = implicit.analytic_ratio
    if kept.low > 1.0 / (1.0 + _SOME) and kept.high < 1.0 + _SOME:
        yield f"ξ_approx has the size of dropout's noise: its trace is {percent(kept)} of dropout's."
    elif kept.high < GOOD or kept.low > 1.0 / GOOD:
        yield (
            f"ξ_approx has another size than dropout's noise: its trace is {percent(kept)} of "
            "dropout's, which a smaller p would bring nearer."
        )
