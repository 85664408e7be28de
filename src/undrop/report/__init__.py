"""How results and progress are shown: tables, HTML pages, figures, JSON, and one progress bar.

matplotlib and rich are imported when something is drawn, never by ``import undrop.report``.
"""

from undrop.report.plain import as_json
from undrop.report.progress import Bar, Progress, duration
from undrop.report.tables import Table, terminal_width, wrap

__all__ = ["Bar", "Progress", "Table", "as_json", "duration", "terminal_width", "wrap"]
