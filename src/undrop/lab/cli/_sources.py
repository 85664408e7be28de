"""From a run's folder, or from names, to what a study needs: a model, batches, a loss."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from undrop.errors import OptionError, UndropError
from undrop.lab.corpora.batching import TrainingWindows, Window
from undrop.lab.corpora.encode import Tokens
from undrop.lab.models import LanguageModel
from undrop.lab.train import MODELS, Config, configure
from undrop.lab.train.runs import Run, open_run
from undrop.losses import Loss

__all__ = ["Source", "from_names", "from_run", "windows"]


@dataclass(frozen=True)
class Source:
    """What ``undrop.diagnose`` is called with."""

    model: nn.Module
    batches: Iterable[tuple[Any, Any]]
    loss: Loss | Callable[[Tensor, Any], Tensor] | None
    classes: Sequence[str] | None = None
    batch_dim: int = 0
    run: Run | None = None
    """The run it is of, if it is."""


def windows(
    model: LanguageModel,
    tokens: Tokens,
    config: Config,
    count: int,
    *,
    logits: bool = False,
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Windows of text, evenly spread over a split, each with the state that the one before leaves.

    Args:
        model: reads the window before, in eval mode.
        tokens: the split.
        config: says how the text is cut.
        count: the number of windows; fewer where the split is short.
        logits: whether the model is to return logits, or the features that its own loss takes.
    """
    device = next(model.parameters()).device
    length = config.data.length
    pieces = TrainingWindows(tokens, config.data.batch_size, length)
    most = max(1, pieces.steps // length - 1)
    for index in range(min(count, most)):
        position = length * (1 + index * most // min(count, most))
        before = _at(pieces, position - length, device)
        window = _at(pieces, position, device) if position < pieces.steps else before
        state = None if window is before else _state_after(model, before)
        yield {"tokens": window.inputs, "state": state, "logits": logits}, window.targets


def _at(pieces: TrainingWindows, position: int, device: torch.device) -> Window:
    pieces.load_state_dict({"position": position, "generator": None})
    window = next(iter(pieces))
    return Window(window.inputs.to(device), window.targets.to(device), window.scale)


@torch.no_grad()
def _state_after(model: LanguageModel, window: Window) -> Any:
    training = model.training
    model.eval()
    try:
        _, state = model(window.inputs, None, logits=False)
    finally:
        model.train(training)
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, state)


def from_run(path: str | Path, *, data_dir: str | Path | None = None, batches: int = 16) -> Source:
    """A trained run on its own training text."""
    run = open_run(path, data_dir=data_dir)
    return _of_language_model(run.model, run.corpus, run.config, batches, run)


def from_names(
    model: str,
    data: str,
    *,
    loss: str | None = None,
    data_dir: str | Path | None = None,
    batches: int = 16,
) -> Source:
    """A model and data by name: of undrop's own, or ``module:name`` of one's own.

    Args:
        model: a language model such as ``awd-lstm``, newly initialised; or ``module:name`` of a module
            or of a function that returns one.
        data: a corpus, for a language model; or ``module:name`` of batches (inputs, targets) or of a
            function that returns them.
        loss: ``module:name`` of a loss; cross-entropy unless given.
        data_dir: where the corpus is.
        batches: windows of a corpus to take.

    Raises:
        OptionError: if a name can't be found, or the two do not fit each other.
    """
    if ":" not in model and ":" not in data:
        where = None if data_dir is None else str(data_dir)
        config = configure(None, {"model": {"name": model}, "data": {"name": data, "dir": where}})
        corpus = config.load_corpus()
        built = config.build_model(corpus)
        return _of_language_model(built, corpus, config, batches, None)
    if ":" not in model or ":" not in data:
        raise OptionError(_misfit(model, data))
    found = _made(model)
    if not isinstance(found, nn.Module):
        raise OptionError(
            f"{model} must be a torch module or make one, got {type(found).__name__}."
        )
    return Source(found, _made(data), None if loss is None else _imported(loss))


def _misfit(model: str, data: str) -> str:
    """What to say where only one of the two is of one's own."""
    if ":" in model:
        return (
            f"a model of one's own needs data of one's own: give both as module:name, got {model!r} "
            f"and {data!r}."
        )
    if model in MODELS:
        return (
            f"{model} is a language model of undrop's own, which reads a corpus: give the corpus's "
            f"name or folder as data, got {data!r}."
        )
    return (
        f"{model!r} is none of undrop's models ({', '.join(MODELS)}): one of your own is "
        f"given as module:name, such as {model}:model."
    )


def _of_language_model(
    model: LanguageModel, corpus: Any, config: Config, batches: int, run: Run | None
) -> Source:
    return Source(
        model,
        windows(model, corpus.train, config, batches),
        model.loss(),
        classes=corpus.vocabulary.words,
        batch_dim=1,
        run=run,
    )


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it
    with _told(name, "imported"):
        return getattr(importlib.import_module(module), attribute)


def _made(name: str) -> Any:
    """What a name stands for, called if it is a function."""
    found = _imported(name)
    if isinstance(found, nn.Module) or not callable(found):
        return found
    with _told(name, "called"):
        return found()


@contextmanager
def _told(name: str, what: str) -> Iterator[None]:
    """Turn whatever code of one's own raises, whose kinds nobody knows, into one sentence."""
    try:
        yield
    except UndropError:
        raise
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split()).rstrip(".")
        if not isinstance(error, ImportError | AttributeError):  # their messages say what they are
            message = f"{type(error).__name__}: {message}; --debug shows where"
        raise OptionError(f"{name} can't be {what}: {message}.") from error
