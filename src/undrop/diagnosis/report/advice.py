"""The conclusion of a diagnosis in a paragraph, and what to do: sentences, each with its figure.

A sentence is written only if the 95 % interval of its figure supports it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from undrop.diagnosis.measure.benefit import Benefit
from undrop.diagnosis.measure.estimates import Estimate, percent
from undrop.diagnosis.measure.explicit import Explicit, Point
from undrop.diagnosis.measure.implicit import Implicit
from undrop.intercept import Sites

GOOD = 0.8
"""At or above this share of R_drop, ½E[uᵀHu] counts as a good description."""
_POOR = 0.5
_NOTHING = 0.01  # a share below this does not matter
_SOME = 0.2  # a part above this matters
_ROUNDING = 1e-9  # a part of R_drop below this is rounding

TOO_LITTLE = "Too little data to say"


def signed(estimate: Estimate) -> str:
    """Return an estimate as text, with its sign even if that is a plus."""
    return f"+{estimate}" if estimate.value > 0.0 else str(estimate)


def conclude(explicit: Explicit, implicit: Implicit | None, benefit: Benefit | None) -> str:
    """Return the diagnosis in one paragraph."""
    sentences = [*_explicit_sentences(explicit)]
    if implicit is not None:
        sentences.append(_noise_sentence(implicit))
    if benefit is not None:
        sentences.append(_benefit_sentence(benefit))
    return " ".join(sentences)


def _explicit_sentences(explicit: Explicit) -> Iterator[str]:
    r_drop, share = explicit.parts.r_drop, explicit.quadratic_share
    if r_drop.includes_zero:
        yield f"{TOO_LITTLE} what dropout adds to the loss: {_why_unknown(explicit)}."
        return
    if r_drop.value > 0.0:
        yield f"Dropout adds {r_drop} to the loss."
    else:
        yield f"Dropout lowers the loss by {r_drop.scaled(-1.0)}."
    shown = percent(share, interval=True)
    if share.low >= GOOD and share.high <= 2.0 - GOOD:
        yield (
            f"The explicit regularizer ½E[uᵀHu] makes up {shown} of that, so the second-order "
            "approximation describes this dropout well."
        )
    elif share.high < _POOR or share.low > 2.0 - _POOR:
        yield (
            f"The explicit regularizer ½E[uᵀHu] is {shown} of that, so the second-order approximation "
            "describes this dropout poorly."
        )
    elif share.high - share.low <= _POOR:
        yield f"The explicit regularizer ½E[uᵀHu] is {shown} of that: a rough description."
    else:
        yield f"{TOO_LITTLE} how much of that is the explicit regularizer ½E[uᵀHu]."
    leader = _leader(explicit)
    if leader is not None:
        yield f"The largest part of it, {percent(leader[1])}, is at `{leader[0]}`."


def _why_unknown(explicit: Explicit) -> str:
    """Return why R_drop may be 0, and the way out."""
    r_drop, used, given = explicit.parts.r_drop, explicit.batches, explicit.batches_given
    batches = "one batch" if used == 1 else f"{used} batches"
    interval = f"95 % interval {r_drop.interval}" if r_drop.interval else "error unknown"
    way_out = "more seconds" if used < given else "more batches or more seconds"
    return f"R_drop = {r_drop} from {batches} ({interval}); give it {way_out}"


def _leader(explicit: Explicit) -> tuple[str, Estimate] | None:
    """Return the site with the largest share, if it is certain which one that is."""
    effects = sorted(explicit.sites.items(), key=lambda item: -item[1].share.value)
    if len(effects) < 2:
        return None
    (name, most), (_, second) = effects[:2]
    certain = most.share.low > 1.0 / len(effects) and most.share.low > second.share.high
    return (name, most.share) if certain else None


def _noise_sentence(implicit: Implicit) -> str:
    ratio = implicit.batch_ratio
    if ratio is None:
        return "Dropout's gradient noise can't be compared with mini-batching's on a single batch."
    noise = f"Dropout's gradient noise is {ratio} times mini-batching's"
    if ratio.low > 1.0:
        return f"{noise}: the implicit effect matters."
    if ratio.high < _SOME:
        return f"{noise}: the implicit effect is small."
    if ratio.high < 1.0:
        return f"{noise}: the smaller of the two."
    return f"{TOO_LITTLE} whether dropout's gradient noise exceeds mini-batching's (ratio {ratio})."


def _benefit_sentence(benefit: Benefit) -> str:
    total, after = benefit.every_site, f"after {benefit.steps} steps"
    if total.includes_zero:
        measured = f"benefit {signed(total)} {after}"
        return f"{TOO_LITTLE} whether dropout helps on the validation data ({measured})."
    if total.value > 0.0:
        return f"Dropout helps: {after} without it the validation loss is higher by {total}."
    by = total.scaled(-1.0)
    return f"Dropout hurts: {after} without it the validation loss is lower by {by}."


def advise(
    sites: Sites, explicit: Explicit, implicit: Implicit | None, benefit: Benefit | None = None
) -> list[str]:
    """Return what to do, the most urgent first; there is always at least one sentence."""
    sentences = [*_mistakes(sites)]
    if benefit is not None:
        sentences += _benefit_advice(benefit)
    if abs(explicit.parts.half_quadratic.value) <= _ROUNDING * abs(explicit.parts.r_drop.value):
        sentences.append(
            "½E[uᵀHu] is 0 for every p, because the loss is linear in the model's output, as NLLLoss is "
            "in log-probabilities: let the model return logits and use cross-entropy as the loss."
        )
    elif explicit.parts.r_drop.includes_zero:
        sentences.append(
            f"{TOO_LITTLE} anything about the explicit effect (R_drop = {explicit.parts.r_drop}): "
            "measure for longer, or on more batches, before you act on it."
        )
    else:
        sentences += _explicit_advice(explicit)
    sentences += _weak_sites(explicit)
    if implicit is not None:
        sentences += _noise_advice(implicit)
    if benefit is None:
        sentences.append(
            "To learn which dropout helps, pass validation batches (`validation=…`; in a shell "
            "`--validation`): a share of the effect says how strong a dropout is, not whether it is "
            "good."
        )
    return sentences


def _mistakes(sites: Sites) -> Iterator[str]:
    for site in sites:
        if site.active_in_eval:
            yield (
                f"Dropout at `{site.name}` (p = {site.p:g}) is active in eval mode too, probably by "
                "mistake: make it depend on `self.training`."
            )


def _benefit_advice(benefit: Benefit) -> Iterator[str]:
    after = f"after {benefit.steps} steps without it the validation loss is"
    known = {name: found for name, found in benefit.sites.items() if not math.isnan(found.value)}
    ordered = sorted(known.items(), key=lambda item: -item[1].value)
    for name, found in ordered:
        if found.low > 0.0:
            yield f"Keep the dropout at `{name}` for now: {after} higher by {found}."
    for name, found in reversed(ordered):
        if found.high < 0.0:
            by = found.scaled(-1.0)
            yield f"Dropout at `{name}` hurts, so lower its p: {after} lower by {by}."
    unknown = [f"`{name}`" for name, found in ordered if found.includes_zero]
    if unknown:
        way_out = "more seconds" if benefit.validation_batches > 1 else "more validation batches"
        yield f"No evidence either way at {', '.join(unknown)}: give it {way_out}."
    if missing := [f"`{name}`" for name in benefit.sites if name not in known]:
        yield f"No evidence at {', '.join(missing)}: the time ran out first; allow more seconds."
    yield from _decay_advice(benefit)


def _decay_advice(benefit: Benefit) -> Iterator[str]:
    decay, how = benefit.weight_decay, f"(λ = {benefit.decay:.2g}, {benefit.steps} steps)"
    best = max((f.high for f in benefit.sites.values() if not math.isnan(f.value)), default=0.0)
    if decay.low > max(best, 0.0):
        yield f"Weight decay helps more than any dropout here: {signed(decay)} {how}."
    elif decay.low > 0.0:
        yield f"Weight decay helps as well: {signed(decay)} {how}."
    elif decay.high < 0.0:
        yield f"More weight decay would hurt: {signed(decay)} {how}."


def _explicit_advice(explicit: Explicit) -> Iterator[str]:
    share, parts = explicit.quadratic_share, explicit.parts
    whole = abs(parts.r_drop.value)
    if share.low >= GOOD and share.high <= 2.0 - GOOD:
        yield (
            "undrop.Analytic(strength=undrop.TAYLOR) can replace the explicit effect of this dropout: "
            f"½E[uᵀHu] is {percent(share)} of R_drop."
        )
    elif share.high < _POOR or share.low > 2.0 - _POOR:
        yield (
            f"The analytic explicit regularizer differs from this dropout: ½E[uᵀHu] is "
            f"{percent(share)} of R_drop; a smaller p brings them together."
        )
    if parts.curvature.low > _SOME * whole or parts.curvature.high < -_SOME * whole:
        yield (
            "The model's own curvature matters: it contributes "
            f"{parts.curvature} of R_drop = {parts.r_drop}, which the analytic regularizer leaves out."
        )
    yield from _breakdown(explicit.curve)


def _breakdown(curve: list[Point]) -> Iterator[str]:
    """Name the smallest p at which the approximation misses a lot, if it is accurate at smaller p."""
    bad = [point for point in curve if _misses(point)]
    good = [point for point in curve if point.p < min((b.p for b in bad), default=0.0)]
    if bad and good:
        point = min(bad, key=lambda b: b.p)
        yield (
            f"The second-order approximation breaks down once the largest p is about {point.p:.2g}: "
            f"there it misses {point.parts.rest} of R_drop = {point.parts.r_drop}."
        )


def _misses(point: Point) -> bool:
    rest, whole = point.parts.rest, abs(point.parts.r_drop.value)
    return rest.low > _SOME * whole or rest.high < -_SOME * whole


def _weak_sites(explicit: Explicit) -> Iterator[str]:
    idle = [
        f"`{name}` ({percent(effect.share)})"
        for name, effect in explicit.sites.items()
        if effect.share.high < _NOTHING and len(explicit.sites) > 1
    ]
    if idle:
        yield (
            f"Dropout at {', '.join(idle)} adds nothing measurable to the explicit effect: remove it, "
            "or raise its p if it was meant to act."
        )


def _noise_advice(implicit: Implicit) -> Iterator[str]:
    ratio = implicit.batch_ratio
    if ratio is not None and ratio.low > 1.0:
        yield (
            f"Keep the noise in mind: dropout adds {ratio} times the gradient noise of mini-batching, "
            "so averaging over masks (`Dropout(k)`) or using larger batches changes training."
        )
    elif ratio is not None and ratio.high < _SOME:
        yield (
            f"Averaging over masks would change little: dropout makes only {ratio} times the gradient "
            "noise of mini-batching."
        )
    kept = implicit.analytic_ratio
    if kept.low > 1.0 / (1.0 + _SOME) and kept.high < 1.0 + _SOME:
        yield f"ξ_approx is as large as dropout's noise: its trace is {percent(kept)} of dropout's."
    elif kept.high < GOOD or kept.low > 1.0 / GOOD:
        size = "smaller" if kept.high < GOOD else "larger"
        yield (
            f"ξ_approx is {size} than dropout's noise: its trace is {percent(kept)} of dropout's; a "
            "smaller p brings them together."
        )
