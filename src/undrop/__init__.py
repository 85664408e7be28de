"""undrop takes dropout apart: its explicit and its implicit effect, in any PyTorch model.

Every dropout is a site that turns an activation h into h ⊙ (1 + ε·σ·η); with u = ∂F/∂ε, the tangent
of the model's output, the explicit effect is E[uᵀHu] and the implicit one the noise ∇(∂ℓ/∂ε).
"""

from undrop import errors
from undrop.diagnose import Watcher, bound, check, diagnose
from undrop.losses import MSE, BCEWithLogits, CrossEntropy, Loss
from undrop.objectives import (
    L2,
    PAPER,
    TAYLOR,
    Analytic,
    Dropout,
    NoRegularization,
    Objective,
    Step,
)
from undrop.sites import Site, Sites, sites

__version__ = "0.1.0"

__all__ = [
    # objectives: what training minimises
    "Analytic",
    "Dropout",
    "L2",
    "NoRegularization",
    "Objective",
    "Step",
    "PAPER",
    "TAYLOR",
    # losses: what the output tangent becomes
    "BCEWithLogits",
    "CrossEntropy",
    "Loss",
    "MSE",
    # sites: where noise enters
    "Site",
    "Sites",
    "sites",
    # diagnose: what dropout does in a model
    "Watcher",
    "bound",
    "check",
    "diagnose",
    "errors",
]
