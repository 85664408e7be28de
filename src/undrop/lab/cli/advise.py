"""Train for a short while, then say whether and where dropout helps, and which p to start from."""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undrop.errors import OptionError
from undrop.lab.cli import COMMANDS, Answer
from undrop.lab.cli.train import TrainingOptions

if TYPE_CHECKING:
    from undrop.lab.train import Config

_MIN_STEPS = 200


@COMMANDS.register("advise")
def advise(
    options: TrainingOptions,
    share: Annotated[
        float, typer.Option(help="The share of the planned steps to train for.")
    ] = 0.1,
) -> Answer:
    """Train for a share of the planned steps, and print the advice on stdout.

    The advice is a table of all sites, and a verdict in one sentence.
    """
    if not 0.0 < share <= 1.0:
        raise OptionError(f"--share must lie in (0, 1], got {share}.")
    config = _shorten(options.config(tune=True), share)
    from undrop.lab.cli._progress import TrainingProgress
    from undrop.lab.train import run
    from undrop.lab.train.optimizers import clipped_optimizer
    from undrop.lab.train.tuning import TunerRecorder
    from undrop.tuning import advise_from

    with tempfile.TemporaryDirectory() as folder:
        recorder = TunerRecorder(interval=sys.maxsize)  # longer than the run: no trial
        run(config, out=Path(folder) / "run", callbacks=[TrainingProgress(), recorder])
    assert recorder.tuner is not None
    assert recorder.model is not None
    optimizer = clipped_optimizer(recorder.model, config.optimizer)
    model, batches = recorder.model.train(), list(recorder.batches)
    advice = advise_from(recorder.tuner, model, batches, optimizer)
    return Answer(advice, advice.table().text(), "", advice.verdict)


def _shorten(config: Config, share: float) -> Config:
    """Return the config with this share of its steps, and at least ``_MIN_STEPS``."""
    data, train = config.data, config.train
    tokens = (1.0 - train.tune) * len(config.load_corpus().train)
    per_epoch = tokens / (data.batch_size * data.length)
    steps = max(round(share * (train.max_steps or train.epochs * per_epoch)), _MIN_STEPS)
    epochs = math.ceil(1.1 * steps / per_epoch) + 1  # more than enough: max_steps ends the run
    limits = {"max_steps": steps, "epochs": epochs, "patience": None}
    return config.model_copy(update={"train": train.model_copy(update=limits)})
