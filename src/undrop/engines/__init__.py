"""Ways to compute the output tangent u = ∂F/∂ε. Register a new engine with ``@ENGINES.register``."""

from undrop.engines.antithetic import Antithetic
from undrop.engines.auto import Auto
from undrop.engines.base import ENGINES, Engine, Evaluation, Request, WeightedParts, as_engine
from undrop.engines.draw import MASKS, Draw, ScaledNoise, ZeroLeaves, dropout_masks
from undrop.engines.reverse import Exact, Reverse
from undrop.engines.tangent import Tangent

__all__ = [
    "ENGINES",
    "MASKS",
    "Antithetic",
    "Auto",
    "Draw",
    "Engine",
    "Evaluation",
    "Exact",
    "Request",
    "Reverse",
    "ScaledNoise",
    "Tangent",
    "WeightedParts",
    "ZeroLeaves",
    "as_engine",
    "dropout_masks",
]
