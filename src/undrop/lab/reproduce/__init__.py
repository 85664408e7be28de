"""Defines the paper's experiments at several scales, runs them and reports the results.

>>> from undrop.lab.reproduce.tables import experiment
>>> experiment("averaging-noise").paper
'Figure 1'

This file imports nothing, because the command line lists the experiments without importing torch.
"""
