"""Importing undrop imports no optional package."""

import json
import subprocess
import sys

EXTRAS = ("transformers", "accelerate", "lightning", "sklearn", "ray", "tensorboard", "datasets")


def imported_by(statement: str) -> set[str]:
    """The packages that a new interpreter has loaded after a statement."""
    code = (
        f"{statement}\nimport json, sys\nprint(json.dumps([m.split('.')[0] for m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_undrop_imports_no_extra():
    statement = "import undrop, undrop.integrations, undrop.losses.model_loss"
    assert not imported_by(statement) & set(EXTRAS)
