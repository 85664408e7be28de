"""List the language models of `undrop train --model`."""

from __future__ import annotations

from undrop.lab.cli import COMMANDS, _names
from undrop.lab.cli._options import Json
from undrop.lab.cli._output import print_names


@COMMANDS.register("models")
def models(json: Json = False) -> None:
    """List the language models of `undrop train --model`."""
    print_names(_names.models(), json=json)
