"""The scoreboard: dropout, weight decay and undrop's regularizers on seven small tasks."""
