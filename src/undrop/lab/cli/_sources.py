"""Load the model, the batches and the loss of a command, from a run or by name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from undrop.diagnosis.measure.model import collect
from undrop.errors import OptionError, UndropError
from undrop.files import near_path
from undrop.intercept.model_call import call
from undrop.lab.corpora import Corpus
from undrop.lab.corpora.batching import TrainingWindows
from undrop.lab.corpora.corpus import Tokens
from undrop.lab.models import LanguageModel, State, detach
from undrop.lab.train import Config, configure
from undrop.lab.train.optimizers import clipped_optimizer
from undrop.lab.train.runs import Run, open_run
from undrop.losses import Loss


@dataclass(frozen=True)
class Source:
    """What a command examines: a model, its data, its loss, and where they come from."""

    model: nn.Module
    batches: Iterable[tuple[Any, Any]]
    loss: Loss | Callable[[Tensor, Any], Tensor] | None
    classes: Sequence[str] | None = None
    batch_dim: int = 0
    validation: Iterable[tuple[Any, Any]] | None = None
    run: Run | None = None
    """The run that it comes from, if any."""
    optimizer: torch.optim.Optimizer | None = None
    """A new optimizer with the settings of the run."""
    names: tuple[str, str] | None = None
    """The names of your own model and data."""

    @contextmanager
    def explain_user_errors(self) -> Iterator[None]:
        """If the user's own model fails even without undrop, say so in one sentence."""
        try:
            yield
        except UndropError:
            raise
        except Exception:
            if self.names is not None:
                model, data = self.names
                ((inputs, _),) = collect(load_user_object(data), 1)
                with _explain(model, "called on the first batch"):
                    call(self.model, inputs)
            raise


def windows(
    model: LanguageModel, tokens: Tokens, config: Config, count: int, *, logits: bool = False
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield windows of text, spread evenly over a split, each with the state of the one before it.

    Args:
        model: computes the state of a window from the one before it, in eval mode.
        tokens: the split.
        config: the settings that cut the text into windows.
        count: the number of windows; a short split has fewer.
        logits: whether the model returns logits, or the features that its own loss takes.
    """
    device = next(model.parameters()).device
    length = config.data.length
    pieces = TrainingWindows(tokens, config.data.batch_size, length)
    most = max(1, pieces.steps // length - 1)
    for index in range(min(count, most)):
        position = length * (1 + index * most // min(count, most))
        state, first = None, pieces.window(position - length, position)
        if position < pieces.steps:
            state = _state_after(model, first.inputs.to(device))
            first = pieces.window(position, position + length)
        tokens_in, targets = first.inputs.to(device), first.targets.to(device)
        yield {"tokens": tokens_in, "state": state, "logits": logits}, targets


@torch.no_grad()
def _state_after(model: LanguageModel, tokens: Tensor) -> State:
    training = model.training
    model.eval()
    try:
        return detach(model(tokens, None, logits=False)[1])
    finally:
        model.train(training)


def from_run(path: str | Path, *, data_dir: str | Path | None = None, batches: int = 16) -> Source:
    """Load a trained run with its own training text."""
    run = open_run(path, data_dir=data_dir)
    return _of_language_model(run.model, run.corpus, run.config, batches, run)


def from_names(
    model: str, data: str, loss: str | None, data_dir: str | Path | None, batches: int
) -> Source:
    """Load a model and data by name: undrop's own, or your own as MODULE:NAME or FILE.py:NAME.

    Args:
        model: a language model such as ``awd-lstm``, newly initialized; or your own module, or a
            function that returns one.
        data: a corpus, for a language model; or your own batches (inputs, targets), or a function
            that returns them.
        loss: your own loss; None is cross-entropy.
        data_dir: the folder of the corpus.
        batches: the number of windows of a corpus.

    Raises:
        OptionError: if a name can't be found, or the model is not a module.
    """
    if ":" not in model:
        where = None if data_dir is None else str(data_dir)
        config = configure(None, {"model": {"name": model}, "data": {"name": data, "dir": where}})
        corpus = config.load_corpus()
        return _of_language_model(config.build_model(corpus), corpus, config, batches)
    found = load_user_object(model)
    if not isinstance(found, nn.Module):
        raise OptionError(
            f"{model} must be a torch module or a function that returns one, got "
            f"{type(found).__name__}."
        )
    own_loss = None if loss is None else _look_up(loss)
    return Source(found, load_user_object(data), own_loss, names=(model, data))


def _of_language_model(
    model: LanguageModel, corpus: Corpus, config: Config, batches: int, run: Run | None = None
) -> Source:
    optimizer = (
        None if run is None else clipped_optimizer(list(model.parameters()), config.optimizer)
    )
    return Source(
        model,
        windows(model, corpus.train, config, batches),
        model.loss(),
        classes=corpus.vocabulary.words,
        batch_dim=1,
        validation=windows(model, corpus.valid, config, batches),
        run=run,
        optimizer=optimizer,
    )


def _look_up(name: str) -> Any:
    """Import the object that MODULE:NAME or FILE.py:NAME names."""
    place, _, attribute = name.rpartition(":")
    with _explain(name, "imported"):
        module = _file(Path(place)) if place.endswith(".py") else _module(place)
    if hasattr(module, attribute):
        return getattr(module, attribute)
    public = [known for known in vars(module) if not known.startswith("_")]
    near = get_close_matches(attribute, public, n=1)
    guess = f"did you mean {place}:{near[0]}" if near else "give the name of something in it"
    raise OptionError(f"{place} has no {attribute!r}: {guess}{'?' if near else '.'}")


def _module(name: str) -> ModuleType:
    _import_from(Path.cwd())
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        near = near_path(Path(f"{name}.py"), "*.py")
        raise ImportError(f"No module named {name!r}{_guess(near and near.stem)}")
    return importlib.import_module(name)


def _guess(near: str | Path | None) -> str:
    return f"; did you mean {near}?" if near else ""


def _file(path: Path) -> ModuleType:
    """Import a file by its path; it can import the modules in its folder."""
    if not path.is_file():
        raise ImportError(f"there is no file {path}{_guess(near_path(path, '*.py'))}")
    _import_from(path.absolute().parent)
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path.absolute()):
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # pickle and dataclasses look the module up here
    spec.loader.exec_module(module)
    return module


def _import_from(folder: Path) -> None:
    """Make the modules of a folder importable, as ``python -m`` does for the current folder."""
    if str(folder) not in sys.path and not ("" in sys.path and folder == Path.cwd()):
        sys.path.insert(0, str(folder))


def load_user_object(name: str) -> Any:
    """Return the object that MODULE:NAME or FILE.py:NAME names, or what it returns if callable."""
    found = _look_up(name)
    if isinstance(found, nn.Module) or not callable(found):
        return found
    with _explain(name, "called"):
        return found()


@contextmanager
def _explain(name: str, what: str) -> Iterator[None]:
    """Turn any exception of the user's code into one sentence."""
    try:
        yield
    except UndropError:
        raise
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split()).rstrip(".")
        if not isinstance(error, ImportError):  # its message needs no more detail
            message = f"{type(error).__name__}: {message}; --debug shows where"
        stop = "" if message.endswith("?") else "."
        raise OptionError(f"{name} can't be {what}: {message}{stop}") from error
