"""Imports go one way, and ``import undrop`` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "undrop"
ORDER = (
    *(
        "errors",
        "registry",
        "options",
        "torch_compat",
        "autodiff",
        "files",
        "report",
        "tensor_files",
        "rng_snapshot",
        "generators",
        "noise",
    ),
    *("kernels", "intercept", "losses", "engines", "objectives", "nn", "diagnosis", "tuning"),
    *("integrations", "lab"),
)
"""From the bottom up: a package may import those before it, never those after it."""


def part(path):
    """The package that a file belongs to; None for ``undrop/__init__.py``."""
    first = path.relative_to(SOURCE).parts[0]
    name = first.removesuffix(".py")
    return None if name in ("__init__", "__main__") else name


def imported(path):
    """The packages of undrop that a file imports, anywhere in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            whole = node.module == "undrop"
            names = [f"undrop.{a.name}" for a in node.names] if whole else [node.module]
        else:
            continue
        for name in names:
            steps = name.split(".")
            if steps[0] == "undrop" and len(steps) > 1:
                yield steps[1]


def test_every_package_is_in_the_import_order():
    assert {p for p in map(part, SOURCE.rglob("*.py")) if p} <= set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_lower_package_never_imports_a_higher_one(name):
    """A name imported from ``undrop`` itself counts as ``undrop``; only the top packages import it."""
    allowed = set(ORDER[: ORDER.index(name) + 1])
    wrong = [
        f"{path.relative_to(SOURCE)} imports {other}"
        for path in sorted(SOURCE.rglob("*.py"))
        if part(path) == name
        for other in imported(path)
        if other in ORDER and other not in allowed
    ]
    assert wrong == []


def run(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_importing_undrop_takes_little_beyond_torch():
    code = (
        "import time, torch; start = time.process_time(); import undrop; "
        "print(time.process_time() - start)"
    )
    assert any(
        float(run(code)[0]) <= 0.3 for _ in range(3)
    )  # once is enough: others use the machine


def test_importing_undrop_brings_none_of_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    wanted = {
        requirement.split(">")[0].split("[")[0].strip().replace("-", "_")
        for group in ("data", "plot", "stats", "tensorboard", "transformers", "lightning", "ray")
        for requirement in extras[group]
    } | {"sklearn", "typer", "rich", "pydantic", "safetensors"}
    loaded = set(run("import sys, undrop; print(*{name.split('.')[0] for name in sys.modules})"))
    assert wanted & loaded == set()


@pytest.mark.parametrize("engine", ["auto", "tangent"])
def test_a_step_does_not_load_torchs_compiler(engine):
    step = (
        "import sys, torch, undrop\n"
        "net = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(3, 2))\n"
        f"step = undrop.Analytic(engine='{engine}')(net, torch.randn(2, 3), torch.zeros(2).long())\n"
        "step.backward()\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert run(step) == ["False"]


def test_no_module_imports_a_module_that_windows_lacks():
    """Only inside functions, where undrop can raise an error on a machine without it."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not {"fcntl", "resource", "pwd", "grp", "termios"} & set(names), path
