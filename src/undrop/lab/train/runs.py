"""Existing runs: their results, curves and trained models, and text sampled from these models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from undrop.errors import CheckpointError, OptionError, RunError, UndropError, UnknownNameError
from undrop.lab.corpora import EOS, Corpus, Vocabulary
from undrop.lab.models import LanguageModel, State
from undrop.lab.train.config import Config
from undrop.lab.train.environment import find_device
from undrop.lab.train.folder import RunFolder
from undrop.report import Table
from undrop.report.figures import line_style, literal, new_figure, save, styled
from undrop.report.html import fragment
from undrop.report.plain import as_frame

_HIDDEN_COLUMNS = ["kind", "epoch", "time"]


@dataclass(frozen=True)
class Run:
    """A run with the weights of its best epoch."""

    config: Config
    corpus: Corpus
    model: LanguageModel
    folder: RunFolder

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row for each epoch: perplexities, losses and seconds."""
        epochs = self.folder.metrics.epochs()
        rows = [{**record, **record["time"]} for record in epochs]
        return as_frame(rows, [record["epoch"] for record in epochs]).drop(columns=_HIDDEN_COLUMNS)

    def _repr_html_(self) -> str:
        """Return the most important settings and the results as a table, for a notebook."""
        rows = [
            ("model", self.config.model.name),
            ("parameters", f"{sum(p.numel() for p in self.model.parameters()):,}"),
            ("corpus", self.corpus.name),
            ("objective", self.config.objective.name),
            ("learning rate", f"{self.config.optimizer.lr:g}"),
            ("epochs", str(self.config.train.epochs)),
            ("seed", str(self.config.train.seed)),
        ]
        results = describe_run(self.folder)
        for name, key in (("validation", "best_valid_ppl"), ("test", "test_ppl")):
            if results.get(key):
                rows.append((f"{name} perplexity", f"{results[key]:.2f}"))
        return fragment(Table(("setting", "value"), rows, title="A run, at its best epoch").html())


def open_run(path: str | Path, *, data_dir: str | Path | None = None) -> Run:
    """Open a run: its config, its corpus, and its model with the best weights, in eval mode.

    Args:
        path: the run's folder.
        data_dir: the folder of the corpus, if the corpus has moved since the run.

    Raises:
        RunError: if the folder holds no run, or a run without a completed epoch.
        CheckpointError: if the weights do not fit the config and the corpus.
    """
    folder = RunFolder(path)
    config = Config.parse(folder.read_config())
    weights = folder.read_best()
    if data_dir is not None:
        data = config.data.model_copy(update={"dir": str(data_dir)})
        config = config.model_copy(update={"data": data})
    corpus = config.load_corpus()
    model = config.build_model(corpus, find_device(config.train.device))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights in {folder.path} do not fit its config.json and the corpus {corpus.name}, or "
            "were modified."
        ) from error
    return Run(config, corpus, model.eval(), folder)


def find_runs(root: str | Path) -> Iterator[RunFolder]:
    """Yield all runs in a folder and its subfolders; the folder itself can be a run.

    Raises:
        RunError: if the folder does not exist.
    """
    root = Path(root)
    if not root.is_dir():
        raise RunError(
            f"there is no folder {root}: give a folder of runs; by default, `undrop train` writes to "
            "runs/ in the current folder."
        )
    for config in sorted(root.rglob("config.json")):
        yield RunFolder(config.parent)


def describe_run(folder: RunFolder) -> dict[str, Any]:
    """Return one row of a list of runs: the settings, the status and the results of a run."""
    try:
        return _describe(folder)
    except (UndropError, LookupError, TypeError, ValueError) as error:
        return {"path": str(folder.path), "status": f"unreadable: {error}"}


