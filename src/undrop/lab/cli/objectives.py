"""List the objectives of `undrop train --objective`."""

from __future__ import annotations

from undrop.lab.cli import COMMANDS, Answer, _names


@COMMANDS.register("objectives")
def objectives() -> Answer:
    """List the objectives of `undrop train --objective`."""
    return Answer.names(_names.objectives())
