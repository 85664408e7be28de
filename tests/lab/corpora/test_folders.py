import pytest

from undrop.errors import DataError
from undrop.lab.corpora.text import find_splits


@pytest.mark.parametrize(
    "names",
    [
        ("train.txt", "valid.txt", "test.txt"),
        ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("my-train.txt", "my-validation.txt", "my-test.txt"),
        ("data.train", "data.dev", "data.test"),
    ],
)
def test_split_files_with_common_names_are_found(tmp_path, names):
    for name in (*names, "README.md", "train.bin", "contest.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in find_splits(tmp_path).values()] == list(names)


def test_a_missing_split_is_an_error_that_names_it(write):
    folder = write(valid=None)
    with pytest.raises(DataError, match=r"small has no valid split: add a text file such as valid"):
        find_splits(folder)


def test_two_files_for_one_split_are_refused_unless_one_is_plain(write):
    folder = write(suffix=".one.txt")
    write(suffix=".two.txt")
    with pytest.raises(DataError, match=r"more than one train split \(train.one.txt, train.two.tx"):
        find_splits(folder)
    write()
    assert find_splits(folder)["train"].name == "train.txt"


def test_exact_split_names_take_precedence(write):
    folder = write()
    write(suffix=".tokens")
    assert find_splits(folder, {"test": "test.tokens"})["test"].name == "test.tokens"


def test_a_missing_corpus_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match=r"there is no folder .*nowhere"):
        find_splits(tmp_path / "nowhere")
