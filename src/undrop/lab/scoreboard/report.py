"""The scoreboard as a page: every method against dropout, at equal steps and at equal time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from undrop.errors import RunError
from undrop.files import naming_disk_errors
from undrop.lab.reproduce.results import Interval, mean_interval
from undrop.lab.scoreboard.board import METHODS, TUNING_SEED, Board, read_records
from undrop.lab.scoreboard.tasks import TASKS
from undrop.report import Table, html
from undrop.report.figures import OURS, check_drawable, new_figure, save, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_REFERENCE = "dropout"
_HOW = """
Every number is a test loss (nats, or squared error) at the best of eight evaluations by validation \
loss. p and the weight decay of each method are chosen on the validation split of seed 0, which is \
not reported. A difference is a method's loss minus that of tuned dropout on the same seed; below 0 \
is better. Its interval is Student's, widened so that all intervals of this page hold simultaneously \
with 95 % confidence (Bonferroni). At equal time, a method whose step takes longer than dropout's \
(in CPU time, measured in the search) trains for fewer epochs, with the same cosine schedule to zero. \
The tuner has no search: its one run is compared with the best run of dropout. ε₀ is the size of the \
noise from which the engine computes u, 0.05 by default: with a larger one, u also contains higher \
orders of the noise."""


def write_board(folder: Path, out: Path, seeds: int | None = None) -> Path:
    """Write ``report.md`` and ``figures/scoreboard.png`` from the records of a folder.

    Raises:
        RunError: if there are no records.
        MissingExtraError: if matplotlib is not installed.
    """
    check_drawable()
    records = read_records(folder)
    if not records:
        raise RunError(f"{folder} has no records: run `undrop reproduce scoreboard` first.")
    most = max(record["spec"]["seed"] for record in records.values())
    boards = [Board(name, records, seeds or max(1, most)) for name in TASKS]
    run = [board for board in boards if board.losses(_REFERENCE, timed=False)]
    comparisons = sum(len(list(_others(b))) for b in run) * 2
    with naming_disk_errors(out):
        (out / "figures").mkdir(parents=True, exist_ok=True)
    parts = ["# A scoreboard of today's tasks", _summary(run, boards, records), _HOW.strip()]
    parts.append("![Difference from tuned dropout](figures/scoreboard.png)")
    for board in run:
        parts += [f"## {board.task.label}", _table(board, comparisons).markdown()]
        parts += [
            f"{METHODS[name].label}: refused, {why}." for name, why in board.task.refused.items()
        ]
    html.write(out / "report.md", "\n\n".join(parts) + "\n")
    with styled():
        save(_figure(run, comparisons), out / "figures" / "scoreboard.png")
    return out / "report.md"


def _others(board: Board) -> Iterator[str]:
    return (name for name in board.methods if name != _REFERENCE)


def _summary(run: list[Board], boards: list[Board], records: dict[str, dict[str, float]]) -> str:
    hours = sum(record["seconds"] for record in records.values()) / 3600.0
    missing = [board.task.label for board in boards if board not in run]
    text = f"{len(records)} runs, {hours:.2f} hours of one core."
    return text + (f" Not run yet: {'; '.join(missing)}." if missing else "")


def difference(board: Board, name: str, *, timed: bool, comparisons: int) -> Interval | None:
    """Return a method's test loss minus dropout's, paired by seed; None if no seed has both."""
    own, plain = board.losses(name, timed=timed), board.losses(_REFERENCE, timed=False)
    shared = sorted(own.keys() & plain.keys())
    if not shared:
        return None
    return mean_interval([own[s] - plain[s] for s in shared], comparisons=comparisons)


def _table(board: Board, comparisons: int) -> Table:
    first, last = ("method", "chosen"), ("equal steps", "equal time", "seeds")
    heads = (*first, "cost of a step", "test loss", *last)
    rows = []
    for name, method in board.methods.items():
        losses = list(board.losses(name, timed=False).values())
        cost = board.cost(name)
        differences = ("", "")
        if name != _REFERENCE:
            steps, time = (
                difference(board, name, timed=timed, comparisons=comparisons)
                for timed in (False, True)
            )
            differences = (_shown(steps), _shown(time))
        pace = "" if cost is None else f"× {cost:.2f}"
        mean = f"{sum(losses) / len(losses):.4f}" if losses else "not run yet"
        rows.append(
            (method.label, _choice(board, name), pace, mean, *differences, str(len(losses)))
        )
    return Table(heads, rows, numbers=heads[2:])


def _choice(board: Board, name: str) -> str:
    spec, method = board.chosen(name, timed=False), METHODS[name]
    if spec is None:
        return ""
    assert spec.seed == TUNING_SEED
    words = [f"p = {spec.p:g}"] if method.tunes_p else []
    words += [f"decay {spec.decay:g}"] if method.tunes_decay else []
    return ", ".join(words)


def _shown(interval: Interval | None) -> str:
    if interval is None:
        return "not run yet"
    mark = " better" if interval.high < 0 else " worse" if interval.low > 0 else ""
    return f"{interval.estimate:+.4f} ({interval.low:+.4f} – {interval.high:+.4f}){mark}"


def _figure(boards: list[Board], comparisons: int) -> Figure:
    """A panel for each task: differences from dropout at equal time, the best first."""
    columns = min(3, len(boards))
    rows = -(-len(boards) // columns)
    figure = new_figure(3.6 * columns, 0.5 + 2.2 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for panel in panels[len(boards) :]:
        panel.set_visible(False)
    for panel, board in zip(panels, boards, strict=False):
        found = {
            METHODS[name].label: interval
            for name in _others(board)
            if (interval := difference(board, name, timed=True, comparisons=comparisons))
            is not None
        }
        ordered = sorted(found.items(), key=lambda item: item[1].estimate, reverse=True)
        for place, (_, interval) in enumerate(ordered):
            panel.plot([interval.low, interval.high], [place] * 2, color=OURS, lw=2, alpha=0.5)
            panel.plot(interval.estimate, place, "o", color=OURS, ms=4)
        panel.axvline(0.0, color="black", lw=0.8)
        panel.set_yticks(range(len(ordered)), [label for label, _ in ordered], fontsize=7)
        panel.tick_params(axis="x", labelsize=7)
        panel.set_title(board.task.label, fontsize=8)
    figure.supxlabel("test loss minus tuned dropout's, at equal time (left is better)", fontsize=8)
    return figure
