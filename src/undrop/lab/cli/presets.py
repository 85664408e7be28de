"""List the presets of `undrop train --preset`."""

from __future__ import annotations

from undrop.lab.cli import COMMANDS, Answer, _names


@COMMANDS.register("presets")
def presets() -> Answer:
    """List the presets of `undrop train --preset`; your own .toml file works too."""
    return Answer.names(_names.presets())
