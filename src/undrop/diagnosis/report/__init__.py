"""Presenting: tables, advice, plots, pages and comparisons of what was measured."""
