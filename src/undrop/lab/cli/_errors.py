"""What an error looks like from the shell: one sentence, an exit code, no traceback."""

from __future__ import annotations

import os
import sys
import traceback

import typer

from undrop.errors import StoppedError, UndropError

__all__ = ["BAD_INPUT", "INTERRUPTED", "report"]

BAD_INPUT = 2
"""The exit code for everything that the person at the shell can put right."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

# The base of all that typer raises about a command line, which not every version gives a name.
_USAGE_ERROR: type[BaseException] = typer.BadParameter.__mro__[2]


def report(error: BaseException, *, debug: bool) -> int:
    """Say what went wrong on stderr and return the exit code; a bug is raised again.

    Args:
        error: what the command raised.
        debug: whether to show the traceback as well.
    """
    if isinstance(error, BrokenPipeError):  # the reader (`| head`) has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(error, StoppedError):  # what was asked for has happened: no error
        typer.echo(str(error), err=True)
        return INTERRUPTED
    sentence = _sentence(error)
    if sentence is None:
        raise error
    if debug:
        traceback.print_exception(error)
    if sentence:
        plain = False if os.environ.get("NO_COLOR") else None  # None: as it fits what stderr is
        typer.echo(
            f"{typer.style('error:', fg='red', bold=True)} {sentence}", err=True, color=plain
        )
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else BAD_INPUT


def _sentence(error: BaseException) -> str | None:
    """One sentence for the error; empty if it was said already, None for a bug."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "interrupted."
    if isinstance(error, _USAGE_ERROR):
        return _usage_sentence(error)
    if isinstance(error, UndropError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" {error.filename}" if error.filename is not None else ""
        return f"the system refused{where}: {error.strerror.lower()}."
    return None


def _usage_sentence(error: BaseException) -> str:
    message: str = error.format_message()  # type: ignore[attr-defined]
    if not message or type(error).__name__ == "NoArgsIsHelpError":
        return ""  # the help was printed instead
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "undrop"
    stop = "" if message[-1] in ".?!" else "."
    return f"{message}{stop} See `{path} --help`."
