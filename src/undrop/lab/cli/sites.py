"""List every dropout of a model: where it is, its p and its mask."""

from __future__ import annotations

from undrop.lab.cli import COMMANDS
from undrop.lab.cli._options import Json, SourceOptions
from undrop.lab.cli._output import print_json, print_table


@COMMANDS.register("sites")
def list_sites(
    options: SourceOptions,
    json: Json = False,
) -> None:
    """Run the model once and list the dropouts that it uses."""
    source = options.open(1)
    from undrop.diagnosis.measure.model import collect
    from undrop.intercept import sites
    from undrop.intercept.site import UNACCOUNTED

    with source.one_sentence():
        found = sites(source.model, collect(source.batches, 1)[0].inputs)
    if json:
        print_json({"sites": found, "unaccounted": found.unaccounted})
        return
    head, *rows = found.table()
    print_table(head, rows, numbers={"p"})
    if found.unaccounted:
        print(f"\n{UNACCOUNTED}")
        head, *rows = found.unaccounted_table()
        print_table(head, rows, numbers={"calls"})
