"""The scoreboard's page: every method compared with dropout, at equal steps and at equal time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from undrop.errors import RunError
from undrop.files import naming_disk_errors
from undrop.lab.reproduce.results import Interval, mean_interval
from undrop.lab.scoreboard.board import METHODS, RunRecords, TaskRuns, read_records
from undrop.lab.scoreboard.tasks import TASKS
from undrop.report import Table, html
from undrop.report.figures import OURS, check_drawable, new_figure, save, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_REFERENCE = "dropout"
_EXPLANATION = """
A test loss is in nats, or a mean squared error. Each run evaluates the model eight times, and reports \
the test loss at the lowest validation loss. For each method, a search chooses p and the weight decay \
by the validation loss on seed 0, which the results leave out. The columns "equal steps" and "equal \
time" show the method's test loss minus that of tuned dropout on the same seed; a negative difference \
is an improvement. The intervals are Student's, widened so that all intervals of this page hold \
simultaneously with 95 % confidence (Bonferroni). At equal time, a method whose step takes longer than \
dropout's (in CPU time, measured in the search) trains for fewer epochs, and its learning rate still \
falls along a cosine to zero. The tuner has no search: one run with it is compared with dropout after \
its search. ε₀ is the size of the noise from which the engine computes u, 0.05 by default. With a \
larger ε₀, u also contains higher orders of the noise."""


def write_board(folder: Path, out: Path, seeds: int | None = None) -> Path:
    """Write ``report.md`` and ``figures/scoreboard.png`` from the records in a folder.

    Raises:
        RunError: if there are no records.
        MissingExtraError: if matplotlib is not installed.
    """
    check_drawable()
    records = read_records(folder)
    if not records:
        raise RunError(f"{folder} has no records: run `undrop reproduce scoreboard` first.")
    last_seed = max(record["spec"]["seed"] for record in records.values())
    all_tasks = [TaskRuns(name, records, seeds or max(1, last_seed)) for name in TASKS]
    done = [runs for runs in all_tasks if runs.test_losses(_REFERENCE, equal_time=False)]
    comparisons = 2 * sum(len(_compared_methods(runs)) for runs in done)
    with naming_disk_errors(out):
        (out / "figures").mkdir(parents=True, exist_ok=True)
    parts = ["# Scoreboard", _summary(done, all_tasks, records), _EXPLANATION.strip()]
    parts.append("![Difference from tuned dropout](figures/scoreboard.png)")
    for runs in done:
        parts += [f"## {runs.task.label}", _table(runs, comparisons).markdown()]
        parts += [
            f"Left out: {METHODS[name].label}, because {reason}."
            for name, reason in runs.task.excluded_methods.items()
        ]
    html.write(out / "report.md", "\n\n".join(parts) + "\n")
    with styled():
        save(_figure(done, comparisons), out / "figures" / "scoreboard.png")
    return out / "report.md"


def _compared_methods(runs: TaskRuns) -> list[str]:
    return [name for name in runs.methods if name != _REFERENCE]


def _summary(done: list[TaskRuns], all_tasks: list[TaskRuns], records: RunRecords) -> str:
    hours = sum(record["seconds"] for record in records.values()) / 3600.0
    missing = [runs.task.label for runs in all_tasks if runs not in done]
    text = f"{len(records)} runs, {hours:.2f} hours of one core."
    return text + (f" Not run yet: {'; '.join(missing)}." if missing else "")


def difference(runs: TaskRuns, name: str, *, equal_time: bool, comparisons: int) -> Interval | None:
    """Return a method's test loss minus dropout's, paired by seed; None if no seed has both."""
    losses = runs.test_losses(name, equal_time=equal_time)
    reference = runs.test_losses(_REFERENCE, equal_time=False)
    gaps = [losses[seed] - reference[seed] for seed in sorted(losses.keys() & reference.keys())]
    return mean_interval(gaps, comparisons=comparisons) if gaps else None


def _table(runs: TaskRuns, comparisons: int) -> Table:
    text_headers = ("method", "chosen")
    number_headers = ("cost of a step", "test loss", "equal steps", "equal time", "seeds")
    rows = []
    for name, method in runs.methods.items():
        losses = list(runs.test_losses(name, equal_time=False).values())
        loss = f"{sum(losses) / len(losses):.4f}" if losses else "not run yet"
        cost = runs.step_cost(name)
        both = [
            difference(runs, name, equal_time=t, comparisons=comparisons) for t in (False, True)
        ]
        differences = ["", ""] if name == _REFERENCE else [_as_text(interval) for interval in both]
        cells = [method.label, _choice(runs, name), "" if cost is None else f"× {cost:.2f}", loss]
        rows.append([*cells, *differences, str(len(losses))])
    return Table((*text_headers, *number_headers), rows, numbers=number_headers)


def _choice(runs: TaskRuns, name: str) -> str:
    """Return the options that the search chose, as text."""
    spec, method = runs.chosen_spec(name, equal_time=False), METHODS[name]
    if spec is None:
        return ""
    words = [f"p = {spec.p:g}"] if method.tunes_p else []
    words += [f"decay {spec.decay:g}"] if method.tunes_decay else []
    return ", ".join(words)


def _as_text(interval: Interval | None) -> str:
    if interval is None:
        return "not run yet"
    mark = " better" if interval.high < 0 else " worse" if interval.low > 0 else ""
    return f"{interval.estimate:+.4f} ({interval.low:+.4f} – {interval.high:+.4f}){mark}"


def _figure(done: list[TaskRuns], comparisons: int) -> Figure:
    """Return a panel for each task: the differences from dropout at equal time, the best on top."""
    columns = min(3, len(done))
    rows = -(-len(done) // columns)
    figure = new_figure(3.6 * columns, 0.5 + 2.2 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for panel in panels[len(done) :]:
        panel.set_visible(False)
    for panel, runs in zip(panels, done, strict=False):
        intervals = []
        for name in _compared_methods(runs):
            interval = difference(runs, name, equal_time=True, comparisons=comparisons)
            if interval is not None:
                intervals.append((interval, METHODS[name].label))
        intervals.sort(key=lambda pair: pair[0].estimate, reverse=True)
        for y, (interval, _) in enumerate(intervals):
            panel.plot([interval.low, interval.high], [y] * 2, color=OURS, lw=2, alpha=0.5)
            panel.plot(interval.estimate, y, "o", color=OURS, ms=4)
        panel.axvline(0.0, color="black", lw=0.8)
        panel.set_yticks(range(len(intervals)), [label for _, label in intervals], fontsize=7)
        panel.tick_params(axis="x", labelsize=7)
        panel.set_title(runs.task.label, fontsize=8)
    figure.supxlabel("test loss minus tuned dropout's, at equal time (left is better)", fontsize=8)
    return figure
