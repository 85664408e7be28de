"""Show results and progress: tables, HTML pages, figures, JSON and progress bars.

A function that draws imports matplotlib or rich; ``import undrop.report`` imports neither.
"""

from undrop.report.plain import as_json
from undrop.report.progress import Bar, Progress, duration
from undrop.report.tables import Table, terminal_width, wrap

__all__ = ["Bar", "Progress", "Table", "as_json", "duration", "terminal_width", "wrap"]
