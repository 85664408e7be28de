"""The paper's experiments as data, at several scales, with statistics, verdicts and a report.

>>> from undrop.lab import reproduce
>>> reproduce.experiment("averaging-noise").paper
'Figure 1'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undrop.lab.reproduce.campaign import Campaign as Campaign
    from undrop.lab.reproduce.campaign import Listener as Listener
    from undrop.lab.reproduce.campaign import Status as Status
    from undrop.lab.reproduce.executors import executor_named as executor_named
    from undrop.lab.reproduce.plan import Plan as Plan
    from undrop.lab.reproduce.records import Record as Record
    from undrop.lab.reproduce.records import Records as Records
    from undrop.lab.reproduce.tables import EXPERIMENTS as EXPERIMENTS
    from undrop.lab.reproduce.tables import SCALES as SCALES
    from undrop.lab.reproduce.tables import experiment as experiment

_HOME = {
    **dict.fromkeys(("Campaign", "Listener", "Status"), "campaign"),
    **dict.fromkeys(("EXPERIMENTS", "SCALES", "experiment"), "tables"),
    **dict.fromkeys(("Record", "Records"), "records"),
    "Plan": "plan",
    "executor_named": "executors",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that the command line lists experiments without torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
