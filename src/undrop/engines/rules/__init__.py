"""Rules of our own for functions on which torch's forward mode is missing, wrong or slow.

A rule takes the dual numbers apart, computes the result and its tangent in ordinary differentiable
operations, and puts them together again; the reverse pass through that is ordinary too. A new rule
is one file with its RULES, named here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from undrop.engines.rules import activations, attention, linear, norms, recurrent, softmax
from undrop.engines.rules.dual import TangentField, unpacked
from undrop.intercept import Handler

__all__ = ["TANGENT_RULES", "TangentField", "unpacked"]

TANGENT_RULES: Mapping[Callable[..., Any], Handler] = {
    **recurrent.RULES,
    **attention.RULES,
    **softmax.RULES,
    **norms.RULES,
    **activations.RULES,
    **linear.RULES,
}
"""The functions that the tangent engine computes by rules of its own."""
