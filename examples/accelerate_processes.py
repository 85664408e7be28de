"""Accelerate with several processes: your own loop, and accelerator.backward on the step's total.

pip install '.[transformers]'
torchrun --standalone --nproc-per-node 2 examples/accelerate_processes.py
"""

import argparse
import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import undrop


def data(n, seed):
    """The class is the largest of the first four inputs, up to noise; the other 26 are irrelevant."""
    torch.manual_seed(seed)
    x = torch.randn(n, 30)
    return TensorDataset(x, (x[:, :4] + 0.5 * torch.randn(n, 4)).argmax(-1))


def train(accelerator, objective, epochs):
    loader = DataLoader(data(1000, 1), batch_size=32, shuffle=True)
    hidden = [nn.Linear(30, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU()]
    net = nn.Sequential(*hidden, nn.Dropout(0.5), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    accelerator.register_for_checkpointing(objective)  # save_state saves its generators too
    for _ in range(epochs):
        for x, y in loader:
            step = objective(model, x, y)
            accelerator.backward(step.total)
            optimizer.step()
            optimizer.zero_grad()
    return net.eval(), step.parts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args().epochs
    accelerator = Accelerator(cpu=True)
    accelerator.print(f"{accelerator.num_processes} processes")
    accelerator.print(f"{'objective':16} {'accuracy':>8}   last step of the first process")
    x, y = data(4000, 2).tensors
    for objective in (undrop.NoRegularization, undrop.Dropout, undrop.Analytic):
        net, parts = train(accelerator, objective(), epochs)
        with torch.no_grad():
            accuracy = float((net(x).argmax(-1) == y).float().mean())
        logged = ", ".join(f"{k} {v:.3f}" for k, v in parts.items())
        accelerator.print(f"{objective.__name__:16} {accuracy:8.3f}   {logged}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo that still holds a tensor would abort Python when it shuts down
