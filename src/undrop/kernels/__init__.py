"""Hand-written fast paths: pure functions of tensors and of their tangents along ε.

A tangent kernel takes primal tensors and their derivatives in the scalar ε (``None`` for zero) and
returns primal outputs and tangents; one plain reverse pass differentiates both.
"""
