"""The paper's experiments as data, run at three scales, with statistics, verdicts and a report.

>>> from undrop.lab import reproduce
>>> reproduce.experiment("averaging-noise").paper
'Figure 1'
"""

from __future__ import annotations

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

__all__ = [
    "EXPERIMENTS",
    "SCALES",
    "Campaign",
    "Listener",
    "Plan",
    "Record",
    "Records",
    "Status",
    "executor_named",
    "experiment",
]
