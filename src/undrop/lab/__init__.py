"""The workbench: corpora, models, training, experiments and the command line, on top of the library."""
