"""How the output tangent u = ∂F/∂ε is had. An engine is one file here and one entry in ENGINES."""

from collections.abc import Callable

from undrop.engines.antithetic import Antithetic
from undrop.engines.auto import Auto
from undrop.engines.base import Engine, Evaluation, Request, Weights
from undrop.engines.draw import MASKS, Draw, ScaledNoise, ZeroLeaves
from undrop.engines.exact import Exact
from undrop.engines.reverse import Reverse
from undrop.engines.tangent import Tangent
from undrop.errors import OptionError

__all__ = [
    "ENGINES",
    "MASKS",
    "Antithetic",
    "Auto",
    "Draw",
    "Engine",
    "Evaluation",
    "Exact",
    "ZeroLeaves",
    "ScaledNoise",
    "Request",
    "Reverse",
    "Tangent",
    "Weights",
    "engine_named",
]

ENGINES: dict[str, Callable[[], Engine]] = {
    engine.name: engine for engine in (Auto, Tangent, Antithetic, Reverse, Exact)
}
"""Engines by name."""


def engine_named(name: str) -> Engine:
    """The engine of that name.

    Raises:
        OptionError: listing the names there are.
    """
    if name not in ENGINES:
        raise OptionError(f"there is no engine {name!r}: use one of {', '.join(ENGINES)}.")
    return ENGINES[name]()
