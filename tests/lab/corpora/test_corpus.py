import numpy as np
import pytest

from undrop.errors import DataError, OptionError
from undrop.lab import corpora
from undrop.lab.corpora.cache import cache_folder


def test_limit_tokens_keeps_the_first_tokens_and_only_their_words(write, cache):
    corpus = corpora.load(write(), limit_tokens=4)
    assert corpus.vocabulary.decode(corpus.train) == ["the", "cat", "sat", "on"]
    assert corpus.vocabulary.words == ("the", "cat", "sat", "on", corpora.EOS, corpora.UNK)
    assert len(corpus.test) == 7
    assert corpus.vocabulary.decode(corpus.test)[1] == corpora.UNK


def test_fraction_keeps_the_first_part_and_the_whole_vocabulary(write, cache):
    whole, part = corpora.load(write()), corpora.load(write(), fraction=0.5)
    assert np.array_equal(part.train, whole.train[:7])
    assert part.vocabulary.words == whole.vocabulary.words
    assert len(part.valid) == len(whole.valid)


def test_max_vocab_makes_rare_words_unknown(write, cache):
    corpus = corpora.load(write(), max_vocab=4)
    assert corpus.vocabulary.size == 4
    assert corpus.vocabulary.decode(corpus.valid) == ["the", "cat", "<unk>", "<eos>"]


@pytest.mark.parametrize("place", ["all/ptb", "all"])
def test_data_dir_is_the_corpus_folder_or_its_parent(write, cache, place):
    write(place, suffix=".txt", **{"ptb.train": "x y\n", "ptb.valid": "x\n", "ptb.test": "y\n"})
    folder = write("all")
    assert len(corpora.load("ptb", data_dir=folder).train) == 3


def test_a_subfolder_of_data_dir_is_found_by_its_name(write, cache):
    assert corpora.load("mine", data_dir=write("all/mine").parent).name == "mine"


def test_an_unknown_corpus_lists_all_names_and_the_closest(cache):
    with pytest.raises(OptionError) as error:
        corpora.load("wikitext2")
    assert str(error.value) == (
        "unknown corpus 'wikitext2': did you mean 'wikitext-2'? There are pydocs, ptb, "
        "wikitext-2, wikitext-103, or give a folder with train, valid and test text files."
    )


def test_a_missing_corpus_says_how_to_get_it(cache):
    with pytest.raises(
        DataError, match=r"ptb is not on this machine: get it with undrop data get p"
    ):
        corpora.load("ptb", download=False)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"limit_tokens": 0}, "limit_tokens must be at least 1, got 0"),
        ({"fraction": 0.0}, r"fraction must lie in \(0, 1\], got 0.0"),
        ({"fraction": 1.5}, r"fraction must lie in \(0, 1\], got 1.5"),
    ],
)
def test_corpus_options_outside_their_range_are_refused(write, cache, option, message):
    with pytest.raises(OptionError, match=message):
        corpora.load(write(), **option)


def test_the_cache_folder_is_the_given_one_or_the_platforms_default(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDROP_CACHE", str(tmp_path / "a"))
    assert cache_folder(tmp_path / "b") == tmp_path / "b"
    assert cache_folder() == tmp_path / "a"
    monkeypatch.delenv("UNDROP_CACHE")
    assert cache_folder().name == "undrop"


def test_the_repr_of_a_corpus_shows_its_sizes(write, cache):
    assert repr(corpora.load(write())) == (
        "Corpus(small: train 15, valid 4, test 7 tokens, 7 words)"
    )
