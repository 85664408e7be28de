"""A scoreboard of today's tasks: what dropout, weight decay and the regularizers are worth."""
