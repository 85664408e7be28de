"""The result of a diagnosis: its text and tables for people, and its JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undrop.diagnosis.measure.benefit import Benefit
from undrop.diagnosis.measure.estimates import Estimate, percent
from undrop.diagnosis.measure.explicit import Explicit
from undrop.diagnosis.measure.implicit import Implicit
from undrop.diagnosis.measure.r_drop import PART_LABELS
from undrop.diagnosis.report.advice import signed
from undrop.diagnosis.report.provenance import Provenance
from undrop.intercept import Sites
from undrop.report import Table, as_json, terminal_width, wrap
from undrop.report.plain import as_frame

if TYPE_CHECKING:
    from undrop.diagnosis.report.comparison import Comparison


FORMAT = 3
"""The version of the JSON format."""

_PARAGRAPH_WIDTH = 100  # the largest number of columns
ERROR_NOTE = (
    "± is one standard error over masks and batches, the larger of two estimates: one from the spread "
    "between batches, and one from the spread of the masks within each batch. Brackets are 95 % "
    "intervals."
)
ONE_BATCH_NOTE = "There is one batch: figures and errors are for that batch."
BENEFIT_NOTE = (
    "The benefit compares short training runs from the present weights, with and without a dropout "
    "({} of {} steps with {}). In a test, a negative benefit predicted the effect of retraining "
    "without the dropout in 17 of 19 cases, a positive benefit in 12 of 25: compare two full runs "
    "before you keep a change."
)
SYMBOLS_NOTE = "The table of symbols at the end explains every symbol and term."


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What dropout does in a model.

    ``print`` it, ``save`` it as JSON, ``plot`` it, write it as one ``html`` page, ``compare`` it with
    another diagnosis, or read its figures. A notebook shows it as tables.
    """

    model: str
    sites: Sites
    explicit: Explicit
    implicit: Implicit | None
    """None with implicit=False."""
    benefit: Benefit | None
    """None without validation batches."""
    conclusion: str
    """One paragraph."""
    advice: list[str]
    """What to do, the most urgent first."""
    provenance: Provenance

    @property
    def seconds(self) -> float:
        """The seconds that the diagnosis took."""
        return self.provenance.seconds

    def to_json(self) -> dict[str, Any]:
        """Return values for JSON; a figure is ``{"value": …, "stderr": …, "low": …, "high": …}``."""
        values = {field.name: as_json(getattr(self, field.name)) for field in fields(self)}
        return {"format": FORMAT, **values, "notes": self.notes}

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file, atomically."""
        from undrop.files import write_json

        write_json(Path(path), self.to_json())

    def plot(self, path: str | Path) -> None:
        """Draw all panels into one picture; the suffix sets its format (png, pdf, svg)."""
        from undrop.diagnosis.report.plots import draw_all

        draw_all(self, Path(path))

    def html(self, path: str | Path) -> None:
        """Write one HTML page that needs no other file and no network."""
        from undrop.diagnosis.report.plots import write_page

        write_page(self, Path(path))

    def compare(self, other: Diagnosis) -> Comparison:
        """Compare this diagnosis with a later one, or one of a changed model."""
        from undrop.diagnosis.report.comparison import compare_json

        return compare_json(self.to_json(), other.to_json())

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with the figures of each site in a row.

        The columns are p, kind, share, R_drop and ½E[uᵀHu] with this site alone, and the benefit.
        """
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
        total = explicit.batches_given
        batches = "one batch" if total == 1 else f"{explicit.batches} of {total} batches"
        notes = [f"R_drop and its parts are from {explicit.masks:,} masks on {batches}."]
        if explicit.batches < total:
            notes.append("The time ran out before every batch was measured: allow more seconds.")
        notes.append(ERROR_NOTE)
        if total == 1:
            notes.append(ONE_BATCH_NOTE)
        if explicit.differences is not None:
            notes.append(f"Derivatives are finite differences, because {explicit.differences}.")
        if implicit is not None:
            notes += _implicit_notes(implicit)
        if self.benefit is not None:
            b = self.benefit
            repeats = "1 repeat" if b.repeats == 1 else f"{b.repeats} repeats"
            notes.append(BENEFIT_NOTE.format(repeats, b.steps, b.optimizer))
        return notes

    def tables(self) -> Iterator[Table]:
        """Yield tables with all figures."""
        yield self._parts_table()
        yield self._sites_table()
        yield self._single_sites_table()
        yield self._curve_table()
        if self.explicit.classes:
            yield self._classes_table()
        if self.implicit is not None:
            yield _traces_table(self.implicit)
            yield _groups_table(self.implicit)
            yield _shrinking_table(self.implicit)

    def _parts_table(self) -> Table:
        explicit, parts = self.explicit, self.explicit.parts

        def share_of_r_drop(share: Estimate) -> str:
            return "–" if parts.r_drop.includes_zero else percent(share, interval=True)

        rows = [
            ("R_drop = E ℓ(dropout) - ℓ", str(parts.r_drop)),
            ("½E[uᵀHu], the explicit regularizer", str(parts.half_quadratic)),
            ("curvature of the model, ½E[Dℓ·∂²F/∂ε²]", str(parts.curvature)),
            ("rest, missed by second order", str(parts.rest)),
            ("½E[uᵀHu] / R_drop", share_of_r_drop(explicit.quadratic_share)),
            ("all of second order / R_drop", share_of_r_drop(explicit.second_order_share)),
        ]
        return Table(("part", "value"), rows, title="Explicit effect (in units of the loss)")

    def _sites_table(self) -> Table:
        effects = sorted(self.explicit.sites.items(), key=lambda item: -item[1].share.value)
        headers = ["site", "p", "share of ½E[uᵀHu]"]
        rows = [[name, f"{effect.p:.3g}", percent(effect.share)] for name, effect in effects]
        title = "Sites: strength"
        if self.benefit is not None:
            headers += ["benefit", "z"]
            rows = [[*row, *_benefit_and_z(self.benefit.sites[row[0]])] for row in rows]
            rows.append(["all sites", "", "", *_benefit_and_z(self.benefit.every_site)])
            label = f"weight decay (λ = {self.benefit.decay:.2g})"
            rows.append([label, "", "", *_benefit_and_z(self.benefit.weight_decay)])
            steps, rate = self.benefit.steps, self.benefit.learning_rate
            title += f", and benefit ({steps} steps with a learning rate of {rate:g})"
        return Table(headers, rows, numbers={"p", "z"}, title=title)

    def _single_sites_table(self) -> Table:
        rows = [[name, *map(str, effect.parts)] for name, effect in self.explicit.sites.items()]
        title = "Each site alone, without dropout at the others"
        return Table(("site", *PART_LABELS), rows, title=title)

    def _curve_table(self) -> Table:
        rows = [
            [f"{point.factor:.2g}", f"{point.p:.2g}", *map(str, point.parts)]
            for point in self.explicit.curve
        ]
        numbers = ("factor", "largest p")
        return Table((*numbers, *PART_LABELS), rows, numbers, "Every p times a factor")

    def _classes_table(self) -> Table:
        classes = self.explicit.classes
        rows = [[c.name, percent(c.share), f"{100.0 * c.weight:.1f} %"] for c in classes]
        headers = ("class", "share of uᵀHu", "share of p(1-p)")
        return Table(headers, rows, title="Classes that carry uᵀHu")

    def glossary(self) -> Table:
        """Return the symbols and terms of this diagnosis with their meanings."""
        symbols = dict(EXPLICIT_SYMBOLS)
        if self.explicit.classes:
            symbols |= CLASS_SYMBOLS
        if self.implicit is not None:
            symbols |= IMPLICIT_SYMBOLS
        if self.benefit is not None:
            symbols |= BENEFIT_SYMBOLS
        return Table(("symbol", "meaning"), list((symbols | MARKS).items()), title="Symbols")

    def origin(self) -> Table:
        """Return the date, the versions, the model, the data and the effort."""
        return Table(("what", "value"), self.provenance.rows(), title="Where the numbers come from")

    def __repr__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return the whole diagnosis for a terminal.

        Args:
            width: the columns of the terminal; None uses those of the present terminal.
        """
        columns = terminal_width() if width is None else width

        def bullets(sentences: list[str]) -> Iterator[str]:
            for sentence in sentences:
                first, *others = _wrapped(sentence, columns - 4)
                yield f"  - {first}"
                yield from (f"    {line}" for line in others)

        lines = [f"What dropout does in {self.model}", "", *_wrapped(self.conclusion, columns)]
        lines += ["", "What to do", *bullets(self.advice)]
        lines += ["", *_wrapped(SYMBOLS_NOTE, columns)]
        for table in self.tables():
            lines += ["", table.text(columns)]
        lines += ["", "How it was measured", *bullets(self.notes)]
        lines += ["", self.glossary().text(columns), "", self.origin().text(columns)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from undrop.diagnosis.report.plots import notebook_html

        return notebook_html(self)


def _wrapped(text: str, columns: int) -> list[str]:
    return wrap(text, min(columns, _PARAGRAPH_WIDTH))


def _benefit_and_z(benefit: Estimate) -> tuple[str, str]:
    if math.isnan(benefit.value):
        return "–", "–"
    return signed(benefit), "–" if benefit.z is None else f"{benefit.z:+.1f}"


def _implicit_notes(implicit: Implicit) -> Iterator[str]:
    yield (
        f"Gradient noise is from {implicit.samples:,} samples of each kind. Traces are of the gradient "
        "of the mean loss of one batch."
    )
    if implicit.kept < implicit.parameters:
        yield (
            f"Directions and diagonals are compared in a random sketch of {implicit.kept:,} numbers of "
            f"{implicit.parameters:,}."
        )
    if implicit.trace_batch is None:
        yield "The noise of mini-batching needs at least two batches."


def _traces_table(implicit: Implicit) -> Table:
    overlap = implicit.overlap
    k = overlap.directions
    directions = "direction" if k == 1 else f"{k} directions"
    rows = [
        ("trace, dropout", str(implicit.trace_dropout)),
        ("trace, ξ_approx", str(implicit.trace_analytic)),
        ("trace, mini-batching", _or_dash(implicit.trace_batch)),
        ("ξ_approx / dropout", str(implicit.analytic_ratio)),
        ("dropout / mini-batching", _or_dash(implicit.batch_ratio)),
        ("cosine of the diagonals, dropout and ξ_approx", str(implicit.cosine)),
        (f"overlap of their leading {directions}", str(overlap.value)),
        ("upper limit with this many samples", str(overlap.ceiling)),
        ("overlap by chance", f"{overlap.chance:.2g}"),
    ]
    return Table(("figure", "value"), rows, title="Implicit effect (gradient noise)")


def _groups_table(implicit: Implicit) -> Table:
    rows = [
        [name, f"{parameters:,}", *map(_or_dash, traces)]
        for name, (*traces, parameters) in implicit.groups.items()
    ]
    headers = ("part", "parameters", "dropout", "ξ_approx", "mini-batching")
    title = "Gradient noise by part of the model (traces)"
    return Table(headers, rows, numbers={"parameters"}, title=title)


def _shrinking_table(implicit: Implicit) -> Table:
    rows = [[str(point.k), str(point.dropout), str(point.analytic)] for point in implicit.shrinking]
    headers = ("k", "dropout", "ξ_approx")
    return Table(headers, rows, numbers={"k"}, title="Mean of k samples of noise: trace times k")


def _or_dash(estimate: Estimate | None) -> str:
    return "–" if estimate is None else str(estimate)


EXPLICIT_SYMBOLS = {
    "site": "a place where the model multiplies an activation or weight h by 1 + ε·σ·η",
    "p": "the drop probability of a site; σ = sqrt(p/(1-p)); η is noise with mean 0 and variance 1",
    "ε": "the size of the noise: 0 is no dropout, 1 is dropout",
    "mask": "one random draw of η at all sites; E is the mean over masks",
    "F, ℓ, Dℓ, H": "the model's output, its loss ℓ(F), and the gradient and Hessian of ℓ in F",
    "u": "the output tangent ∂F/∂ε at ε = 0: how the noise moves the output, to first order",
    "explicit effect": "the change in the expected loss that dropout causes",
    "R_drop": "the size of the explicit effect: E ℓ(with dropout) - ℓ(without)",
    "½E[uᵀHu]": "the explicit regularizer: what undrop.Analytic(strength=undrop.TAYLOR) adds to ℓ",
    "curvature": "½E[Dℓ·∂²F/∂ε²]: the second-order part from the model's own curvature",
    "second order": "½E[uᵀHu] + curvature: an approximation of R_drop that is exact for small noise",
    "rest": "the part of R_drop that second order misses",
    "share": "a site's part of ½E[uᵀHu]: how strong its dropout is, not whether it helps",
    "factor, largest p": "the factor of every p, and the largest p of a site times this factor",
}
"""The symbols of every diagnosis, each with its meaning."""
CLASS_SYMBOLS = {
    "p(1-p) of a class": "its part of the diagonal of H; p is the probability that the model predicts",
}
IMPLICIT_SYMBOLS = {
    "implicit effect": "the noise that dropout adds to the gradient of every step",
    "ξ_approx": "∇(∂ℓ/∂ε): the noise that undrop.Analytic puts in place of dropout's gradient noise",
    "mini-batching": "the gradient noise from the random choice of a batch",
    "trace": "the mean squared size of gradient noise",
    "cosine of the diagonals": "1 if two noises are distributed over the parameters in the same way",
    "overlap": "the agreement of the strongest directions of two noises, from 0 to 1",
    "upper limit": "the overlap of dropout's noise with itself, from two halves of its samples",
}
BENEFIT_SYMBOLS = {
    "benefit": "validation loss after some steps without a dropout, minus that with it; it helps if > 0",
    "z": "the benefit in standard errors; beyond 2 its sign is fairly certain",
    "λ": "the coefficient of the weight decay that is tried in addition to the optimizer's",
}
MARKS = {
    "±": "one standard error, or ? if the samples are too few for one",
    "( … to … )": "the 95 % interval",
    "–": "not measured, or too uncertain to show",
}
