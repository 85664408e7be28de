"""List the presets of `undrop train --preset`."""

from __future__ import annotations

from undrop.lab.cli import COMMANDS, _names
from undrop.lab.cli._options import Json
from undrop.lab.cli._output import print_names


@COMMANDS.register("presets")
def presets(json: Json = False) -> None:
    """List the presets of `undrop train --preset`; your own .toml file works too."""
    print_names(_names.presets(), json=json)
