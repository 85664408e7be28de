"""The names that options accept, with one line about each, for lists and shell completion.

Nothing here imports torch, so undrop refuses a wrong name, and completes a name in the shell, in a
fraction of a second. A test compares these names with the registries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from undrop.errors import UnknownNameError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Names = Mapping[str, str]
"""Names, and one line about each."""

MODELS = {
    "awd-lstm": "LSTM layers with DropConnect and locked dropout (Merity et al. 2018)",
    "qrnn": "Quasi-recurrent layers with the dropouts of AWD-LSTM (Bradbury et al. 2017)",
    "transformer-xl": "A transformer that attends to earlier windows too (Dai et al. 2019)",
    "gpt": "A causal transformer like GPT-2 (Radford et al. 2019)",
}
"""The language models."""

OBJECTIVES = {
    "none": "The loss alone, with every dropout of the model switched off",
    "l2": "The loss plus weight · Σ ‖W‖² over all trainable parameters, without dropout",
    "dropout": "Plain dropout; the option k averages the loss over k masks (Algorithm 1)",
    "drop-k": "Dropout averaged over k = 8 masks",
    "drop-k-resampled": "drop-k plus the noise that averaging removes, from fresh masks (Sec. 3.1)",
    "drop-k-analytic": "drop-k plus the noise that averaging removes, as ξ_approx (Algorithm 4)",
    "analytic": "R_approx and ξ_approx in place of dropout (Algorithm 2)",
    "explicit": "R_approx alone in place of dropout",
    "implicit": "ξ_approx alone in place of dropout",
    "r-drop": "Dropout with two masks, plus the distance between their predictions "
    "(Liang et al. 2021)",
    "jacobian": "½·weight·‖∂F/∂h‖² at one activation h, without dropout (Hoffman et al. 2019)",
    "sam": "Sharpness-aware minimization, on top of dropout (Foret et al. 2021)",
    "weight-noise": "Noise on the weights in both directions, without dropout (Zhang et al. 2024)",
    "early-dropout": "Dropout for the first `until` steps, and none after (Liu et al. 2023)",
}
"""The objectives."""

CORPORA = {
    "pydocs": "The language reference that comes with Python; no download",
    "ptb": "Penn Treebank: news, with a vocabulary of 10,000 words",
    "wikitext-2": "720 good and featured articles of Wikipedia",
    "wikitext-103": "28,595 good and featured articles of Wikipedia",
}
"""The named corpora."""

BENCH_MODELS = {
    "awd-lstm": "AWD-LSTM; the paper's size is its model for Penn Treebank",
    "transformer": "A causal transformer; the paper's size has the widths of its Transformer-XL",
    "mlp": "A classifier with two hidden layers",
    "mlp-64": "A classifier with two hidden layers of 64 units, batch 32",
    "mlp-256": "A classifier with two hidden layers of 256 units, batch 64",
    "lstm-100": "The language model of the small reproduction: 2 × 100 units, 1,000 words",
    "convnet": "Two convolutions with max pooling, and dropout before the last layer",
    "gpt-128": "A causal transformer: 4 layers of 128 features, 2,000 words",
    "gpt-256": "A causal transformer: 4 layers of 256 features, 2,000 words",
    "gpt-128-compiled": "gpt-128 under torch.compile",
    "gpt-256-compiled": "gpt-256 under torch.compile",
}
"""The models that ``undrop bench`` times."""

BENCH_METHODS = {
    "none": "The loss alone",
    "dropout": "The baseline: a step of plain PyTorch with dropout, without undrop",
    "drop8": "Dropout averaged over 8 masks",
    "reverse-explicit": "The explicit part, by the reverse engine",
    "reverse-both": "Both parts, by the reverse engine",
    "tangent-both": "Both parts, by the tangent engine",
    "antithetic-both": "Both parts, by the antithetic engine",
    "antithetic-both-quarter": "Both parts, with noise on a quarter of the batch",
    "antithetic-both-eighth": "Both parts, with noise on an eighth of the batch",
}
"""The methods that ``undrop bench`` times."""

_PRESETS = Path(__file__).parents[2] / "presets"


@cache
def presets() -> Names:
    """Return the presets of ``undrop train``."""
    return {
        file.stem: tomllib.loads(file.read_text(encoding="utf-8"))["description"]
        for file in sorted(_PRESETS.glob("*.toml"), key=lambda file: file.stem)
    }


@cache
def experiments() -> Names:
    """Return the experiments of ``undrop reproduce``, the paper's first."""
    from undrop.lab.reproduce.tables import EXPERIMENTS, experiment

    return {name: experiment(name).title for name in EXPERIMENTS}


def check_name(kind: str, name: str | None, names: Names, hint: str = "") -> None:
    """Refuse an unknown name; None is fine.

    Raises:
        UnknownNameError: with the nearest name and a list of all names.
    """
    if name is not None and name not in names:
        raise UnknownNameError(kind, name, names, hint)


def check_corpus(name: str | None, data_dir: Path | None = None) -> None:
    """Refuse a name that is neither a corpus nor a folder.

    Raises:
        UnknownNameError: with the nearest name and a list of all names.
    """
    if name is None or name != Path(name).name or Path(name).is_dir():
        return
    if data_dir is None or not (data_dir / name).is_dir():
        hint = ", or give a folder with train, valid and test text files"
        check_name("corpus", name, CORPORA, hint)


def named(
    kind: str,
    names: Names | Callable[[], Names],
    unless: Callable[[str], bool] | None = None,
    hint: str = "",
) -> dict[str, Any]:
    """Return the arguments of a typer option whose value is one name or several.

    The shell completes the names. A wrong name is refused before anything is imported.

    Args:
        kind: what the names stand for, in errors.
        names: the names, or a function that reads them from files.
        unless: tells whether a value is something other than a name, such as a path.
        hint: what else the option accepts, as the end of the error.
    """

    def known() -> Names:
        return names() if callable(names) else names

    def complete(incomplete: str) -> list[tuple[str, str]]:
        return [item for item in known().items() if item[0].startswith(incomplete)]

    def check(value: Any) -> Any:
        for name in value if isinstance(value, list | tuple) else [value]:
            if unless is None or name is None or not unless(name):
                check_name(kind, name, known(), hint)
        return value

    return {"autocompletion": complete, "callback": check}
