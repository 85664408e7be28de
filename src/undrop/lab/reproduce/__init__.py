"""The paper's experiments as data, at several scales, with statistics, verdicts and a report.

>>> from undrop.lab.reproduce.tables import experiment
>>> experiment("averaging-noise").paper
'Figure 1'

Nothing is imported here: the command line lists experiments without torch.
"""
