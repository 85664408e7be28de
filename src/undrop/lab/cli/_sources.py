"""Load the model, the data and the loss that a command examines, from a run or by name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
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
from undrop.lab.cli._options import SourceOptions
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
    """A model that a command examines, with its data and its loss."""

    model: nn.Module
    batches: Iterable[tuple[Any, Any]]
    loss: Loss | Callable[[Tensor, Any], Tensor] | None
    classes: Sequence[str] | None = None
    batch_dim: int = 0
    validation: Iterable[tuple[Any, Any]] | None = None
    run: Run | None = None
    """The run of the model, if it is a trained one."""
    optimizer: torch.optim.Optimizer | None = None
    """A new optimizer with the settings of the run."""
    import_paths: tuple[str, str] | None = None
    """The import paths of the user's own model and data."""

    @contextmanager
    def explain_user_errors(self) -> Iterator[None]:
        """If the user's own model fails even without undrop, say so in one sentence."""
        try:
            yield
        except UndropError:
            raise
        except Exception:
            if self.import_paths is not None:
                model, data = self.import_paths
                ((inputs, _),) = collect(load_user_object(data), 1)
                with _one_sentence_errors(model, "called on the first batch"):
                    call(self.model, inputs)
            raise


def windows(
    model: LanguageModel, tokens: Tokens, config: Config, count: int, *, logits: bool = False
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield windows of text, spread evenly over a split.

    A window's state is the one that the model has, in eval mode, after the preceding window of the text.

    Args:
        model: the language model.
        tokens: the split.
        config: the settings that cut the text into windows.
        count: the number of windows; a short split has fewer.
        logits: whether the model returns logits, instead of the features that its own loss takes.
    """
    device = next(model.parameters()).device
    length = config.data.length
    text = TrainingWindows(tokens, config.data.batch_size, length)
    available = max(1, text.steps // length - 1)
    count = min(count, available)
    for index in range(count):
        start = length * (1 + index * available // count)
        state, window = None, text.window(start - length, start)
        if start < text.steps:
            state = _state_after(model, window.inputs.to(device))
            window = text.window(start, start + length)
        inputs = {"tokens": window.inputs.to(device), "state": state, "logits": logits}
        yield inputs, window.targets.to(device)


@torch.no_grad()
def _state_after(model: LanguageModel, tokens: Tensor) -> State:
    """Return the model's state after a window, in eval mode."""
    training = model.training
    model.eval()
    try:
        return detach(model(tokens, None, logits=False)[1])
    finally:
        model.train(training)


def from_run(path: Path, data_dir: Path | None, batches: int) -> Source:
    """Load the model and the text of a run."""
    run = open_run(path, data_dir=data_dir)
    return _from_language_model(run.model, run.corpus, run.config, batches, run)


def from_names(options: SourceOptions, batches: int) -> Source:
    """Load one of undrop's language models and a corpus, or the user's own model, data and loss.

    A language model is newly initialized, and at most ``batches`` windows of the corpus are read. The
    user's own objects are named by import paths, MODULE:NAME or FILE.py:NAME. The model is a torch
    module, and the data are batches (inputs, targets); a function that returns them works too.

    Raises:
        OptionError: if an import path names nothing, or the model is not a module.
    """
    model, data = str(options.model), str(options.data)
    if ":" not in model:
        folder = options.data_dir and str(options.data_dir)
        config = configure(None, {"model": {"name": model}, "data": {"name": data, "dir": folder}})
        corpus = config.load_corpus()
        return _from_language_model(config.build_model(corpus), corpus, config, batches)
    user_model = load_user_object(model)
    if not isinstance(user_model, nn.Module):
        raise OptionError(
            f"{model} must be a torch module or a function that returns one, got "
            f"{type(user_model).__name__}."
        )
    user_loss = None if options.loss is None else _load_loss(options.loss)
    return Source(user_model, load_user_object(data), user_loss, import_paths=(model, data))


def _from_language_model(
    model: LanguageModel, corpus: Corpus, config: Config, batches: int, run: Run | None = None
) -> Source:
    """Return the source whose batches are windows of the corpus."""
    optimizer = None if run is None else clipped_optimizer(model, config.optimizer)
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


def load_user_object(import_path: str) -> Any:
    """Import an object; if it is callable and not a module, call it and return the result."""
    imported = _import_object(import_path)
    if isinstance(imported, nn.Module) or not callable(imported):
        return imported
    with _one_sentence_errors(import_path, "called"):
        return imported()


def _load_loss(import_path: str) -> Any:
    """Import a loss: an instance or a function, or a class that needs no arguments."""
    imported = _import_object(import_path)
    if not isinstance(imported, type):
        return imported
    required = [
        parameter.name
        for parameter in inspect.signature(imported).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required:
        raise OptionError(
            f"{import_path} is a class with the argument {required[0]!r}: give the path of an instance "
            "or a function, such as a variable of your own file."
        )
    with _one_sentence_errors(import_path, "called"):
        return imported()


def _import_object(import_path: str) -> Any:
    """Import the object of an import path, MODULE:NAME or FILE.py:NAME."""
    place, _, name = import_path.rpartition(":")
    with _one_sentence_errors(import_path, "imported"):
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    if hasattr(module, name):
        return getattr(module, name)
    public = [variable for variable in vars(module) if not variable.startswith("_")]
    near = get_close_matches(name, public, n=1)
    guess = f"did you mean {place}:{near[0]}?" if near else "give the name of something in it."
    raise OptionError(f"{place} has no {name!r}: {guess}")


def _import_module(name: str) -> ModuleType:
    _make_importable(Path.cwd())
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        near = near_path(Path(f"{name}.py"), "*.py")
        raise ImportError(f"No module named {name!r}{_did_you_mean(near and near.stem)}")
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """Import a file by its path; it can import the modules in its folder."""
    if not path.is_file():
        raise ImportError(f"there is no file {path}{_did_you_mean(near_path(path, '*.py'))}")
    _make_importable(path.absolute().parent)
    imported = sys.modules.get(path.stem)
    if imported is not None and getattr(imported, "__file__", None) == str(path.absolute()):
        return imported
    spec = importlib.util.spec_from_file_location(path.stem, path.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # pickle and dataclasses look the module up here
    spec.loader.exec_module(module)
    return module


def _make_importable(folder: Path) -> None:
    """Make the modules of a folder importable, as ``python -m`` does for the current folder."""
    if str(folder) not in sys.path and not ("" in sys.path and folder == Path.cwd()):
        sys.path.insert(0, str(folder))


def _did_you_mean(near: str | Path | None) -> str:
    return f"; did you mean {near}?" if near else ""


@contextmanager
def _one_sentence_errors(import_path: str, action: str) -> Iterator[None]:
    """Raise any exception of the user's code as an ``OptionError`` of one sentence.

    Args:
        import_path: the object of the user.
        action: what fails if there is an exception, such as "imported".
    """
    try:
        yield
    except UndropError:
        raise
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split()).rstrip(".")
        if not isinstance(error, ImportError):  # the message of an ImportError needs no details
            message = f"{type(error).__name__}: {message}; --debug shows where"
        stop = "" if message.endswith("?") else "."
        raise OptionError(f"{import_path} can't be {action}: {message}{stop}") from error
