"""The options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undrop.errors import OptionError
from undrop.files import near_path
from undrop.lab.cli._names import check_corpus, completion, corpora, models, one_of

if TYPE_CHECKING:
    from undrop.lab.cli._sources import Source


_IMPORT_PATH = "MODULE:NAME or path/to/file.py:NAME"


def _is_import_path(text: str) -> bool:
    return ":" in text


DataDir = Annotated[
    Path | None, typer.Option(help="Read the corpus from this folder; do not download it.")
]
RunFolderArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable."),
]
Batches = Annotated[int, typer.Option(min=1, help="The maximum number of batches to use.")]
Seconds = Annotated[float, typer.Option(help="The time to spend; more time gives smaller errors.")]
ShowProgress = Annotated[bool, typer.Option(help="Show a progress bar on stderr.")]


@dataclass(frozen=True)
class SourceOptions:
    """The options that name the model and the data that a command examines."""

    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Instead of RUN: a new model, by its name in `undrop models`, or your own as "
            f"{_IMPORT_PATH}.",
            **one_of("model", models, _is_import_path, f", or give your own as {_IMPORT_PATH}"),
        ),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(
            help=f"For --model: a corpus, or your own (inputs, targets) pairs as {_IMPORT_PATH}.",
            autocompletion=completion(corpora),
        ),
    ] = None
    loss: Annotated[
        str | None,
        typer.Option(
            help="For --model: another loss as MODULE:NAME, such as torch.nn:MSELoss; cross-entropy "
            "by default."
        ),
    ] = None
    data_dir: DataDir = None

    def open(self, batches: int) -> Source:
        """Load the model, at most ``batches`` batches of the data, and the loss.

        Raises:
            OptionError: if the options name no model, two models, or a run that does not exist.
        """
        if problem := self._problem():
            raise OptionError(problem)
        if self.data is not None and not _is_import_path(self.data):
            check_corpus(self.data, self.data_dir)
        from undrop.lab.cli import _sources

        if self.run is not None:
            return _sources.from_run(self.run, self.data_dir, batches)
        return _sources.from_names(self, batches)

    def _problem(self) -> str:
        """Return what is wrong with the options, and the way out; empty if nothing is wrong."""
        run, model, data = self.run, self.model, self.data
        if run is not None and model is not None:
            return "give either a RUN or --model, not both."
        if run is not None and data is not None:
            return (
                f"--data is for --model, but {run} is read as the folder of a run: write --model {run}, "
                "or leave out --data."
            )
        if run is not None and not run.exists():
            near = near_path(run, "*/")
            guess = f"did you mean {near}? Or give" if near else "give"
            return (
                f"there is no run {run}: {guess} the folder of a run, or a model with --model and its "
                "data with --data."
            )
        if run is None and model is None:
            return "give a RUN, or --model and --data."
        if model is not None and data is None:
            return (
                f"--model {model} needs data to run on: add --data with a name listed by "
                f"`undrop data list`, or with your own (inputs, targets) pairs as {_IMPORT_PATH}."
            )
        if model is None or data is None:
            return ""
        if _is_import_path(model) and not _is_import_path(data):
            return (
                f"your own model needs your own data: give both as {_IMPORT_PATH}, got {model!r} and "
                f"{data!r}."
            )
        if _is_import_path(data) and not _is_import_path(model):
            return (
                f"{model} is one of undrop's language models, which read a corpus: give the name or "
                f"the folder of a corpus as --data, got {data!r}."
            )
        return ""
