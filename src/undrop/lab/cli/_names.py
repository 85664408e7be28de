"""The names that options accept, with one line about each, for lists and shell completion.

A name and its line are written once, where a model, objective, corpus or benchmark is registered::

    @MODELS.register("gpt", about="A causal transformer like GPT-2 (Radford et al. 2019)")

Importing that file would import torch, which takes seconds. :func:`registered` reads the line from the
source code instead, so undrop completes a name, or refuses a wrong one, in a fraction of a second.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

from undrop.errors import UnknownNameError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Names: TypeAlias = Mapping[str, str]
"""Names, and one line about each."""

_PACKAGE = Path(__file__).parents[2]


@cache
def registered(registry: str) -> Names:
    """Return the names in a registry, without importing what they stand for.

    This function finds the calls ``REGISTRY.register("name", …, about="line")`` in the source code. All
    arguments must be literals; a test compares the result with the registry. A name without a line gets
    an empty one.

    Args:
        registry: the variable that holds the registry, such as ``MODELS``.
    """
    names: dict[str, str] = {}
    for file in sorted(_PACKAGE.rglob("*.py")):
        code = file.read_text(encoding="utf-8")
        if f"{registry}.register(" in code:
            names |= _registered_in(code, registry)
    return names


def _registered_in(code: str, registry: str) -> dict[str, str]:
    """Return the names that a file registers, in its order, and the line about each."""
    names: dict[str, str] = {}
    for statement in ast.parse(code).body:
        for node in ast.walk(statement):
            match node:
                case ast.Call(ast.Attribute(ast.Name(variable), "register"), keys, keywords) if (
                    variable == registry
                ):
                    line = next((_literal(k.value) for k in keywords if k.arg == "about"), "")
                    names |= dict.fromkeys(filter(None, map(_literal, keys)), line)
    return names


def _literal(node: ast.expr) -> str:
    """Return the string that an expression is; empty if it is anything else."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return str(ast.literal_eval(node)) if is_text else ""


# Each of these functions returns the names in one registry.
models = partial(registered, "MODELS")
objectives = partial(registered, "OBJECTIVES")
corpora = partial(registered, "CATALOGUE")
bench_models = partial(registered, "SUBJECTS")
bench_methods = partial(registered, "METHODS")


@cache
def presets() -> Names:
    """Return the presets of ``undrop train``."""
    return {
        file.stem: tomllib.loads(file.read_text(encoding="utf-8"))["description"]
        for file in sorted((_PACKAGE / "presets").glob("*.toml"), key=lambda file: file.stem)
    }


@cache
def experiments() -> Names:
    """Return the experiments of ``undrop reproduce``, the paper's first."""
    from undrop.lab.reproduce.tables import EXPERIMENTS, experiment

    return {name: experiment(name).title for name in EXPERIMENTS}


def check_name(kind: str, name: str | None, names: Names, hint: str = "") -> None:
    """Refuse an unknown name; accept None.

    Raises:
        UnknownNameError: with the nearest name and a list of all names.
    """
    if name is not None and name not in names:
        raise UnknownNameError(kind, name, names, hint)


def check_corpus(name: str | None, data_dir: Path | None = None) -> None:
    """Refuse a name that is neither a corpus nor a folder.

    Raises:
        UnknownNameError: with the nearest name and a list of all names.
    """
    if name is None or name != Path(name).name or Path(name).is_dir():
        return
    if data_dir is None or not (data_dir / name).is_dir():
        hint = ", or give a folder with train, valid and test text files"
        check_name("corpus", name, corpora(), hint)


def completion(names: Callable[[], Names]) -> Callable[[str], list[tuple[str, str]]]:
    """Return the function with which an option or argument completes these names in the shell."""
    return lambda incomplete: [item for item in names().items() if item[0].startswith(incomplete)]


def one_of(
    kind: str,
    names: Names | Callable[[], Names],
    is_path: Callable[[str], bool] = lambda value: False,
    hint: str = "",
) -> dict[str, Any]:
    """Return the arguments of a typer option whose value is one name or several.

    The shell completes the names, and a wrong name is refused before the command runs.

    Args:
        kind: what the names stand for, in errors.
        names: the names, or a function that reads them from files.
        is_path: returns whether a value is a path; paths are not checked.
        hint: what else the option accepts, as the end of the error.
    """
    read_names = names if callable(names) else lambda: names

    def check(value: Any) -> Any:
        for name in value if isinstance(value, list | tuple) else [value]:
            if name is not None and not is_path(name):
                check_name(kind, name, read_names(), hint)
        return value

    return {"autocompletion": completion(read_names), "callback": check}
