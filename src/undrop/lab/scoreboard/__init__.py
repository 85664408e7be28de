"""A scoreboard: dropout, weight decay and the regularizers on a few of today's tasks."""
