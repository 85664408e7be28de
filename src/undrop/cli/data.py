"""The corpora: list them, get them, look into them."""

from __future__ import annotations

import typer

data = typer.Typer(no_args_is_help=True, help=__doc__)


def register(app: typer.Typer) -> None:
    """Add ``undrop data``."""
    app.add_typer(data, name="data")


@data.command("list")
def list_() -> None:
    """List."""


@data.command("get")
def get_(name: str, limit_tokens: int = 0) -> None:
    """Get."""
