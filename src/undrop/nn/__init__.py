"""Dropouts that torch lacks, and the models to use them in.

Language models read windows of text, time first, and carry a state from window to window:
``output, state = model(tokens, state)``.
"""

from undrop.nn.adaptive import AdaptiveEmbedding, AdaptiveHead
from undrop.nn.awd_lstm import AWDLSTM
from undrop.nn.convnet import ConvNet
from undrop.nn.dropout import EmbeddingDropout, LockedDropout, WeightDrop
from undrop.nn.gpt import GPT
from undrop.nn.heads import LinearHead
from undrop.nn.language import LanguageModel
from undrop.nn.mlp import MLP
from undrop.nn.qrnn import QRNN
from undrop.nn.state import State, detach
from undrop.nn.transformer_xl import TransformerXL

__all__ = [
    "AWDLSTM",
    "GPT",
    "MLP",
    "QRNN",
    "AdaptiveEmbedding",
    "AdaptiveHead",
    "ConvNet",
    "EmbeddingDropout",
    "LanguageModel",
    "LinearHead",
    "LockedDropout",
    "State",
    "TransformerXL",
    "WeightDrop",
    "detach",
]
