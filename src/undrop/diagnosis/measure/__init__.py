"""Measure the explicit and the implicit effect of dropout, and its benefit."""
