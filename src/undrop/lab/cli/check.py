"""Compare an objective's analytic terms with dropout itself, to see whether p is too large for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from undrop.lab.cli import COMMANDS, Answer
from undrop.lab.cli._names import objectives, one_of
from undrop.lab.cli._options import Seconds, ShowProgress, SourceOptions

if TYPE_CHECKING:
    from undrop.lab.cli._sources import Source
    from undrop.objectives import Objective


@COMMANDS.register("check")
def check(
    options: SourceOptions,
    objective: Annotated[
        str | None,
        typer.Option(
            help="An objective with analytic terms.",
            show_default="the run's own, or analytic",
            **one_of("objective", objectives),
        ),
    ] = None,
    seconds: Seconds = 10.0,
    progress: ShowProgress = True,
) -> Answer:
    """Compare the analytic terms with a Monte Carlo estimate over dropout masks, on the first batch."""
    source = options.open(1)
    import undrop
    from undrop.diagnosis.measure.model import collect

    (batch,) = collect(source.batches, 1)
    with source.explain_user_errors():
        checked = _objective(source, objective)
        result = undrop.check(checked, source.model, batch, seconds=seconds, progress=progress)
    return Answer(result, str(result))


def _objective(source: Source, name: str | None) -> Objective:
    """Return the objective to check.

    Without a name, this is the run's own objective if it has analytic terms, and ``Analytic`` otherwise.
    """
    from undrop.lab.train.config import ObjectiveConfig

    arguments = {"loss": source.loss, "batch_dim": source.batch_dim}
    objective: Objective
    if name is None and source.run is not None:
        objective = source.run.config.objective.build(**arguments)
        if objective.implicit_factor is not None:
            return objective
    objective = ObjectiveConfig(name=name or "analytic").build(**arguments)
    return objective
