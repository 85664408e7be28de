"""Compare two diagnoses, such as before and after training, or with and without a change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from undrop.diagnosis.measure.estimates import Estimate
from undrop.diagnosis.measure.r_drop import PART_LABELS, Parts
from undrop.errors import DataError
from undrop.files import read_json
from undrop.report import Table, as_json, terminal_width, wrap
from undrop.report.html import fragment, paragraph
from undrop.report.plain import as_frame

_NAMED_CHANGES = 3  # the largest number of changes in the conclusion
_P_AT = "p at "
_STAR_NOTE = "* the 95 % interval of the change excludes 0."


class Change(NamedTuple):
    """One figure in both diagnoses."""

    figure: str
    before: Estimate | None
    after: Estimate | None
    difference: Estimate | None
    """After minus before, as for independent figures; None if one diagnosis lacks the figure."""

    @property
    def certain(self) -> bool:
        """Whether the 95 % interval of the difference excludes 0."""
        d = self.difference
        return d is not None and d.stderr is not None and not d.includes_zero


@dataclass(frozen=True, repr=False)
class Comparison:
    """What changed between two diagnoses. ``print`` it, or read its ``changes``."""

    before: str
    """The model of the first diagnosis."""
    after: str
    """The model of the second diagnosis."""
    changes: list[Change]

    @property
    def conclusion(self) -> str:
        """The changes that are larger than their errors, in one paragraph."""
        certain = [change for change in self.changes if change.certain]
        models = ""
        if self.before != self.after:
            models = f"The models differ: {self.before} before, {self.after} after. "
        if not certain:
            return models + (
                "No figure changed by more than its error: the two diagnoses agree, or there is "
                "too little data to say."
            )
        certain.sort(key=lambda change: -abs(_z(change)))
        named = [
            f"{change.figure} from {_text(change.before)} to {_text(change.after)}"
            for change in certain[:_NAMED_CHANGES]
        ]
        count = len(certain)
        what = "One figure" if count == 1 else f"{count} figures"
        errors = "its error" if count == 1 else "their errors"
        return f"{models}{what} changed by more than {errors}: {'; '.join(named)}."

    def table(self) -> Table:
        """Return every figure in a row, with a star if its change is certain."""
        rows = [
            [c.figure, _text(c.before), _text(c.after), _text(c.difference) + " *" * c.certain]
            for c in self.changes
        ]
        return Table(("figure", "before", "after", "change"), rows)

    def to_json(self) -> dict[str, Any]:
        """Return values for JSON."""
        values = {field.name: as_json(getattr(self, field.name)) for field in fields(self)}
        return {"conclusion": self.conclusion, **values}

    def __repr__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return the comparison for a terminal.

        Args:
            width: the columns of the terminal; None uses those of the present terminal.
        """
        columns = terminal_width() if width is None else width
        lines = wrap(self.conclusion, min(columns, 100))
        note = ["", _STAR_NOTE] if any(change.certain for change in self.changes) else []
        return "\n".join([*lines, "", self.table().text(columns), *note])

    def _repr_html_(self) -> str:
        note = paragraph(_STAR_NOTE) if any(change.certain for change in self.changes) else ""
        return fragment(paragraph(self.conclusion), self.table().html("cards"), note)

    def to_frame(self) -> Any:
        """Return the changes as a pandas DataFrame, one row per figure."""
        rows = [
            {
                "before": None if change.before is None else change.before.value,
                "after": None if change.after is None else change.after.value,
                **({} if change.difference is None else change.difference._asdict()),
                "certain": change.certain,
            }
            for change in self.changes
        ]
        return as_frame(rows, [change.figure for change in self.changes])


def _z(change: Change) -> float:
    difference = change.difference
    assert difference is not None
    return math.inf if difference.z is None else difference.z


def _text(estimate: Estimate | None) -> str:
    if estimate is None or math.isnan(estimate.value):
        return "–"
    return f"{estimate.value:.6g}" if estimate.stderr == 0.0 else str(estimate)


def compare_files(before: str | Path, after: str | Path) -> Comparison:
    """Compare two files that ``Diagnosis.save`` wrote.

    Raises:
        DataError: if one of the files is not a diagnosis.
        RunError: if one of the files can't be read.
    """
    return compare_json(*(_read(Path(path)) for path in (before, after)))


def _read(path: Path) -> dict[str, Any]:
    from undrop.diagnosis.report.result import FORMAT

    values = read_json(path)
    if not isinstance(values, dict) or "explicit" not in values:
        message = "is not a diagnosis: give a file that undrop diagnose --save wrote"
        raise DataError(f"{path} {message}.")
    if values.get("format") != FORMAT:
        raise DataError(
            f"{path} is a diagnosis in format {values.get('format', 1)}, but this version of undrop "
            f"reads format {FORMAT}: diagnose the model again."
        )
    return values


def compare_json(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compare two diagnoses in JSON."""
    old, new = dict(_figures(before)), dict(_figures(after))
    changes = [
        Change(name, old.get(name), new.get(name), _difference(old.get(name), new.get(name)))
        for name in dict.fromkeys([*old, *new])
    ]
    # a p that did not change needs no row
    shown = [c for c in changes if not c.figure.startswith(_P_AT) or c.before != c.after]
    return Comparison(str(before["model"]), str(after["model"]), shown)


def _figures(json: Mapping[str, Any]) -> Iterator[tuple[str, Estimate]]:
    """Yield the figures of a diagnosis that are compared, by name."""
    explicit, implicit, benefit = json["explicit"], json.get("implicit"), json.get("benefit")
    for label, part in zip(PART_LABELS, Parts._fields, strict=True):
        yield label, _estimate(explicit["parts"][part])
    yield "½E[uᵀHu] / R_drop", _estimate(explicit["quadratic_share"])
    for name, site in explicit["sites"].items():
        yield f"{_P_AT}{name}", Estimate.of(site["p"], 0.0)
        yield f"share of {name}", _estimate(site["share"])
    if implicit is not None:
        yield "trace of dropout's noise", _estimate(implicit["trace_dropout"])
        yield "traces: ξ_approx / dropout", _estimate(implicit["analytic_ratio"])
        if implicit["batch_ratio"] is not None:
            yield "traces: dropout / mini-batching", _estimate(implicit["batch_ratio"])
    if benefit is not None:
        for name, site_benefit in benefit["sites"].items():
            yield f"benefit of {name}", _estimate(site_benefit)
        yield "benefit of weight decay", _estimate(benefit["weight_decay"])


def _estimate(json: Mapping[str, float | None]) -> Estimate:
    low, high, value = json["low"], json["high"], json["value"]
    return Estimate(
        math.nan if value is None else value,
        json["stderr"],
        -math.inf if low is None else low,
        math.inf if high is None else high,
    )


def _difference(before: Estimate | None, after: Estimate | None) -> Estimate | None:
    """Return the difference of two independent figures.

    The distances from the values to the ends of their intervals add in quadrature.
    """
    if before is None or after is None:
        return None
    value = after.value - before.value
    if before.stderr is None or after.stderr is None:
        return Estimate(value, None)
    down = math.hypot(after.value - after.low, before.high - before.value)
    up = math.hypot(after.high - after.value, before.value - before.low)
    return Estimate(value, math.hypot(before.stderr, after.stderr), value - down, value + up)
