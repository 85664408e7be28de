"""Train like `undrop train`, and record what dropout does during the run."""

from __future__ import annotations

from typing import Annotated

import typer

from undrop.lab.cli import COMMANDS, Answer
from undrop.lab.cli.train import Out, Resume, TrainingOptions, start


@COMMANDS.register("watch")
def watch(
    options: TrainingOptions,
    out: Out = None,
    resume: Resume = False,
    interval: Annotated[
        int,
        typer.Option(
            min=1, help="Steps between two measurements; at 200 they take 1 to 3 % of the time."
        ),
    ] = 200,
    implicit: Annotated[
        bool, typer.Option(help="Also measure the gradient noise, which takes most of that time.")
    ] = True,
) -> Answer | None:
    """Add ½E[uᵀHu], each site's share and ‖ξ_approx‖ to metrics.jsonl, as lines of kind "watch".

    With --set train.loggers=tensorboard, TensorBoard shows them too. The measurements do not change
    the run: it stays the same bit for bit.
    """
    config = options.config(out, resume)
    from undrop.diagnosis import Watcher
    from undrop.lab.train.callbacks import Watch

    watcher = Watcher(interval=interval, implicit=implicit, seed=config.train.seed)
    return start(config, out, resume, Watch(watcher))