def _describe(folder: RunFolder) -> dict[str, Any]:
    config, summary = Config.parse(folder.read_config()), folder.read_summary()
    epochs = folder.metrics.epochs()
    best = min(epochs, key=lambda record: float(record["valid_loss"]), default=None)
    running = folder.holder() is not None
    return {
        "path": str(folder.path),
        "status": "running" if running else "stopped" if summary is None else "finished",
        "preset": config.preset,
        "model": config.model.name,
        "data": config.data.name,
        "objective": config.objective.name,
        "seed": config.train.seed,
        "epochs": len(epochs),
        "planned_epochs": config.train.epochs,
        "best_valid_ppl": None if best is None else best["valid_ppl"],
        "best_epoch": None if best is None else best["epoch"],
        "test_ppl": None if summary is None else summary["test_ppl"],
        "seconds": epochs[-1]["time"]["seconds"] if epochs else 0.0,
    }


@torch.no_grad()
def sample(
    model: LanguageModel,
    vocabulary: Vocabulary,
    *,
    prompt: str = "",
    words: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[str]:
    """Draw words from softmax(logits / temperature); each word is the input for the next one.

    Args:
        model: a language model, in eval mode.
        vocabulary: the words of the model.
        prompt: the beginning of the text, which is not returned. An ``<eos>`` precedes it.
        words: the number of words to draw.
        temperature: below 1 sharpens the distribution, above 1 flattens it; 0 always takes
            the most likely word.
        top_k: draw only from the ``top_k`` most likely words.
        generator: the source of random numbers.
    """
    if not 0.0 <= temperature < float("inf"):
        raise OptionError(f"temperature must be finite and not negative, got {temperature}.")
    if words < 0 or (top_k is not None and top_k < 1):
        raise OptionError(f"words must be at least 0 and top_k at least 1, got {words}, {top_k}.")
    device = next(model.parameters()).device
    tokens = [vocabulary.index[EOS], *vocabulary.encode(prompt).tolist()]
    state: State | None = None
    for _ in range(words):
        window = tokens[-model.context :] if model.context else tokens
        output, state = model(torch.tensor(window, device=device)[:, None], state)
        logits = output[-1, 0].float().cpu()
        top_logits, top_words = logits.topk(min(top_k or len(logits), len(logits)))
        if temperature == 0.0:
            choice = top_logits.argmax()
        else:
            probabilities = (top_logits / temperature).softmax(-1)
            choice = torch.multinomial(probabilities, 1, generator=generator)
        word = int(top_words[choice])
        yield vocabulary.words[word]
        # The state contains the earlier words; a model without a state reads them again.
        tokens = [word] if state else [*tokens, word]


_LABELS = {
    "valid_ppl": "validation perplexity",
    "test_ppl": "test perplexity",
    "train_ppl": "training perplexity without noise",
    "loss": "training loss",
    "explicit": "explicit part",
    "implicit": "implicit part",
    "gradient_norm": "gradient norm",
    "lr": "learning rate",
}


def plot_curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, *, value: str = "valid_ppl"
) -> None:
    """Plot a value over the epochs of several runs, and save the figure.

    Args:
        runs: the epoch records of each run; the keys are the names in the legend.
        path: where to save the figure; the suffix is the format (png, pdf, svg).
        value: a key of the epoch records.

    Raises:
        OptionError: if ``value`` is unknown, or the suffix is not an image format.
        RunError: if no epoch has the value.
        MissingExtraError: if matplotlib is not installed.
    """
    if value not in _LABELS:
        raise UnknownNameError("curve", value, _LABELS)
    points = {
        name: [(r["epoch"], r[value]) for r in records if r.get(value) is not None]
        for name, records in runs.items()
    }
    if not any(points.values()):
        raise RunError(f"there is nothing to plot: no epoch of these runs has {value}.")
    figure = new_figure(7.0, 4.5)
    with styled():
        axes: Any = figure.add_subplot()
        for index, (name, line) in enumerate(points.items()):
            style = {**line_style(index), "markevery": max(1, len(line) // 10), "markersize": 5}
            axes.plot([x for x, _ in line], [y for _, y in line], label=literal(name), **style)
        values = [y for line in points.values() for _, y in line]
        if value.endswith("_ppl") and max(values) > 3.0 * min(values):
            # Cut off the large values of the first epochs, which would flatten the rest of the curves.
            axes.set_ylim(0.95 * min(values), 3.0 * min(values))
        axes.set(xlabel="epoch", ylabel=_LABELS[value])
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()
    save(figure, path)
