"""What a diagnosis says: a table for people, JSON for programs, plots and a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undrop.diagnosis.measure.estimates import Estimate, percent
from undrop.diagnosis.measure.explicit import Explicit
from undrop.diagnosis.measure.implicit import Implicit
from undrop.intercept import Sites

__all__ = ["Diagnosis"]

ERRORS = (
    "± is one standard error over masks and batches: the larger of the two ways to tell it, from "
    "the spread between batches and from the spread of masks within each."
)
EXACT = "Every mask was enumerated: ± is one standard error over batches alone."


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What dropout does in a model.

    ``print`` it, or ``save`` it as JSON, ``plot`` it, or write it as one ``html`` page.
    """

    model: str
    sites: Sites
    explicit: Explicit
    implicit: Implicit | None
    """None where it was not asked for."""
    advice: list[str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """For programs: every figure is ``{"value": …, "stderr": …}``."""
        return {
            "model": self.model,
            "sites": self.sites.to_json(),
            "explicit": self.explicit.to_json(),
            "implicit": None if self.implicit is None else self.implicit.to_json(),
            "advice": self.advice,
            "stderr_over": "batches" if self.explicit.exact else "masks and batches",
            "seconds": self.seconds,
        }

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file, whole or not at all."""
        from undrop.files import write_json

        write_json(Path(path), self.to_json())

    def plot(self, path: str | Path) -> None:
        """Draw all panels into one picture; the suffix says how (png, pdf, svg)."""
        from undrop.diagnosis.report.plots import draw

        draw(self, Path(path))

    def html(self, path: str | Path) -> None:
        """Write one page that needs no other file and no network."""
        from undrop.diagnosis.report.page import write

        write(self, Path(path))

    @property
    def notes(self) -> list[str]:
        """How the figures were had."""
        explicit, implicit = self.explicit, self.implicit
        how = "exactly" if explicit.exact else f"from {explicit.masks} masks"
        where = "one batch" if explicit.batches == 1 else f"{explicit.batches} batches"
        notes = [
            f"R_drop and its parts {how} on {where}, in {self.seconds:.0f} s.",
            EXACT if explicit.exact else ERRORS,
        ]
        if explicit.differences is not None:
            notes.append(
                "Second derivatives are differences, since an op of the model has no double "
                f"backward ({explicit.differences})."
            )
        if implicit is not None:
            notes.append(
                f"Gradient noise from {implicit.samples} samples of each kind; traces are of the "
                "gradient of the mean loss of one batch of this size."
            )
            if implicit.kept < implicit.parameters:
                notes.append(
                    f"Directions and diagonals are compared in a random sketch of {implicit.kept:,} "
                    f"numbers of {implicit.parameters:,}."
                )
            if implicit.trace_batch is None:
                notes.append("The noise of mini-batching needs two batches or more.")
        return notes

    def tables(self) -> Iterator[tuple[str, list[list[str]]]]:
        """All figures as tables: a title, and rows of which the first is the head."""
        yield "Explicit effect (mean loss per term)", self._parts()
        yield "By site", self._sites()
        yield "Every p times a factor", self._curve()
        if self.explicit.classes:
            yield "Classes that carry uᵀHu", self._classes()
        if self.implicit is not None:
            yield "Implicit effect (traces of gradient covariances)", _traces(self.implicit)
            yield "Gradient noise by part of the model", _groups(self.implicit)
            yield "Mean of k samples of noise: trace times k", _shrinking(self.implicit)

    def _parts(self) -> list[list[str]]:
        parts, explicit = self.explicit.parts, self.explicit
        return [
            ["part", "value"],
            ["R_drop = E ℓ(dropout) - ℓ", str(parts.r_drop)],
            ["½E[uᵀHu], the explicit regularizer", str(parts.psd)],
            ["½E[Dℓ·∂²F/∂ε²], the non-PSD term", str(parts.non_psd)],
            ["what Taylor misses", str(parts.rest)],
            ["½E[uᵀHu] / R_drop", percent(explicit.quadratic_share, of=parts.r_drop)],
            [
                "all of second order / R_drop",
                percent(explicit.second_order_share, of=parts.r_drop),
            ],
        ]

    def _sites(self) -> list[list[str]]:
        head = ["site", "p", "share of ½E[uᵀHu]", "R_drop alone", "½E[uᵀHu]", "non-PSD", "missed"]
        effects = sorted(self.explicit.sites.items(), key=lambda item: -item[1].share.value)
        return [head] + [
            [name, f"{effect.site.p:g}", percent(effect.share), *map(str, effect.parts)]
            for name, effect in effects
        ]

    def _curve(self) -> list[list[str]]:
        return [["factor", "largest p", "R_drop", "½E[uᵀHu]", "non-PSD", "missed"]] + [
            [f"{point.factor:.2g}", f"{point.q:.2g}", *map(str, point.parts)]
            for point in self.explicit.curve
        ]

    def _classes(self) -> list[list[str]]:
        return [["class", "share of uᵀHu", "share of p(1-p)"]] + [
            [found.name, percent(found.share), f"{100.0 * found.weight:.1f} %"]
            for found in self.explicit.classes
        ]

    def __repr__(self) -> str:
        lines = [f"What dropout does in {self.model}", ""]
        for title, rows in self.tables():
            lines += [title, *_aligned(rows), ""]
        lines += ["What to do"]
        lines += [f"  - {sentence}" for sentence in self.advice] or ["  (nothing stands out)"]
        return "\n".join([*lines, "", *self.notes])


def _traces(implicit: Implicit) -> list[list[str]]:
    overlap = implicit.overlap
    return [
        ["figure", "value"],
        ["dropout", str(implicit.trace_dropout)],
        ["ξ_approx", str(implicit.trace_analytic)],
        ["mini-batching", _or_dash(implicit.trace_batch)],
        ["ξ_approx / dropout", str(implicit.analytic_ratio)],
        ["dropout / mini-batching", _or_dash(implicit.batch_ratio)],
        ["cosine of the diagonals, dropout and ξ_approx", str(implicit.cosine)],
        [f"overlap of their leading {overlap.directions} directions", str(overlap.value)],
        ["… of dropout's with itself, as much as these samples show", str(overlap.ceiling)],
        ["… by chance", f"{overlap.chance:.2g}"],
    ]


def _groups(implicit: Implicit) -> list[list[str]]:
    return [["part", "parameters", "dropout", "ξ_approx", "mini-batching"]] + [
        [
            name,
            f"{group.parameters:,}",
            str(group.trace_dropout),
            str(group.trace_analytic),
            _or_dash(group.trace_batch),
        ]
        for name, group in implicit.groups.items()
    ]


def _shrinking(implicit: Implicit) -> list[list[str]]:
    return [["k", "dropout", "ξ_approx"]] + [
        [str(point.k), str(point.dropout), str(point.analytic)] for point in implicit.shrinking
    ]


def _or_dash(estimate: Estimate | None) -> str:
    return "–" if estimate is None else str(estimate)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
