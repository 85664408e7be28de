"""The benchmarks, which no other test runs, import only names that exist."""

import ast
import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def imports(file):
    """The modules of undrop and the names that a file imports from them."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("undrop"):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("*.py")), ids=lambda file: file.stem)
def test_a_benchmark_imports_only_names_that_exist(file):
    for module, name in imports(file):
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")
