"""Train a language model with any objective; stop it and go on with --resume."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrop.lab.cli._output import print_json

if TYPE_CHECKING:
    from undrop.lab.train import Callback, Config, Summary

__all__ = ["choose", "register", "settle", "start"]

RUNS = Path("runs")
"""Where runs go that were given no --out."""


def register(app: typer.Typer) -> None:
    """Add ``undrop train``."""
    app.command("train", help=__doc__)(train)


Preset = Annotated[
    str | None, typer.Option(help="Settings to start from: a name, or a .toml file.")
]
Model = Annotated[str | None, typer.Option(help="awd-lstm, qrnn, transformer-xl or gpt.")]
Data = Annotated[
    str | None, typer.Option(help="A corpus, or a folder with train, valid and test texts.")
]
ObjectiveName = Annotated[
    str | None, typer.Option(help="none, l2, dropout, drop-k, analytic, explicit, …")
]
DataDir = Annotated[
    Path | None, typer.Option(help="Read the corpus from here, do not download it.")
]
Out = Annotated[Path | None, typer.Option(help="The run's folder.", show_default="runs/…")]
Seed = Annotated[int | None, typer.Option(help="Of everything that is random.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --out where it was left.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any other setting; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]


def train(
    preset: Preset = None,
    model: Model = None,
    data: Data = None,
    objective: ObjectiveName = None,
    data_dir: DataDir = None,
    out: Out = None,
    seed: Seed = None,
    resume: Resume = False,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Train, with progress on stderr and the summary on stdout."""
    chosen = choose(model=model, data=data, objective=objective, data_dir=data_dir, seed=seed)
    start(settle(preset, chosen, settings or [], out, resume), out, resume, json)


def choose(
    *,
    model: str | None,
    data: str | None,
    objective: str | None,
    data_dir: Path | None,
    seed: int | None,
) -> dict[str, dict[str, Any]]:
    """The settings that options of their own stand for, None where one was not given."""
    return {
        "model": {"name": model},
        "data": {"name": data, "dir": str(data_dir.absolute()) if data_dir else None},
        "objective": {"name": objective},
        "train": {"seed": seed},
    }


def start(config: Config, out: Path | None, resume: bool, json: bool, *callbacks: Callback) -> None:
    """Train what the config says, and print how it ended."""
    from undrop.lab.cli._progress import progress_reporter
    from undrop.lab.train import run
    from undrop.lab.train.distributed import is_main

    out = out or RUNS / _name(config)
    summary = run(config, out=out, resume=resume, callbacks=[progress_reporter(), *callbacks])
    if not is_main():
        return
    if json:
        print_json({**summary.model_dump(), "out": str(out)})
    else:
        typer.echo(_ending(summary, out))


def settle(
    preset: str | None,
    chosen: dict[str, dict[str, Any]],
    overrides: list[str],
    out: Path | None,
    resume: bool,
) -> Config:
    """The config that the options make, laid over that of the run to go on with, if there is one."""
    from undrop.errors import ConfigError
    from undrop.lab.train import RunFolder, configure, merge

    settings: dict[str, Any] = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in chosen.items()
    }
    if preset is None and resume and out is not None and RunFolder(out).holds_run():
        settings = merge(RunFolder(out).read_config(), settings)
    elif preset is None and not settings["model"] and not settings["data"]:
        raise ConfigError(_nothing_to_train(out, resume))
    return configure(preset, settings, overrides)


def _nothing_to_train(out: Path | None, resume: bool) -> str:
    named = "--preset NAME, or --model NAME and --data NAME"
    if not resume:
        return f"say what to train: {named}."
    if out is None:
        return "--resume needs --out, the folder of the run to go on with."
    return f"{out} holds no run to go on with: give the folder of one, or begin it by {named}."


def _name(config: Config) -> str:
    """A run's folder, if none was given: what it trains, how, and the seed; never a path."""
    corpus = Path(config.data.name).name
    base = Path(config.preset or f"{config.model.name}-{corpus}").name.removesuffix(".toml")
    return f"{base}-{config.objective.name}-{config.train.seed}"


def _ending(summary: Summary, out: Path) -> str:
    from undrop.lab.cli._progress import duration

    return (
        f"best validation perplexity {summary.best_valid_ppl:.2f} (epoch {summary.best_epoch}), "
        f"test {summary.test_ppl:.2f}, {duration(summary.seconds)}: {out}"
    )
