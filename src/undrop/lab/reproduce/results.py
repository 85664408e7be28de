"""What came out: the records of a plan, cell by cell and seed by seed."""

from __future__ import annotations

from undrop.lab.reproduce.measures import REFERENCE, measure_named
from undrop.lab.reproduce.plan import Plan
from undrop.lab.reproduce.records import Record, Records
from undrop.lab.reproduce.statistics import Interval, geometric

__all__ = ["Results"]


class Results:
    """The records that a plan's cells have.

    Args:
        plan: which cells there are.
        records: what has been run.
    """

    def __init__(self, plan: Plan, records: Records) -> None:
        self.plan = plan
        self.records = records
        self._found = {name: cell.found(records) for name, cell in plan.cells.items()}

    def of(self, setting: str, method: str) -> dict[int, Record]:
        """The records of a cell by seed."""
        return self._found[f"{setting}:{method}"]

    def values(self, measure: str, cell: str) -> dict[int, float]:
        """A measure of a cell by seed, where the reference has that seed too."""
        records = self._found[cell]
        references = self._found.get(f"{cell.partition(':')[0]}:{REFERENCE}", {})
        of = measure_named(measure).of
        return {
            seed: of(record, references[seed])
            for seed, record in records.items()
            if seed in references
        }

    def interval(self, measure: str, cell: str) -> Interval | None:
        """A measure of a cell over its seeds; None if it has no record."""
        values = list(self.values(measure, cell).values())
        return geometric(values) if values else None
