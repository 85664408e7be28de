"""The names that options take, read from the package's files without importing torch.

A wrong name is then refused, and a name completed in a shell, in a fraction of a second. A test
compares the names with the registries that the commands use.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from undrop.errors import UnknownNameError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Names = Mapping[str, str]
"""Names, and one line about each."""

_PACKAGE = Path(__file__).parents[2]
_CLASS = re.compile(r'^(?:class|def) (\w+).*?:\n    """(.+?)(?:"""|$)', re.MULTILINE)


@cache
def _source(*parts: str) -> str:
    """The text of a file, or of all files in a folder."""
    path = _PACKAGE.joinpath(*parts)
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@cache
def presets() -> Names:
    """Return the presets of ``undrop train``."""
    files = {file.stem: file for file in (_PACKAGE / "presets").glob("*.toml")}
    return {
        name: tomllib.loads(file.read_text(encoding="utf-8"))["description"]
        for name, file in sorted(files.items())
    }


@cache
def corpora() -> Names:
    """Return the named corpora."""
    entries = r'Entry\(\s*name="([^"]+)",\s*about="([^"]+)"'
    return dict(re.findall(entries, _source("lab", "corpora", "catalogue.py")))


@cache
def experiments() -> Names:
    """Return the experiments of ``undrop reproduce``, in the paper's order."""
    from undrop.lab.reproduce.tables import EXPERIMENTS, experiment

    return {name: experiment(name).title for name in EXPERIMENTS}


def _registered(table: str, *places: tuple[str, ...]) -> Names:
    """What a table registers, by a decorator or by ``TABLE.register("name")(partial(Class, …))``.

    The line about an entry is the first line of the docstring of what it names, and its options.
    """
    text = "\n".join(_source(*place) for place in places)
    lines = dict(_CLASS.findall(text))
    what = r"(?:\n(?:class|def) (\w+)|\((?:partial\()?(?:\w+\.)?(\w+)((?:,\s*\w+=[^,()]+)*)\))"
    found = re.findall(rf'\b{table}\.register\("([^"]+)"\){what}', text)
    names: dict[str, str] = {}
    first: dict[str, str] = {}
    for name, decorated, called, options in found:
        same = first.setdefault(decorated or called, name)
        names[name] = _line(lines.get(decorated or called, ""), options, name, same)
    return names


def _line(text: str, options: str, name: str, same: str) -> str:
    chosen = options.replace('"', "").strip(", ").replace(", ", " and ")
    if name != same:  # a variant of an entry before it
        return f"Like {same}, with {chosen}"
    plain = text.rstrip(".").replace("``", "`")
    return f"{plain} ({chosen})" if chosen else plain


_COMPONENTS = ("lab", "train", "components.py")

models = cache(partial(_registered, "MODELS", _COMPONENTS, ("lab", "models")))
"""Return the language models."""
objectives = cache(partial(_registered, "OBJECTIVES", _COMPONENTS, ("objectives",)))
"""Return the objectives."""
bench_subjects = cache(partial(_registered, "SUBJECTS", ("lab", "bench.py")))
"""Return the models that ``undrop bench`` times."""
bench_methods = cache(partial(_registered, "METHODS", ("lab", "bench.py")))
"""Return the methods that ``undrop bench`` times."""


def check_name(kind: str, name: str | None, names: Names, hint: str = "") -> None:
    """Refuse an unknown name; None is fine.

    Raises:
        UnknownNameError: with the nearest name and a list of all names.
    """
    if name is not None and name not in names:
        raise UnknownNameError(kind, name, names, hint)


def check_corpus(name: str | None, data_dir: Path | None = None) -> None:
    """Refuse what is neither the name of a corpus nor a path.

    Raises:
        UnknownNameError: with the nearest name and a list of all names.
    """
    if name is None or name != Path(name).name or Path(name).is_dir():
        return
    if data_dir is None or not (data_dir / name).is_dir():
        hint = ", or give a folder with train, valid and test text files"
        check_name("corpus", name, corpora(), hint)


def named(
    kind: str,
    names: Callable[[], Names],
    unless: Callable[[str], bool] | None = None,
    hint: str = "",
) -> dict[str, Any]:
    """Return settings of a typer option whose value is a name, or several.

    In a shell the name completes; a wrong one is refused before anything is imported.

    Args:
        kind: what the name names, for errors.
        names: returns the names.
        unless: whether a value is something else, such as a path, and not checked here.
        hint: what else is accepted, as the end of a sentence.
    """

    def complete(incomplete: str) -> list[tuple[str, str]]:
        return [item for item in names().items() if item[0].startswith(incomplete)]

    def check(value: Any) -> Any:
        for name in value if isinstance(value, list | tuple) else [value]:
            if unless is None or name is None or not unless(name):
                check_name(kind, name, names(), hint)
        return value

    return {"autocompletion": complete, "callback": check}
