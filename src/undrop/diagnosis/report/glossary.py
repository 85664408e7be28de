"""The symbols of a diagnosis in a line each."""

from __future__ import annotations

GLOSSARY = (
    ("site", "where the model multiplies an activation or weight h by 1 + ε·σ·η"),
    ("p", "the drop probability of a site; σ = sqrt(p/(1-p)); η is noise of mean 0, variance 1"),
    ("F, ℓ, H", "the model's output, its loss, and the Hessian of ℓ in F"),
    ("u", "the output tangent ∂F/∂ε: how the noise moves the output, to first order"),
    ("R_drop", "E ℓ(with dropout) - ℓ(without): what dropout adds to the loss"),
    ("½E[uᵀHu]", "the explicit regularizer: the part of R_drop that undrop.Analytic replaces"),
    ("curvature", "½E[Dℓ·∂²F/∂ε²]: the second-order part from the model's own curvature"),
    ("rest", "what second order misses of R_drop"),
    ("share", "a site's part of ½E[uᵀHu]: how strong its dropout is, not whether it helps"),
    (
        "benefit",
        "the validation loss after some steps without a dropout, minus that with it: positive helps",
    ),
    ("z", "the benefit in standard errors; beyond 2 its sign is fairly certain"),
    ("ξ_approx", "∇(∂ℓ/∂ε): the analytic stand-in for dropout's gradient noise"),
    ("trace", "the mean squared size of gradient noise"),
    ("±", "one standard error; in brackets the 95 % interval"),
)
"""Symbols and their meaning, in the order in which a diagnosis shows them."""
