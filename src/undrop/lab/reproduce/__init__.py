"""The paper's experiments as data, at several scales, with their runs, statistics and report.

>>> from undrop.lab.reproduce.tables import experiment
>>> experiment("averaging-noise").paper
'Figure 1'

This file imports nothing, because the command line lists the experiments without importing torch.
"""
