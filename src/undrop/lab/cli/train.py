"""Train a language model with any objective; --resume continues a run that was stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrop.lab.cli import COMMANDS, Answer, _names
from undrop.lab.cli._names import check_corpus, completion, one_of
from undrop.lab.cli._options import DataDir, Settings
from undrop.report import duration

if TYPE_CHECKING:
    from undrop.lab.train import Callback, Config
    from undrop.tuning import Tuner

TUNE_SHARE = 0.05
"""The share of the training text that ``--tune`` sets aside."""
RUNS = Path("runs")
"""The folder in which runs get their folders if there is no ``--out``."""
_YOUR_OWN_MODEL = "; to train your own model, use undrop.Analytic() in your own loop"

Out = Annotated[Path | None, typer.Option(help="The run's folder.", show_default="runs/…")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")]


@dataclass(frozen=True)
class TrainingOptions:
    """The options that describe a run: a preset, or a model and its data, and any other settings."""

    preset: Annotated[
        str | None,
        typer.Option(
            help="Settings to start from: a name listed by `undrop presets`, or a .toml file.",
            **one_of("preset", _names.presets, is_path=lambda text: text.endswith(".toml")),
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="A name listed by `undrop models`.",
            **one_of("model", _names.models, hint=_YOUR_OWN_MODEL),
        ),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(
            help="A name listed by `undrop data list`, or a folder with train, valid and test files.",
            autocompletion=completion(_names.corpora),
        ),
    ] = None
    objective: Annotated[
        str | None,
        typer.Option(
            help="A name listed by `undrop objectives`.", **one_of("objective", _names.objectives)
        ),
    ] = None
    data_dir: DataDir = None
    seed: Annotated[int | None, typer.Option(help="The seed of all random numbers.")] = None
    settings: Settings = None

    def config(self, out: Path | None = None, resume: bool = False, tune: bool = False) -> Config:
        """Return the config of the options.

        With ``resume``, the options change the config of the run in ``out``.
        """
        check_corpus(self.data, self.data_dir)
        values: dict[str, dict[str, Any]] = {
            "model": {"name": self.model},
            "data": {"name": self.data, "dir": self.data_dir and str(self.data_dir.absolute())},
            "objective": {"name": self.objective},
            "train": {"seed": self.seed, "tune": TUNE_SHARE if tune else None},
        }
        settings: dict[str, Any] = {
            section: {key: value for key, value in keys.items() if value is not None}
            for section, keys in values.items()
        }
        nothing_named = self.preset is None and not settings["model"] and not settings["data"]
        if nothing_named and not (resume and out is not None):
            raise _nothing_to_train(out, resume)
        from undrop.lab.train import RunFolder, configure, merge

        if self.preset is None and resume and out is not None and RunFolder(out).holds_run():
            settings = merge(RunFolder(out).read_config(), settings)
        elif nothing_named:
            raise _nothing_to_train(out, resume)
        return configure(self.preset, settings, self.settings or [])


@COMMANDS.register("train")
def train(
    options: TrainingOptions,
    out: Out = None,
    resume: Resume = False,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Tune every p during the run, on 5 % of the training text."),
    ] = False,
    callbacks: Annotated[
        list[str] | None,
        typer.Option(
            "--callback",
            metavar="MODULE:NAME",
            help="Your own callback as MODULE:NAME or path/to/file.py:NAME; repeatable.",
        ),
    ] = None,
) -> Answer | None:
    """Train a language model, with progress on stderr and the summary on stdout."""
    config = options.config(out, resume, tune)
    return start(config, out, resume, *map(_load_callback, callbacks or []))


def _load_callback(name: str) -> Callback:
    from undrop.errors import OptionError
    from undrop.lab.cli._sources import load_user_object
    from undrop.lab.train import Callback

    callback = load_user_object(name)
    if not isinstance(callback, Callback):
        raise OptionError(
            f"--callback {name} must be a Callback of undrop.lab.train, or a class or function that "
            f"returns one, got {type(callback).__name__}."
        )
    return callback


def start(config: Config, out: Path | None, resume: bool, *callbacks: Callback) -> Answer | None:
    """Train with a config and return the summary; in a process that is not the main one, None."""
    from undrop.lab.cli._progress import TrainingProgress
    from undrop.lab.train import run
    from undrop.lab.train.environment import is_main
    from undrop.lab.train.tuning import TunerRecorder

    out = out or RUNS / _default_name(config)
    recorder = TunerRecorder()
    callbacks = (TrainingProgress(), *callbacks, *([recorder] if config.train.tune else []))
    summary = run(config, out=out, resume=resume, callbacks=callbacks)
    if not is_main():
        return None
    text = (
        f"best validation perplexity {summary.best_valid_ppl:.2f} (epoch {summary.best_epoch}), "
        f"test {summary.test_ppl:.2f}, {duration(summary.seconds)}: {out}"
    )
    tuner = recorder.tuner
    tuned = [_describe_tuning(tuner, out)] if tuner and tuner.history.entries else []
    return Answer({**summary.model_dump(), "out": out}, text, *tuned)


def _describe_tuning(tuner: Tuner, out: Path) -> str:
    """Return the tuned p as a table; if matplotlib is installed, also draw p over the steps."""
    from undrop.errors import MissingExtraError

    text = f"\n{tuner.table().text()}"
    try:
        tuner.history.save_figure(out / "tuning.svg")
    except MissingExtraError:
        return text
    return f"{text}\n\np over the steps: {out / 'tuning.svg'}"


def _nothing_to_train(out: Path | None, resume: bool) -> Exception:
    from undrop.errors import ConfigError

    options = "--preset NAME, or --model NAME and --data NAME"
    if not resume:
        return ConfigError(f"name what to train: {options}.")
    if out is None:
        return ConfigError("--resume needs --out, the folder of the run to resume.")
    return ConfigError(
        f"{out} holds no run to resume: give the folder of one, or start one with {options}."
    )


def _default_name(config: Config) -> str:
    """Return the name of a run's folder: the preset or the model and data, the objective, the seed."""
    corpus = Path(config.data.name).name
    base = Path(config.preset or f"{config.model.name}-{corpus}").name.removesuffix(".toml")
    return f"{base}-{config.objective.name}-{config.train.seed}"
