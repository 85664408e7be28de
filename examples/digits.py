"""A convolutional net with Dropout2d on scikit-learn's handwritten digits (no download).

pip install '.[examples]' && python examples/digits.py
"""

import argparse
import statistics

import torch
from sklearn.datasets import load_digits
from torch import nn

import undrop


def digits(seed, training):
    """Split the digits: a random selection for training, and the rest for testing."""
    x, y = (torch.tensor(column) for column in load_digits(return_X_y=True))
    x = x.float().view(-1, 1, 8, 8) / 16
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, test = order[:training], order[training:]
    return (x[train], y[train]), (x[test], y[test])


def net():
    return nn.Sequential(
        *(nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.2), nn.MaxPool2d(2)),
        *(nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.3), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(192, 10)),
    )


def accuracy(objective, seed, steps):
    (x, y), (test_x, test_y) = digits(seed, training=200)
    torch.manual_seed(seed)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        batch = torch.randint(len(x), (50,))
        objective(model, x[batch], y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return 100 * float((model.eval()(test_x).argmax(-1) == test_y).float().mean())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)  # enough for a net this small
    print(undrop.sites(net(), torch.randn(1, 1, 8, 8)))
    print(f"\n{'objective':16} {'test accuracy':>13} {'over seeds':>14}")
    for objective in (undrop.NoRegularization, undrop.Dropout, undrop.Analytic):
        percent = [accuracy(objective(), seed, options.steps) for seed in range(options.seeds)]
        spread = f"{min(percent):.1f} to {max(percent):.1f}"
        print(f"{objective.__name__:16} {statistics.mean(percent):12.1f}% {spread:>14}")


if __name__ == "__main__":
    main()
