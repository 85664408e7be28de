"""The conclusion of a diagnosis, and what to do.

Every sentence states a figure, and is written only if the 95 % interval of the figure supports it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from undrop.diagnosis.measure.benefit import Benefit
from undrop.diagnosis.measure.estimates import Estimate, percent
from undrop.diagnosis.measure.explicit import Explicit, Point
from undrop.diagnosis.measure.implicit import Implicit
from undrop.diagnosis.report.verdict import GOOD, is_outside, is_within, verdict
from undrop.intercept import Sites

_NEGLIGIBLE_SHARE = 0.01  # a site with a smaller share of ½E[uᵀHu] does not matter
_NOTABLE = 0.2  # a part of a whole matters if it is larger than this
_MOST_NAMES = 3  # the most sites that a sentence lists
_ROUNDING = 1e-9  # a part of R_drop that is smaller than this is rounding

TOO_LITTLE = "Too little data to say"


def signed(estimate: Estimate) -> str:
    """Return an estimate as text that begins with + or -."""
    return f"+{estimate}" if estimate.value > 0.0 else str(estimate)


def conclude(explicit: Explicit, implicit: Implicit | None, benefit: Benefit | None) -> str:
    """Return the conclusion in one paragraph."""
    sentences = list(_explicit_conclusion(explicit))
    if implicit is not None:
        sentences.append(_implicit_conclusion(implicit))
    if benefit is not None:
        sentences.append(_benefit_conclusion(benefit))
    return " ".join(sentences)


def _explicit_conclusion(explicit: Explicit) -> Iterator[str]:
    r_drop, share = explicit.parts.r_drop, explicit.quadratic_share
    if r_drop.includes_zero:
        yield f"{TOO_LITTLE} what dropout adds to the loss: {_why_unknown(explicit)}."
        return
    if r_drop.value > 0.0:
        yield f"Dropout adds {r_drop} to the loss."
    else:
        yield f"Dropout lowers the loss by {r_drop.scaled(-1.0)}."
    measured = percent(share, interval=True)
    outcome = verdict(share)
    if outcome == "unclear" and share.includes_zero:
        yield f"{TOO_LITTLE} how much of this the explicit regularizer ½E[uᵀHu] accounts for."
    else:
        accounts = f"The explicit regularizer ½E[uᵀHu] accounts for {measured} of this"
        yield f"{accounts}{_DESCRIPTIONS[outcome]}."
    name = _strongest_site(explicit)
    if name is not None:
        largest = percent(explicit.sites[name].share)
        yield f"The largest share of ½E[uᵀHu], {largest}, comes from site `{name}`."


_DESCRIPTIONS = {
    "good": ", so the second-order approximation describes this dropout well",
    "rough": ", so it is a rough description of this dropout",
    "poor": ", so the second-order approximation describes this dropout poorly",
    "unclear": f": {TOO_LITTLE.lower()} how well it describes this dropout",
}
"""What follows from each verdict, as the end of a sentence."""


def _why_unknown(explicit: Explicit) -> str:
    """Return why R_drop may be 0, and what to do about it."""
    r_drop, measured = explicit.parts.r_drop, explicit.batches
    batches = "one batch" if measured == 1 else f"{measured} batches"
    interval = f"95 % interval {r_drop.interval}" if r_drop.interval else "error unknown"
    more_batches = "" if measured < explicit.batches_given else "pass more batches or "
    return f"R_drop = {r_drop} from {batches} ({interval}); {more_batches}allow more seconds"


def _strongest_site(explicit: Explicit) -> str | None:
    """Return the site with the largest share; None if that may be another site, or there is only one."""
    shares = {name: effect.share for name, effect in explicit.sites.items()}
    if len(shares) < 2:
        return None
    first, second = sorted(shares, key=lambda name: -shares[name].value)[:2]
    return first if shares[first].low > max(1.0 / len(shares), shares[second].high) else None


def _implicit_conclusion(implicit: Implicit) -> str:
    ratio = implicit.batch_ratio
    if ratio is None:
        return "Dropout's gradient noise can't be compared with mini-batching's on a single batch."
    noise = f"Dropout's gradient noise is {ratio} times mini-batching's"
    if ratio.low > 1.0:
        return f"{noise}, so the implicit effect matters."
    if ratio.high < _NOTABLE:
        return f"{noise}, so the implicit effect is small."
    if ratio.high < 1.0:
        return f"{noise}, so it is the smaller of the two."
    figure = "" if math.isnan(ratio.value) else f" (ratio {ratio})"
    return f"{TOO_LITTLE} whether dropout's gradient noise exceeds mini-batching's{figure}."


def _benefit_conclusion(benefit: Benefit) -> str:
    total, after = benefit.every_site, f"after {benefit.steps} steps"
    if total.includes_zero:
        measured = f"benefit {signed(total)} {after}"
        return f"{TOO_LITTLE} whether dropout helps on the validation data ({measured})."
    if total.value > 0.0:
        return f"Dropout helps: {after} without it the validation loss is higher by {total}."
    by = total.scaled(-1.0)
    return f"Dropout hurts: {after} without it the validation loss is lower by {by}."


def recommend(
    sites: Sites, explicit: Explicit, implicit: Implicit | None, benefit: Benefit | None = None
) -> list[str]:
    """Return what to do, the most urgent first; there is always at least one sentence."""
    sentences = [
        f"Dropout at `{site.name}` (p = {site.p:.3g}) is active in eval mode too, probably by mistake: "
        "make it depend on `self.training`."
        for site in sites
        if site.active_in_eval
    ]
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
    sentences += _weak_site_advice(explicit)
    if implicit is not None:
        sentences += _noise_advice(implicit)
    if benefit is None:
        sentences.append(
            "To learn which dropout helps, pass validation batches (`validation=…`; in a shell "
            "`--validation`): a share of the effect says how strong a dropout is, not whether it helps."
        )
    return sentences


def _benefit_advice(benefit: Benefit) -> Iterator[str]:
    after = f"after {benefit.steps} steps without it the validation loss is"
    measured = {name: b for name, b in benefit.sites.items() if not math.isnan(b.value)}
    ordered = sorted(measured.items(), key=lambda item: -item[1].value)
    for name, site_benefit in ordered:
        if site_benefit.low > 0.0:
            yield f"Keep the dropout at `{name}` for now: {after} higher by {site_benefit}."
    for name, site_benefit in reversed(ordered):
        if site_benefit.high < 0.0:
            by = site_benefit.scaled(-1.0)
            yield f"Dropout at `{name}` hurts, so lower its p: {after} lower by {by}."
    if unclear := [f"`{name}`" for name, b in ordered if b.includes_zero]:
        many_batches = benefit.validation_batches > 1
        way_out = "allow more seconds" if many_batches else "pass more validation batches"
        where = _some_sites(unclear, len(benefit.sites))
        yield f"It is not clear whether dropout at {where} helps: {way_out}."
    if missing := [f"`{name}`" for name in benefit.sites if name not in measured]:
        where = _some_sites(missing, len(benefit.sites))
        yield (
            f"The time ran out before the benefit of dropout at {where} was measured: allow more "
            "seconds."
        )
    yield from _weight_decay_advice(benefit)


def _some_sites(sites: list[str], total: int) -> str:
    """Return the text of at most three sites and the number of others; "any site" for all of several."""
    if 1 < len(sites) == total:
        return "any site"
    more = len(sites) - _MOST_NAMES
    return ", ".join(sites[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _weight_decay_advice(benefit: Benefit) -> Iterator[str]:
    decay = benefit.weight_decay
    after = f"the validation loss after {benefit.steps} steps"
    best = max((b.high for b in benefit.sites.values() if not math.isnan(b.value)), default=0.0)
    if decay.low > 0.0:
        how = "more than any dropout here" if decay.low > best else "as well"
        yield f"Weight decay helps {how}: λ = {benefit.decay:.2g} lowers {after} by {decay}."
    elif decay.high < 0.0:
        by = decay.scaled(-1.0)
        yield f"More weight decay would hurt: λ = {benefit.decay:.2g} raises {after} by {by}."


def _explicit_advice(explicit: Explicit) -> Iterator[str]:
    share, parts = explicit.quadratic_share, explicit.parts
    outcome = verdict(share)
    if outcome == "good":
        yield (
            "`undrop.Analytic(strength=undrop.TAYLOR)` can replace the explicit effect of this dropout: "
            f"its regularizer ½E[uᵀHu] is {percent(share)} of R_drop."
        )
    elif outcome == "poor":
        yield (
            "The explicit regularizer ½E[uᵀHu] differs from this dropout: it is "
            f"{percent(share)} of R_drop. A smaller p brings the two closer."
        )
    if _is_notable(parts.curvature, parts.r_drop):
        yield (
            f"The model's own curvature matters: it makes up {parts.curvature} of R_drop = "
            f"{parts.r_drop}, and the analytic regularizer leaves it out."
        )
    yield from _breakdown(explicit.curve)


def _is_notable(part: Estimate, r_drop: Estimate) -> bool:
    limit = _NOTABLE * abs(r_drop.value)
    return part.low > limit or part.high < -limit


def _breakdown(curve: list[Point]) -> Iterator[str]:
    """Name the smallest p at which second order misses a notable part, if the curve has a smaller p."""
    bad = (point for point in curve if _is_notable(point.parts.rest, point.parts.r_drop))
    first = next(bad, None)
    if first is not None and first.p > curve[0].p:
        yield (
            f"The second-order approximation breaks down when the largest p is about {first.p:.2g}: "
            f"there it misses {first.parts.rest} of R_drop = {first.parts.r_drop}."
        )


def _weak_site_advice(explicit: Explicit) -> Iterator[str]:
    weak = [
        f"`{name}` ({percent(effect.share)})"
        for name, effect in explicit.sites.items()
        if effect.share.high < _NEGLIGIBLE_SHARE
    ]
    if 0 < len(weak) < len(explicit.sites):  # a hundred weak sites can be strong together
        where = _some_sites(weak, len(explicit.sites))
        yield (
            f"Dropout at {where} adds nothing measurable to the explicit effect: remove it, "
            "or raise its p if it is meant to have an effect."
        )


def _noise_advice(implicit: Implicit) -> Iterator[str]:
    noise = implicit.batch_ratio
    if noise is not None and noise.low > 1.0:
        yield (
            f"Dropout's gradient noise matters: it is {noise} times mini-batching's, so averaging over "
            "masks (`undrop.Dropout(k)`) or larger batches would change training."
        )
    elif noise is not None and noise.high < _NOTABLE:
        yield (
            "Averaging over masks (`undrop.Dropout(k)`) would change little: dropout's gradient noise "
            f"is only {noise} times mini-batching's."
        )
    ratio, name = implicit.analytic_ratio, "ξ_approx, the noise of `undrop.Analytic`,"
    if is_within(ratio, GOOD):
        yield f"{name} is as large as dropout's: its trace is {percent(ratio)} of dropout's."
    elif is_outside(ratio, GOOD):
        size = "smaller" if ratio.high < GOOD else "larger"
        yield (
            f"{name} is {size} than dropout's: its trace is {percent(ratio)} of dropout's. A smaller p "
            "brings the two closer."
        )
