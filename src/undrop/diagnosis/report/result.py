"""The result of a diagnosis: a conclusion and tables for people, JSON for programs, plots, a page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undrop.diagnosis.measure.benefit import Benefit
from undrop.diagnosis.measure.estimates import Estimate, percent
from undrop.diagnosis.measure.explicit import Explicit
from undrop.diagnosis.measure.implicit import Implicit
from undrop.diagnosis.report.advice import signed
from undrop.diagnosis.report.provenance import Provenance
from undrop.intercept import Sites
from undrop.report import Table, as_json, terminal_width, wrap
from undrop.report.plain import as_frame

if TYPE_CHECKING:
    from undrop.diagnosis.report.comparison import Comparison


FORMAT = 3
"""The version of the JSON format."""

_WIDEST = 100  # columns of a paragraph
ERRORS = (
    "± is one standard error over masks and batches, the larger of two estimates: from the spread "
    "between batches, and from the spread of masks within each. Brackets are 95 % intervals."
)
ONE_BATCH = "There is one batch: figures and errors are for that batch."
BENEFIT = (
    "The benefit compares short training runs from these weights, with and without a dropout ({} "
    "repeats of {} steps with {}). In a test, a negative one was right about retraining in 17 of 19 "
    "cases, a positive one in 12 of 25: compare two runs before you keep a change."
)


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What dropout does in a model.

    ``print`` it, ``save`` it as JSON, ``plot`` it, write it as one ``html`` page, ``compare`` it with
    another, or read its figures. A notebook shows it as tables.
    """

    model: str
    sites: Sites
    explicit: Explicit
    implicit: Implicit | None
    """None if it was not measured."""
    benefit: Benefit | None
    """None without validation batches."""
    conclusion: str
    """One paragraph."""
    advice: list[str]
    """What to do, the most urgent first."""
    provenance: Provenance

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.provenance.seconds

    def to_json(self) -> dict[str, Any]:
        """Values for JSON; every figure is ``{"value": …, "stderr": …, "low": …, "high": …}``."""
        values = {field.name: as_json(getattr(self, field.name)) for field in fields(self)}
        return {"format": FORMAT, **values, "notes": self.notes}

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file, atomically."""
        from undrop.files import write_json

        write_json(Path(path), self.to_json())

    def plot(self, path: str | Path) -> None:
        """Draw all panels into one picture; the suffix sets its format (png, pdf, svg)."""
        from undrop.diagnosis.report.plots import draw

        draw(self, Path(path))

    def html(self, path: str | Path) -> None:
        """Write one HTML page that needs no other file and no network."""
        from undrop.diagnosis.report.plots import write

        write(self, Path(path))

    def compare(self, other: Diagnosis) -> Comparison:
        """Compare this diagnosis with a later one, or one of a changed model."""
        from undrop.diagnosis.report.comparison import compare

        return compare(self.to_json(), other.to_json())

    def to_frame(self) -> Any:
        """One row per site as a pandas DataFrame: p, kind, share, benefit and its own R_drop."""
        rows = []
        for name, effect in self.explicit.sites.items():
            figures = {
                "share": effect.share,
                "r_drop_alone": effect.parts.r_drop,
                "half_quadratic": effect.parts.half_quadratic,
            }
            if self.benefit is not None:
                figures["benefit"] = self.benefit.sites[name]
            row: dict[str, Any] = {"p": effect.p, "kind": effect.kind}
            for key, figure in figures.items():
                row |= {key: figure.value, f"{key}_stderr": figure.stderr}
            rows.append(row)
        return as_frame(rows, list(self.explicit.sites))

    @property
    def notes(self) -> list[str]:
        """How the figures were measured."""
        explicit, implicit = self.explicit, self.implicit
        given = explicit.batches_given
        where = "one batch" if given == 1 else f"{explicit.batches} of {given} batches"
        notes = [f"R_drop and its parts are from {explicit.masks:,} masks on {where}."]
        if explicit.batches < given:
            notes.append("The time ran out before every batch was measured: allow more seconds.")
        notes.append(ERRORS)
        if given == 1:
            notes.append(ONE_BATCH)
        if explicit.differences is not None:
            notes.append(
                "Second derivatives are differences, because an op of the model has no double "
                f"backward ({explicit.differences})."
            )
        if implicit is not None:
            notes += _implicit_notes(implicit)
        if self.benefit is not None:
            b = self.benefit
            notes.append(BENEFIT.format(b.repeats, b.steps, b.optimizer))
        return notes

    def tables(self) -> Iterator[Table]:
        """All figures as tables."""
        yield self._parts()
        yield self._sites()
        yield self._alone()
        yield self._curve()
        if self.explicit.classes:
            yield self._classes()
        if self.implicit is not None:
            yield _traces(self.implicit)
            yield _groups(self.implicit)
            yield _shrinking(self.implicit)

    def _parts(self) -> Table:
        parts, explicit = self.explicit.parts, self.explicit
        unknown = parts.r_drop.includes_zero
        share = partial(percent, interval=True)
        rows = [
            ("R_drop = E ℓ(dropout) - ℓ", str(parts.r_drop)),
            ("½E[uᵀHu], the explicit regularizer", str(parts.half_quadratic)),
            ("curvature of the model, ½E[Dℓ·∂²F/∂ε²]", str(parts.curvature)),
            ("rest, missed by second order", str(parts.rest)),
            ("½E[uᵀHu] / R_drop", "–" if unknown else share(explicit.quadratic_share)),
            (
                "all of second order / R_drop",
                "–" if unknown else share(explicit.second_order_share),
            ),
        ]
        return Table(("part", "value"), rows, title="Explicit effect (loss per term)")

    def _sites(self) -> Table:
        """The share of each site, and its benefit if it was measured."""
        effects = sorted(self.explicit.sites.items(), key=lambda item: -item[1].share.value)
        heads = ["site", "p", "share of ½E[uᵀHu]"]
        rows = [[name, f"{effect.p:g}", percent(effect.share)] for name, effect in effects]
        title = "Sites: strength"
        if self.benefit is not None:
            heads += ["benefit", "z"]
            rows = [[*row, *_with_z(self.benefit.sites[row[0]])] for row in rows]
            rows.append(["all sites", "", "", *_with_z(self.benefit.every_site)])
            label = f"weight decay (λ = {self.benefit.decay:.2g})"
            rows.append([label, "", "", *_with_z(self.benefit.weight_decay)])
            steps, rate = self.benefit.steps, self.benefit.learning_rate
            title = f"Sites: strength, and benefit (loss after {steps} steps of {rate:g})"
        return Table(heads, rows, numbers={"p", "z"}, title=title)

    def _alone(self) -> Table:
        rows = [[name, *map(str, effect.parts)] for name, effect in self.explicit.sites.items()]
        heads = ("site", "R_drop", "½E[uᵀHu]", "curvature", "rest")
        return Table(heads, rows, title="Sites: each one alone, the others off")

    def _curve(self) -> Table:
        rows = [
            [f"{point.factor:.2g}", f"{point.p:.2g}", *map(str, point.parts)]
            for point in self.explicit.curve
        ]
        heads = ("factor", "largest p", "R_drop", "½E[uᵀHu]", "curvature", "rest")
        numbers = {"factor", "largest p"}
        return Table(heads, rows, numbers=numbers, title="Every p times a factor")

    def _classes(self) -> Table:
        rows = [
            [found.name, percent(found.share), f"{100.0 * found.weight:.1f} %"]
            for found in self.explicit.classes
        ]
        heads = ("class", "share of uᵀHu", "share of p(1-p)")
        return Table(heads, rows, title="Classes that carry uᵀHu")

    def glossary(self) -> Table:
        """The symbols and their meaning."""
        return Table(("symbol", "meaning"), GLOSSARY, title="Symbols")

    def origin(self) -> Table:
        """Date, versions, model, data and effort."""
        return Table(("what", "value"), self.provenance.rows(), title="Where the numbers come from")

    def __repr__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The whole diagnosis for a terminal of ``width`` columns; None uses the terminal's width."""
        room = terminal_width() if width is None else width
        lines = [f"What dropout does in {self.model}", "", *_wrapped(self.conclusion, room)]
        lines += ["", "What to do"]
        for sentence in self.advice:
            first, *more = _wrapped(sentence, room - 4)
            lines += [f"  - {first}", *(f"    {line}" for line in more)]
        for table in self.tables():
            lines += ["", table.text(room)]
        lines += [""]
        for note in self.notes:
            lines += _wrapped(note, room)
        lines += ["", self.glossary().text(room), "", self.origin().text(room)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from undrop.diagnosis.report.plots import notebook

        return notebook(self)


def _wrapped(text: str, room: int) -> list[str]:
    return wrap(text, min(room, _WIDEST))


def _with_z(found: Estimate) -> tuple[str, str]:
    if math.isnan(found.value):
        return "–", "–"
    return signed(found), "–" if found.z is None else f"{found.z:+.1f}"


def _implicit_notes(implicit: Implicit) -> Iterator[str]:
    yield (
        f"Gradient noise is from {implicit.samples:,} samples of each kind; traces are of the gradient "
        "of the mean loss of one batch of this size."
    )
    if implicit.kept < implicit.parameters:
        yield (
            f"Directions and diagonals are compared in a random sketch of {implicit.kept:,} numbers of "
            f"{implicit.parameters:,}."
        )
    if implicit.trace_batch is None:
        yield "The noise of mini-batching needs at least two batches."


def _traces(implicit: Implicit) -> Table:
    overlap = implicit.overlap
    rows = [
        ("trace, dropout", str(implicit.trace_dropout)),
        ("trace, ξ_approx", str(implicit.trace_analytic)),
        ("trace, mini-batching", _or_dash(implicit.trace_batch)),
        ("ξ_approx / dropout", str(implicit.analytic_ratio)),
        ("dropout / mini-batching", _or_dash(implicit.batch_ratio)),
        ("cosine of the diagonals, dropout and ξ_approx", str(implicit.cosine)),
        (_overlap_of(overlap.directions), str(overlap.value)),
        ("upper limit with this many samples", str(overlap.ceiling)),
        ("overlap by chance", f"{overlap.chance:.2g}"),
    ]
    return Table(("figure", "value"), rows, title="Implicit effect (gradient noise)")


def _overlap_of(directions: int) -> str:
    leading = "direction" if directions == 1 else f"{directions} directions"
    return f"overlap of their leading {leading}"


def _groups(implicit: Implicit) -> Table:
    rows = [
        [
            name,
            f"{group.parameters:,}",
            str(group.trace_dropout),
            str(group.trace_analytic),
            _or_dash(group.trace_batch),
        ]
        for name, group in implicit.groups.items()
    ]
    heads = ("part", "parameters", "dropout", "ξ_approx", "mini-batching")
    title = "Gradient noise by part of the model (traces)"
    return Table(heads, rows, numbers={"parameters"}, title=title)


def _shrinking(implicit: Implicit) -> Table:
    rows = [[str(point.k), str(point.dropout), str(point.analytic)] for point in implicit.shrinking]
    heads = ("k", "dropout", "ξ_approx")
    return Table(heads, rows, numbers={"k"}, title="Mean of k samples of noise: trace times k")


def _or_dash(estimate: Estimate | None) -> str:
    return "–" if estimate is None else str(estimate)


GLOSSARY = (
    ("site", "where the model multiplies an activation or weight h by 1 + ε·σ·η"),
    ("p", "the drop probability of a site; σ = sqrt(p/(1-p)); η is noise of mean 0, variance 1"),
    ("F, ℓ, H", "the model's output, its loss, and the Hessian of ℓ in F"),
    ("u", "the output tangent ∂F/∂ε: how the noise moves the output, to first order"),
    ("R_drop", "E ℓ(with dropout) - ℓ(without): what dropout adds to the loss"),
    ("½E[uᵀHu]", "the explicit regularizer: the part of R_drop that undrop.Analytic replaces"),
    ("curvature", "½E[Dℓ·∂²F/∂ε²]: the second-order part from the model's own curvature"),
    ("rest", "the part of R_drop that second order misses"),
    ("share", "a site's part of ½E[uᵀHu]: how strong its dropout is, not whether it helps"),
    (
        "benefit",
        "validation loss after some steps without a dropout, minus that with it; if positive, it helps",
    ),
    ("z", "the benefit in standard errors; beyond 2 its sign is fairly certain"),
    ("ξ_approx", "∇(∂ℓ/∂ε): the analytic stand-in for dropout's gradient noise"),
    ("trace", "the mean squared size of gradient noise"),
    ("±", "one standard error; in brackets the 95 % interval"),
)
"""Symbols and their meaning, in the order in which a diagnosis shows them."""
