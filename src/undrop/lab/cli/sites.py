"""List every dropout of a model: where it is, its p and its mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from undrop.lab.cli import COMMANDS, Answer
from undrop.lab.cli._options import SourceOptions

if TYPE_CHECKING:
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
    parts: list[Table | str] = [listing.table()]
    if listing.unaccounted:
        parts += [f"\n{UNACCOUNTED}", listing.unaccounted_table()]
    return Answer({"sites": listing, "unaccounted": listing.unaccounted}, *parts)
