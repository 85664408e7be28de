"""The counts of the real corpora, where they are on this machine."""

import numpy as np
import pytest

from undrop.lab import corpora

WORDS = {  # different words of each split
    "ptb": {"train": 10_000, "valid": 6_022, "test": 6_049},
    "wikitext-2": {"train": 33_278, "valid": 13_777, "test": 14_143},
}


@pytest.mark.parametrize("name", list(WORDS))
def test_token_and_word_counts_match_the_catalogue(real_data, cache, name):
    corpus = corpora.load(name, data_dir=real_data)
    named = corpora.CATALOGUE[name]
    assert {split: len(tokens) for split, tokens in corpus.splits.items()} == named.tokens
    assert corpus.vocabulary.size == named.vocabulary
    assert {s: np.unique(tokens).size for s, tokens in corpus.splits.items()} == WORDS[name]
    for split, checksum in named.sha256.items():
        assert corpus.header.splits[split].source_sha256 == checksum


def test_ptb_has_the_known_counts_without_line_ends(real_data, cache):
    corpus = corpora.load("ptb", data_dir=real_data)
    eos = corpus.vocabulary.index[corpora.EOS]
    assert np.count_nonzero(corpus.train != eos) == 887_521


def test_ptb_can_be_cut_to_a_tiny_corpus(real_data, cache):
    corpus = corpora.load("ptb", data_dir=real_data, limit_tokens=60_000, max_vocab=2_000)
    assert (len(corpus.train), len(corpus.valid)) == (60_000, 73_760)
    assert corpus.vocabulary.size == 2_000
    assert np.unique(corpus.train).size == 2_000
