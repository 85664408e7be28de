"""List the language models of `undrop train --model`."""

from __future__ import annotations

from undrop.lab.cli import COMMANDS, Answer, _names


@COMMANDS.register("models")
def models() -> Answer:
    """List the language models of `undrop train --model`."""
    return Answer.names(_names.models())
