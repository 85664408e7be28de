import hashlib
import json
import os
import signal
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from undrop.errors import DataError
from undrop.lab import corpora
from undrop.lab.corpora import text
from undrop.lab.corpora.cache import publish
from undrop.lab.corpora.corpus import damaged_files


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_tokens_decode_to_the_text(write, cache):
    corpus = corpora.load(write())
    assert " ".join(corpus.vocabulary.decode(corpus.train)) == (
        "the cat sat on the mat <eos> <eos> the dog sat on the cat <eos>"
    )
    assert " ".join(corpus.vocabulary.decode(corpus.valid)) == "the cat sat <eos>"


def test_the_header_has_counts_and_checksums(write, cache):
    folder = write()
    corpus = corpora.load(folder)
    header = json.loads((corpus.folder / "header.json").read_text())
    train = header["splits"]["train"]
    assert (header["name"], header["dtype"], header["vocabulary"]) == ("small", "uint16", 7)
    assert header["vocabulary_sha256"] == corpus.vocabulary.sha256
    assert train["tokens"] == 15
    encoded, source = corpus.folder / "train.bin", folder / "train.txt"
    assert train["sha256"] == hashlib.sha256(encoded.read_bytes()).hexdigest()
    assert train["source_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert train["source_bytes"] == source.stat().st_size


def test_tokens_take_two_bytes_for_small_vocabularies_and_four_for_large_ones(write, cache):
    words = [f"w{number}" for number in range(1 << 16)]
    small = corpora.load(write("two", train=" ".join(words[:-2])))
    large = corpora.load(write("four", train=" ".join(words[:-1])))
    assert (small.vocabulary.size, large.vocabulary.size) == (65_536, 65_537)  # <eos>, <unk>
    assert (small.train.dtype, large.train.dtype) == (np.uint16, np.int32)
    assert small.vocabulary.decode(small.train[-2:]) == [words[-3], corpora.EOS]
    assert large.vocabulary.decode(large.train[-2:]) == [words[-2], corpora.EOS]


def test_an_encoded_corpus_is_not_encoded_again(write, cache, monkeypatch):
    folder = write()
    first = corpora.load(folder)
    monkeypatch.setattr("undrop.lab.corpora.corpus.read_words", None)
    assert np.array_equal(corpora.load(folder).train, first.train)


def test_many_threads_can_load_a_corpus_at_once(write, cache):
    folder = write(train="some words and an end\n" * 5_000)
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(corpora.load, [folder] * 16))
    assert all(np.array_equal(corpus.train, loaded[0].train) for corpus in loaded)
    assert names(cache / "encoded") == [loaded[0].folder.name]


def test_a_changed_text_is_encoded_again(write, cache):
    first = corpora.load(write())
    second = corpora.load(write(train="only these words here\n"))
    assert first.folder != second.folder
    assert len(second.train) == 5
    assert len(first.train) == 15  # what was opened before stays what it was


@pytest.mark.parametrize("name", ["train.bin", "header.json", "vocabulary.txt"])
def test_an_encoded_file_that_is_cut_short_or_missing_is_encoded_again(write, cache, name):
    folder = write()
    corpus = corpora.load(folder)
    if name == "vocabulary.txt":
        (corpus.folder / name).unlink()
    else:
        (corpus.folder / name).write_bytes((corpus.folder / name).read_bytes()[:-1])
    again = corpora.load(folder)
    assert again.folder == corpus.folder
    assert len(again.train) == 15
    assert damaged_files(again.folder) == []


def test_a_changed_byte_is_found_by_its_checksum(write, cache):
    corpus = corpora.load(write())
    content = bytearray((corpus.folder / "valid.bin").read_bytes())
    content[0] ^= 1
    (corpus.folder / "valid.bin").write_bytes(content)
    assert damaged_files(corpus.folder) == ["valid.bin"]


def test_a_failed_encoding_leaves_no_files_behind(write, cache):
    with pytest.raises(DataError, match=r"test\.txt is not UTF-8"):
        corpora.load(write(test=b"\xff\n"))
    assert names(cache / "encoded") == []


def test_leftovers_of_a_killed_process_are_removed_but_not_the_files_of_a_running_one(cache):
    def die(folder):
        (folder / "half.bin").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        publish(cache / "killed", die)
    os.waitpid(child, 0)
    (cache / ".kept").mkdir()  # not one of ours
    assert names(cache) == [".kept", ".killed.tmp"]

    def look(folder):
        publish(cache / "second", lambda _: seen.append(names(cache)))

    seen = []
    publish(cache / "first", look)
    assert seen == [[".first.tmp", ".kept", ".second.tmp"]]
    assert names(cache) == [".kept", "first", "second"]


def test_a_folder_that_another_process_publishes_first_is_not_filled_again(cache):
    with ThreadPoolExecutor(4) as pool:
        filled = []
        list(pool.map(lambda i: publish(cache / "a", lambda _: filled.append(i)), range(4)))
    assert len(filled) == 1


def test_an_unwritable_cache_is_an_error_that_names_it(write, tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(
        DataError, match=r"the cache folder .*file/encoded can't be written \(not a"
    ):
        corpora.load(write(), cache_dir=blocked)


def test_opening_an_encoded_corpus_takes_less_than_50_milliseconds(write, cache):
    folder = write(train=" ".join(f"w{number}" for number in range(100_000)))
    corpora.load(folder)

    def seconds():
        start = time.perf_counter()
        corpora.load(folder)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.05


def test_encoding_memory_does_not_grow_with_the_text(write, cache, monkeypatch):
    monkeypatch.setattr(text, "_CHUNK", 1 << 16)
    folder = write(train="a few words that come again and again\n" * 50_000)  # 2 MB
    tracemalloc.start()
    corpora.load(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A piece of 64 KiB is some 15,000 words of 60 bytes and their list; the whole would be 32 MB.
    assert peak < 3e6
