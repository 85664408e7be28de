"""Results: the records of a plan, by cell and seed."""

from __future__ import annotations

from undrop.lab.reproduce.measures import MEASURES, REFERENCE
from undrop.lab.reproduce.plan import Plan
from undrop.lab.reproduce.records import Record, Records
from undrop.lab.reproduce.statistics import Interval, geometric

__all__ = ["Results"]


class Results:
    """The records of a plan's cells.

    Args:
        plan: the cells.
        records: the finished runs.
    """

    def __init__(self, plan: Plan, records: Records) -> None:
        self.plan = plan
        self.records = records
        self._found = {name: cell.found(records) for name, cell in plan.cells.items()}

    def of(self, setting: str, method: str) -> dict[int, Record]:
        """Return the records of a cell by seed."""
        return self._found.get(f"{setting}:{method}", {})

    def values(self, measure: str, cell: str) -> dict[int, float]:
        """Return a measure of a cell by seed; one that compares, for the reference's seeds only."""
        records = self._found.get(cell, {})
        found = MEASURES[measure]
        if not found.compares:
            return {seed: found.of(record, record) for seed, record in records.items()}
        references = self._found.get(f"{cell.partition(':')[0]}:{REFERENCE}", {})
        return {
            seed: found.of(record, references[seed])
            for seed, record in records.items()
            if seed in references
        }

    def interval(self, measure: str, cell: str) -> Interval | None:
        """Return the mean of a measure over a cell's seeds; None if it has no record."""
        values = list(self.values(measure, cell).values())
        return geometric(values) if values else None
