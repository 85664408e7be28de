"""Corpora: text as memory-mapped tokens with a vocabulary, from your disk or from the internet.

::

    from undrop.lab import corpora

    corpus = corpora.load("ptb", data_dir="data", limit_tokens=60_000, max_vocab=2_000)
    corpus.train, corpus.vocabulary.decode(corpus.train[:5])

Windows for training are in :mod:`undrop.lab.corpora.batching`, the only module here that needs torch.
"""

from __future__ import annotations

from undrop.lab.corpora.catalogue import CATALOGUE
from undrop.lab.corpora.corpus import Corpus, load
from undrop.lab.corpora.text import EOS, SPLITS, UNK, Vocabulary

__all__ = ["CATALOGUE", "EOS", "SPLITS", "UNK", "Corpus", "Vocabulary", "load"]
