"""Dropout layers that torch lacks, and the adaptive softmax."""

from undrop.kernels.flex import flex_attention
from undrop.nn.adaptive import AdaptiveEmbedding, AdaptiveHead
from undrop.nn.dropout import EmbeddingDropout, LockedDropout, WeightDrop

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveHead",
    "EmbeddingDropout",
    "LockedDropout",
    "WeightDrop",
    "flex_attention",
]
