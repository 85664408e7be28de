"""undrop takes dropout apart: its explicit and its implicit effect, in any PyTorch model.

Every dropout is a site that turns an activation h into h ⊙ (1 + ε·σ·η). With u = ∂F/∂ε, the tangent
of the model's output, the explicit effect is ½E[uᵀHu] to second order and the implicit one is the
noise ∇(∂ℓ/∂ε).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undrop import errors as errors
    from undrop.diagnosis import Watcher as Watcher
    from undrop.diagnosis import bound as bound
    from undrop.diagnosis import check as check
    from undrop.diagnosis import diagnose as diagnose
    from undrop.intercept import Site as Site
    from undrop.intercept import Sites as Sites
    from undrop.intercept import register_site as register_site
    from undrop.intercept import sites as sites
    from undrop.losses import MSE as MSE
    from undrop.losses import BCEWithLogits as BCEWithLogits
    from undrop.losses import CrossEntropy as CrossEntropy
    from undrop.losses import Loss as Loss
    from undrop.objectives import L2 as L2
    from undrop.objectives import PAPER as PAPER
    from undrop.objectives import TAYLOR as TAYLOR
    from undrop.objectives import Analytic as Analytic
    from undrop.objectives import Dropout as Dropout
    from undrop.objectives import NoRegularization as NoRegularization
    from undrop.objectives import Objective as Objective
    from undrop.objectives import Step as Step
    from undrop.tuning import Tuner as Tuner
    from undrop.tuning import advise as advise

__version__ = "0.1.0"

_EXPORTS = {
    # objectives: what training minimizes
    "undrop.objectives": "Analytic Dropout L2 NoRegularization Objective Step PAPER TAYLOR",
    # losses: how the output is scored
    "undrop.losses": "BCEWithLogits CrossEntropy Loss MSE",
    # sites: where noise enters
    "undrop.intercept": "Site Sites register_site sites",
    # diagnosis: what dropout does in a model
    "undrop.diagnosis": "Watcher bound check diagnose",
    # tuning: which p, found within one run
    "undrop.tuning": "Tuner advise",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = [*_MODULE_OF, "errors"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line starts without torch."""
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value
    try:
        return importlib.import_module(f"undrop.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"undrop.{name}":
            raise
        raise AttributeError(f"module 'undrop' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
