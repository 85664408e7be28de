"""Models for the experiments: language models, and small classifiers.

A language model reads windows of text, time first, and carries a state from window to window:
``output, state = model(tokens, state)``.
"""

from undrop.lab.models.classifiers import MLP, ConvNet
from undrop.lab.models.gpt import GPT
from undrop.lab.models.language import MODELS, LanguageModel, LinearHead, State, detach
from undrop.lab.models.recurrent import AWDLSTM, QRNN
from undrop.lab.models.transformer_xl import TransformerXL

__all__ = [
    "AWDLSTM",
    "GPT",
    "MODELS",
    "MLP",
    "QRNN",
    "ConvNet",
    "LanguageModel",
    "LinearHead",
    "State",
    "TransformerXL",
    "detach",
]
