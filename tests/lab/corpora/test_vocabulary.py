import numpy as np
import pytest

from undrop.errors import DataError, OptionError
from undrop.lab.corpora import EOS, UNK, Vocabulary

COUNTS = {"b": 2, "a": 5, EOS: 4, "c": 2, "d": 1, "e": 1}


def test_the_most_frequent_word_comes_first_and_ties_in_order_of_occurrence():
    assert Vocabulary.from_counts(COUNTS).words == ("a", EOS, "b", "c", "d", "e")


def test_unk_is_added_last_and_only_if_another_split_needs_it():
    assert UNK not in Vocabulary.from_counts(COUNTS, others={"a", "e"})
    assert Vocabulary.from_counts(COUNTS, others={"new"}).words[-1] == UNK


def test_an_unk_in_the_training_split_is_an_ordinary_word():
    assert Vocabulary.from_counts({**COUNTS, UNK: 3}, others={"new"}).words[:3] == ("a", EOS, UNK)


def test_max_vocab_turns_the_rarest_words_into_unk_and_ranks_it_by_their_count():
    vocabulary = Vocabulary.from_counts(COUNTS, max_vocab=4)
    assert vocabulary.words == ("a", EOS, UNK, "b")  # <unk> stands for c, d and e: 4, after <eos>
    assert vocabulary.encode("e c zzz").tolist() == [2, 2, 2]


def test_max_vocab_keeps_eos_whatever_its_rank():
    assert Vocabulary.from_counts({"a": 9, "b": 8, "c": 7, EOS: 1}, max_vocab=3).words == (
        UNK,
        "a",
        EOS,
    )


def test_a_max_vocab_larger_than_the_vocabulary_changes_nothing():
    assert Vocabulary.from_counts(COUNTS, max_vocab=6).words == Vocabulary.from_counts(COUNTS).words


def test_an_added_unk_counts_against_max_vocab():
    vocabulary = Vocabulary.from_counts(COUNTS, max_vocab=6, others={"new"})
    assert vocabulary.words == ("a", EOS, "b", "c", "d", UNK)  # <unk> stands for e in training


def test_a_max_vocab_too_small_for_a_word_is_refused():
    with pytest.raises(OptionError, match="max_vocab must be at least 3, got 2"):
        Vocabulary.from_counts(COUNTS, max_vocab=2)


def test_decoding_undoes_encoding():
    vocabulary = Vocabulary.from_counts(COUNTS)
    assert vocabulary.decode(vocabulary.encode("a b <eos>")) == ["a", "b", EOS]
    assert vocabulary.decode(np.array([0, 2], dtype=np.uint16)) == ["a", "b"]


def test_an_unknown_word_without_unk_is_an_error_that_names_it():
    with pytest.raises(DataError, match=r"the word 'new' is not in the vocabulary"):
        Vocabulary.from_counts(COUNTS).encode("new")


def test_the_vocabulary_checksum_depends_on_the_order_of_words():
    assert Vocabulary("ab").sha256 == Vocabulary(["a", "b"]).sha256
    assert Vocabulary("ab").sha256 != Vocabulary("ba").sha256
