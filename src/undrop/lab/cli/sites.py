"""List every dropout of a model: where it is, its p and its mask."""

from __future__ import annotations

from undrop.lab.cli import COMMANDS, Answer
from undrop.lab.cli._options import SourceOptions
from undrop.report import Table


@COMMANDS.register("sites")
def list_sites(options: SourceOptions) -> Answer:
    """Run the model once and list the dropouts that it uses."""
    source = options.open(1)
    from undrop.diagnosis.measure.model import collect
    from undrop.intercept import sites
    from undrop.intercept.site import UNACCOUNTED

    with source.explain_user_errors():
        ((inputs, _),) = collect(source.batches, 1)
        listing = sites(source.model, inputs)
    headings, *rows = listing.table()
    parts: list[Table | str] = [Table(headings, rows, numbers={"p"})]
    if listing.unaccounted:
        headings, *rows = listing.unaccounted_table()
        parts += [f"\n{UNACCOUNTED}", Table(headings, rows, numbers={"calls"})]
    return Answer({"sites": listing, "unaccounted": listing.unaccounted}, *parts)
