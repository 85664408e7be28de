"""List the objectives of `undrop train --objective`."""

from __future__ import annotations

from undrop.lab.cli import COMMANDS, _names
from undrop.lab.cli._options import Json
from undrop.lab.cli._output import print_names


@COMMANDS.register("objectives")
def objectives(json: Json = False) -> None:
    """List the objectives of `undrop train --objective`."""
    print_names(_names.objectives(), json=json)
