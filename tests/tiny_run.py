"""A training run of about a second: its text, its config, and the results that must be exact."""

import json
import random

from safetensors.torch import load_file

from undrop.lab import train


def write_text(folder):
    """Write three splits of a language in which each word depends on the one before."""
    draw = random.Random(1)
    words = [f"w{i}" for i in range(30)]
    for split, length in (("train", 600), ("valid", 100), ("test", 100)):
        word, lines = 0, []
        for _ in range(length // 10):
            line = []
            for _ in range(9):
                word = (word * 7 + draw.choice((1, 1, 2, 5))) % len(words)
                line.append(words[word])
            lines.append(" ".join(line))
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def tiny_config(text, **sections):
    """Return the config of the run; pass settings as ``section={key: value}``."""
    settings = {
        "model": {"embedding_size": 8, "hidden_size": 8, "layers": 2},
        "data": {"name": str(text), "batch_size": 4, "eval_batch_size": 4, "length": 10},
        "optimizer": {"lr": 5.0, "clip": 0.35},
        "train": {"epochs": 2, "log_every": 7, "checkpoint_every": 10, "threads": 1},
    }
    for section, values in sections.items():
        settings = train.merge(settings, {section: values})
    return train.Config.parse(settings)


def bits(out):
    """Return all results of a run that must not depend on whether, or when, it was killed."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        del record["time"]
    summary = json.loads((out / "summary.json").read_text())
    del summary["seconds"]
    folder = train.RunFolder(out)
    state = folder.checkpoints.load(folder.checkpoints.steps()[-1])
    parameters = {name: value.tolist() for name, value in state["model"].items()}
    best = {name: value.tolist() for name, value in load_file(out / "best.safetensors").items()}
    return {"metrics": records, "summary": summary, "parameters": parameters, "best": best}
