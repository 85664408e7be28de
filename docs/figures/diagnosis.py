"""The figures and listings of docs/diagnosis.md, and the first picture of the README.

    python docs/figures/diagnosis.py       # a minute on one core

A small net learns 300 of scikit-learn's digits with dropout at three sites. It is diagnosed after 60
and after 600 steps, with 800 other digits as validation data. Writes diagnosis.png (all panels) and
diagnosis-sites.png (three of them, for a narrow screen) beside itself, and prints the later diagnosis
and the comparison. The number of masks is fixed, so the figures are the same every time.
"""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import undrop
from undrop.diagnosis.report.plots import panels
from undrop.report.figures import new_figure, save, styled

HERE = Path(__file__).parent
STEPS = (60, 600)
LEARNING_RATE = 0.1
MASKS = 400


def draw_sites(diagnosis: undrop.Diagnosis, path: Path) -> None:
    """The first three panels, one above the other."""
    chosen = list(panels(diagnosis).items())[:3]
    figure = new_figure(5.0, 6.2)
    with styled():
        for axes, (title, panel) in zip(figure.subplots(len(chosen)), chosen, strict=True):
            panel(diagnosis, axes)
            axes.set_title(title)
    save(figure, path)


def main() -> None:
    """Train, diagnose twice, draw and print."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = (torch.tensor(column) for column in load_digits(return_X_y=True))
    images = images.float() / 16
    order = torch.randperm(len(images))
    train, rest = order[:300], order[300:1100]
    batches, held_out = (
        [(images[rows], labels[rows]) for rows in part.split(50)] for part in (train, rest)
    )
    model = nn.Sequential(
        *(nn.Dropout(0.1), nn.Linear(64, 128), nn.ReLU()),
        *(nn.Dropout(0.3), nn.Linear(128, 128), nn.ReLU()),
        *(nn.Dropout(0.5), nn.Linear(128, 10)),
    )
    objective, found = undrop.Dropout(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(1, STEPS[-1] + 1):
        rows = train[torch.randint(len(train), (50,))]
        objective(model, images[rows], labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in STEPS:
            generator = torch.Generator().manual_seed(0)
            how = {"optimizer": optimizer, "draws": MASKS, "generator": generator}
            found.append(undrop.diagnose(model, batches, validation=held_out, seconds=6000, **how))
    before, after = found
    print(after, before.compare(after), sep="\n\n")
    after.plot(HERE / "diagnosis.png")
    draw_sites(after, HERE / "diagnosis-sites.png")


if __name__ == "__main__":
    main()
