import sys
from pathlib import Path

import pytest

from undrop.errors import DataError
from undrop.lab import corpora
from undrop.lab.corpora.catalogue import pydocs_text


def test_pydocs_paragraphs_become_lines_of_lower_case_words_and_punctuation():
    text = "The Title\n*********\n\nOne *sentence*,\non two lines.\n\n"
    lines = pydocs_text({f"topic {number}": text for number in range(3)})["train"]
    assert lines[:2] == ["the title", "one * sentence * , on two lines ."]


def test_pydocs_trains_on_topics_of_repeated_paragraphs_and_drops_rare_words():
    shared = "said often " * 20
    topics = {"whole": shared, "part": shared} | {f"t{n}": f"own {n} words" for n in range(30)}
    lines = pydocs_text(topics)
    assert lines["train"].count(shared.strip()) == 2
    assert set(lines["valid"]) == {"own <unk> words"}


def test_pydocs_splits_have_about_80_10_and_10_percent_of_the_words(cache):
    sizes = {split: len(tokens) for split, tokens in corpora.load("pydocs").splits.items()}
    total = sum(sizes.values())
    assert 90_000 < total < 180_000
    assert 0.75 < sizes["train"] / total < 0.85
    assert min(sizes["valid"], sizes["test"]) / total > 0.08


def test_pydocs_validation_and_test_share_no_paragraph_with_training(cache):
    header = corpora.load("pydocs").header
    lines = {
        split: set(Path(info.source).read_text(encoding="utf-8").splitlines())
        for split, info in header.splits.items()
    }
    # Only lines that differ in words that became <unk>, or that have a word or two, may occur twice.
    for split in ("valid", "test"):
        both = {line for line in lines[split] & lines["train"] if len(line.split()) > 5}
        assert all(corpora.UNK in line for line in both)


def test_pydocs_is_the_same_every_time(cache, tmp_path):
    first, second = corpora.load("pydocs"), corpora.load("pydocs", cache_dir=tmp_path / "other")
    assert first.header.vocabulary_sha256 == second.header.vocabulary_sha256
    for split, info in first.header.splits.items():
        assert info.sha256 == second.header.splits[split].sha256


def test_every_pydocs_word_occurs_in_training(cache):
    corpus = corpora.load("pydocs")
    assert set(corpus.train.tolist()) == set(range(corpus.vocabulary.size))


def test_a_python_without_pydoc_data_is_reported(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"this Python has no pydoc_data\.topics"):
        corpora.load("pydocs")
