"""How much of dropout is quadratic, on a trained LSTM: the paper's check in its Appendix A.2.

    python benchmarks/quadratic_share.py --data-dir FOLDER [--epochs 15] [--seconds 120] [--json FILE]

An LSTM is trained on Penn Treebank with dropout of 0.5 on its hidden layers and nowhere else, and
½E[uᵀHu] is set beside R_drop on the training text. The paper has R_drop = 0.053 and a difference of
0.009, hence a share of more than 80 %. Here the corpus is cut to what a core learns in minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

import undrop
from undrop.diagnose import Diagnosis
from undrop.diagnose.sources import from_run
from undrop.train import configure, run

HIDDEN_DROPOUT = 0.5


def quadratic_share(
    data_dir: Path, out: Path, *, epochs: int, seconds: float, tokens: int = 60_000
) -> Diagnosis:
    """Train the LSTM in the folder ``out``, and take its dropout apart."""
    settings = {
        "model": {
            "name": "awd-lstm",
            "layers": 3,
            "input_dropout": 0.0,
            "output_dropout": 0.0,
            "hidden_dropout": HIDDEN_DROPOUT,
        },
        "data": {"dir": str(data_dir), "limit_tokens": tokens},
        "objective": {"name": "dropout"},
        "train": {"epochs": epochs},
    }
    run(configure("ptb-lstm-tiny", settings), out=out)
    source = from_run(out)
    return undrop.diagnose(
        source.model,
        source.batches,
        loss=source.loss,
        classes=source.classes,
        batch_dim=source.batch_dim,
        seconds=seconds,
        generator=torch.Generator().manual_seed(0),
    )


def main() -> None:
    """Train, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = quadratic_share(
            arguments.data_dir,
            Path(folder) / "run",
            epochs=arguments.epochs,
            seconds=arguments.seconds,
        )
    print(found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found.to_json(), indent=2) + "\n")


if __name__ == "__main__":
    main()
