import io

import pytest
from rich.console import Console

from undrop.report import Progress, duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (7260, "2 h 01 min"),
    ],
)
def test_durations_have_readable_units(seconds, words):
    assert duration(seconds) == words


def terminal(width=80):
    return Console(file=io.StringIO(), width=width, force_terminal=True)


@pytest.mark.parametrize("width", [20, 40, 79, 80, 119])
def test_a_progress_line_fits_the_width_and_leaves_out_whole_fields(width):
    fields = ("12,345 tokens/s", "2 min 05 s left", "loss 5.500  explicit 0.250", "implicit 0.125")
    bar = Progress(False).bar("epoch 2/4")
    bar.show(0.3, *fields)
    line = bar.line(width, length=8)
    assert len(line) <= width
    assert line.startswith("epoch 2/4")
    shown = [field for field in fields if field in line]
    assert shown == list(fields[: len(shown)])
    assert len(shown) == {20: 0, 40: 0, 79: 2, 80: 2, 119: 4}[width]


def test_a_bar_fills_up_and_has_an_ascii_form():
    bar = Progress(False).bar()
    bar.show(0.5)
    assert bar.line(80) == "━" * 12 + "─" * 12 + "   50%"
    assert bar.line(80, ascii_only=True) == "#" * 12 + "-" * 12 + "   50%"
    bar.show(7.0)
    assert bar.line(80).endswith("100%")


def test_progress_without_a_known_end_has_no_bar():
    bar = Progress(False).bar("reading")
    bar.show(None, "3 files")
    assert bar.line(80) == "reading  3 files"


def test_bars_are_drawn_on_a_terminal_and_removed_at_the_end():
    console = terminal()
    with Progress(console=console) as progress:
        progress.bar("first").show(0.25)
        progress.bar("second").show(0.75)
        progress.print("a remark [x]")
    shown = console.file.getvalue()
    assert "first" in shown
    assert "second" in shown
    assert "a remark [x]" in shown
    assert shown.rstrip("\n").endswith("\x1b[2K")  # the last line is erased


def test_without_a_terminal_only_printed_lines_appear():
    console = Console(file=io.StringIO(), width=80)
    with Progress(console=console) as progress:
        progress.bar("first").show(0.25)
        progress.print("a remark")
    assert console.file.getvalue() == "a remark\n"


def test_bars_work_without_rich(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    with Progress() as progress:
        progress.bar("first").show(0.25)
        progress.print("a remark")
    assert not progress.visible
