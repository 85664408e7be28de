"""Present what was measured: tables, advice, plots, pages and comparisons."""
