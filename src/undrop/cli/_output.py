"""What commands print: JSON for programs, tables for people."""

from __future__ import annotations

import json
from typing import Any

import typer

__all__ = ["print_json"]


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout, with nothing around it that a program would trip over."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
