"""Softmax cross-entropy along a tangent in closed form, with or without the output layer; FlexAttention.

Tangents are derivatives in the scalar ε, ``None`` for zero. One reverse pass differentiates both primal
values and tangents.
"""
