"""Dropouts that torch lacks, and the paper's models."""

from undrop.nn.dropout import EmbeddingDropout, LockedDropout, WeightDrop

__all__ = ["EmbeddingDropout", "LockedDropout", "WeightDrop"]
