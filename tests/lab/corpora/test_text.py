import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from undrop.errors import DataError
from undrop.lab.corpora import text
from undrop.lab.corpora.text import EOS


def flat(path, limit=None):
    return [word for chunk in text.read_words(path, limit) for word in chunk]


def test_every_line_ends_with_eos_including_empty_and_unfinished_ones(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b" a  b\r\n\nc")
    assert flat(path) == ["a", "b", EOS, EOS, "c", EOS]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(content=st.text(alphabet="ab é\u3000\t\n", min_size=1), chunk=st.integers(1, 7))
def test_reading_in_pieces_of_any_size_gives_the_same_words(tmp_path, content, chunk):
    path = tmp_path / "a.txt"
    path.write_text("x\n" + content, encoding="utf-8", newline="")
    lines = ("x\n" + content).removesuffix("\n").split("\n")
    expected = [word for line in lines for word in [*line.split(), EOS]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_CHUNK", chunk)
        assert flat(path) == expected
        assert flat(path, limit=3) == expected[:3]


def test_a_byte_order_mark_is_not_part_of_the_first_word(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffa".encode())
    assert flat(path) == ["a", EOS]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_words_is_refused(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.txt is empty: a split must have at least one word"):
        flat(path)


def test_text_that_is_not_utf8_is_refused_with_the_position(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("naïve caf".encode() + b"\xe9 bar\n")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 text: byte 10 can't be decoded"):
        flat(path)


def test_an_unreadable_text_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match=r"b\.txt can't be read: no such file"):
        flat(tmp_path / "b.txt")
