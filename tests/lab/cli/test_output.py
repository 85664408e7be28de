"""Tables at the width of a terminal: numbers stay whole, whatever gives way."""

import pytest

from undrop.lab.cli._output import print_table

COLUMNS = ["run", "objective", "epochs", "validation perplexity", "time", "status"]
NUMBERS = {"epochs", "validation perplexity", "time"}
ROWS = [
    ["runs/ptb-lstm-tiny-analytic-1", "analytic", "12/12", "124.72", "2 min 05 s", "finished"],
    ["runs/broken", "", "", "", "", "unreadable: it was cut short"],
]


@pytest.fixture
def shown(monkeypatch, capsys):
    """The lines of the table on a terminal of some width."""

    def shown(width):
        monkeypatch.setenv("COLUMNS", str(width))
        print_table(COLUMNS, ROWS, numbers=NUMBERS)
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return shown


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80, 90, 100, 120])
def test_a_number_is_never_broken_and_no_line_is_too_long(shown, width):
    lines = shown(width)
    for number in ("12/12", "124.72", "2 min 05 s"):
        assert sum(number in line for line in lines) == 1
    assert max(map(len, lines)) <= width


def test_with_room_a_row_is_a_line(shown):
    assert shown(130)[0].split() == " ".join(COLUMNS).split()
    assert len(shown(130)) == 3


def test_headings_of_numbers_give_way_before_the_table_does(shown):
    assert any(line.split() == ["validation"] for line in shown(64))


def test_without_room_a_row_is_a_block_of_what_it_has(shown):
    lines = shown(50)
    assert lines[:2] == [
        "run                    runs/ptb-lstm-tiny-analytic",
        "                       -1",
    ]
    assert lines[7:] == [
        "",
        "run     runs/broken",
        "status  unreadable: it was cut short",
    ]
