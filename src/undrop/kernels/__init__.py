"""Softmax cross-entropy along a tangent, with or without the output layer, and FlexAttention.

A tangent is the derivative with respect to the scalar ε; ``None`` means zero. One reverse pass
differentiates values and tangents.
"""
