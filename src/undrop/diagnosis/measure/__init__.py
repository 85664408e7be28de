"""Measuring: the explicit and implicit effect of dropout, and its benefit."""
