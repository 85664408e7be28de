"""Tables at the width of a terminal: numbers never break across lines."""

import pytest

from undrop.report import Table, terminal_width, wrap

TABLE = Table(
    ["run", "objective", "epochs", "validation perplexity", "time", "status"],
    [
        ["runs/ptb-lstm-tiny-analytic-1", "analytic", "12/12", "124.72", "2 min 05 s", "finished"],
        ["runs/broken", "", "", "", "", "unreadable: it was cut short"],
    ],
    numbers={"epochs", "validation perplexity", "time"},
)


@pytest.mark.parametrize("width", [20, 40, 50, 60, 70, 80, 90, 100, 120])
def test_a_number_is_never_broken_and_no_line_is_too_long(width):
    lines = TABLE.text(width).split("\n")
    for number in ("12/12", "124.72", "2 min 05 s") if width > 20 else ():
        assert sum(number in line for line in lines) == 1
    assert max(map(len, lines)) <= width


def test_a_number_in_a_cell_breaks_only_before_its_error():
    row = ["a site of a long name", "-0.00135 ± 0.00048", "100.68 % ± 0.54 %"]
    table = Table(["site", "rest", "share"], [row])
    assert table.text(29).split("\n") == [
        "site      rest       share",
        "a site    -0.00135   100.68 %",
        "of a      ± 0.00048  ± 0.54 %",
        "long",
        "name",
    ]
    assert table.text(28).startswith("site   a site of a long name\n")  # a block


def test_prose_does_not_break_at_an_equals_sign():
    assert wrap("small (λ = 0.1, R_drop = 1.5 ± 0.2)", 20) == [
        "small (λ = 0.1,",
        "R_drop = 1.5 ± 0.2)",
    ]


def test_a_table_row_is_one_line_if_there_is_room():
    lines = TABLE.text(130).split("\n")
    assert lines[0].split() == " ".join(TABLE.headers).split()
    assert len(lines) == 3


def test_headers_of_numbers_wrap_before_the_table_becomes_blocks():
    head, body = TABLE.lines(64)
    assert [line.split() for line in head][1] == ["perplexity"]
    assert "124.72" in body[0]


def test_a_table_row_is_a_block_of_its_nonempty_cells_if_there_is_no_room():
    assert TABLE.text(40).split("\n") == [
        "run                   runs/ptb-lstm-",
        "                      tiny-analytic-1",
        "objective             analytic",
        "epochs                12/12",
        "validation            124.72",
        "perplexity",
        "time                  2 min 05 s",
        "status                finished",
        "",
        "run     runs/broken",
        "status  unreadable: it was cut short",
    ]


def test_wide_characters_take_two_columns_of_a_table():
    head, body = Table(["word", "n"], [["日本", "1"], ["ab", "22"]], numbers={"n"}).lines(80)
    assert (head, body) == (["word   n"], ["日本   1", "ab    22"])


def test_text_wraps_at_spaces_and_a_long_word_without_marks_anywhere():
    table = Table(["n", "text"], [["1", "one two three abcdefghijklmnop"]], numbers={"n"})
    assert table.text(12).split("\n") == [
        "n  text",
        "1  one two",
        "   three",
        "   abcdefghi",
        "   jklmnop",
    ]


def test_the_title_of_a_table_is_the_first_line():
    assert Table(["a"], [["1"]], title="Sites").text(80).split("\n") == ["Sites", "a", "1"]


def test_a_table_does_not_wrap_without_a_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("os.get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError()))
    assert terminal_width() > 1000
    monkeypatch.setenv("COLUMNS", "72")
    assert terminal_width() == 72


def test_a_markdown_table_escapes_its_cells():
    table = Table(["word", "n"], [["a|b <c>\nremark", "1"]], numbers={"n"})
    assert table.markdown().split("\n") == [
        "| word | n |",
        "| --- | ---: |",
        "| a\\|b &lt;c><br>remark | 1 |",
    ]


def test_an_html_table_escapes_text_and_aligns_numbers():
    table = Table(["word", "n"], [["<b>\nremark", "1"], ["holds", ""]], numbers={"n"})
    shown = table.html("cards", {"holds": "good"})
    assert '<td data-head="word">&lt;b&gt;<br><span class="soft">remark</span></td>' in shown
    assert '<td class="number" data-head="n">1</td>' in shown
    assert '<span class="good">holds</span>' in shown
    assert '<table class="cards">' in shown


@pytest.mark.parametrize("width", range(16, 40))
def test_wrapped_prose_never_breaks_within_a_number(width):
    text = "The ratio is 1.36 ± 0.14, and 80.2 % ± 0.42 % of it is at one site."
    lines = wrap(text, width)
    assert " ".join(lines) == text
    assert sum("1.36 ± 0.14," in line for line in lines) == 1
    assert all(line[-1] not in "±" and line[0] not in "±%" for line in lines)
    assert max(map(len, lines)) <= width
