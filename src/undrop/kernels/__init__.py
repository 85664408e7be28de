"""Softmax cross-entropy along a tangent, with or without the output layer, and FlexAttention.

A tangent is the derivative of a tensor in the scalar ε; a tangent of ``None`` is zero. One reverse pass
differentiates values and tangents.
"""
