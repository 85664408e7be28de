"""Your own loop: train a net without dropout, with dropout, and with Analytic in place of dropout.

python examples/plain_loop.py
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import undrop


def data(n, seed):
    """The class is the largest of the first four inputs, up to noise; the other 26 are irrelevant."""
    torch.manual_seed(seed)
    x = torch.randn(n, 30)
    return x, (x[:, :4] + 0.5 * torch.randn(n, 4)).argmax(-1)


def train(objective, seed, steps):
    x, y = data(1000, seed=1)
    torch.manual_seed(seed)
    hidden = [nn.Linear(30, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Dropout(0.5), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        batch = torch.randint(len(x), (64,))
        step = objective(model, x[batch], y[batch])
        step.backward()
        optimizer.step()
        optimizer.zero_grad()
    x, y = data(4000, seed=2)
    with torch.no_grad():
        logits = model.eval()(x)
    accuracy = (logits.argmax(-1) == y).float().mean()
    return float(accuracy), float(cross_entropy(logits, y)), step.parts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)  # enough for a net this small
    print(f"{'objective':16} {'accuracy':>8} {'test loss':>9}   last step")
    for objective in (undrop.NoRegularization, undrop.Dropout, undrop.Analytic):
        runs = [train(objective(), seed, options.steps) for seed in range(options.seeds)]
        accuracy, loss = (sum(run[i] for run in runs) / len(runs) for i in range(2))
        parts = ", ".join(f"{name} {value:.3f}" for name, value in runs[-1][2].items())
        print(f"{objective.__name__:16} {accuracy:8.3f} {loss:9.3f}   {parts}")


if __name__ == "__main__":
    main()
