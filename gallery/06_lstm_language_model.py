# %% [markdown]
# # An LSTM language model
#
# undrop contains the models, corpora and training loop of the paper's experiments. This notebook trains a small LSTM on
# the text of Python's manual. Python includes this text, so the notebook needs no download.

# %%
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from undrop.lab.train import configure, run

settings = {
    "model": {"name": "awd-lstm", "embedding_size": 48, "hidden_size": 64, "layers": 1},
    "data": {"name": "pydocs", "batch_size": 10, "length": 25, "limit_tokens": 10_000},
    "optimizer": {"name": "sgd", "lr": 10.0, "clip": 0.35},
    "train": {"epochs": 12, "threads": 1},
}

# %% [markdown]
# You can write a configuration as a preset, a dictionary, `key=value` strings, or all three. undrop checks it before
# anything runs. A misspelled name raises an error that suggests the right one.

# %%
methods = {
    "no regularization": {"name": "none"},
    "dropout": {"name": "dropout"},
    "Analytic": {"name": "analytic"},
}
folder = Path(tempfile.mkdtemp())
shared = ["model.input_dropout=0.3", "model.output_dropout=0.3", "model.weight_dropout=0.3"]
shared += ["data.max_vocab=1000", "data.eval_tokens=3000"]
results = {}
for title, objective in methods.items():
    config = configure(None, {**settings, "objective": objective}, shared)
    results[title] = run(config, out=folder / objective["name"])

# %% [markdown]
# A run's folder contains its metrics as JSON lines, one for each epoch. The commands `undrop runs`, `undrop plot` and
# `undrop diagnose FOLDER` read the same folders.

# %%
figure, axes = plt.subplots(figsize=(6, 3.6))
for (title, summary), style in zip(results.items(), ("o-", "s--", "d:"), strict=True):
    lines = (folder / methods[title]["name"] / "metrics.jsonl").read_text().splitlines()
    epochs = [row for row in map(json.loads, lines) if row["kind"] == "epoch"]
    axes.plot(
        [row["epoch"] for row in epochs], [row["valid_ppl"] for row in epochs], style, label=title
    )
    print(f"{title:18} best validation perplexity {summary.best_valid_ppl:.1f}")
axes.set(xlabel="epoch", ylabel="validation perplexity")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# Without regularization the LSTM overfits after epoch 7. Dropout and `Analytic` keep improving.
