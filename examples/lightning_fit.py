"""Lightning: two lines in training_step, and a callback that logs the parts and saves the state.

pip install '.[lightning]' && python examples/lightning_fit.py
"""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import undrop
from undrop.integrations.lightning import UndropCallback


def data(n, seed):
    """The class is the largest of the first four inputs, up to noise; the other 26 are irrelevant."""
    torch.manual_seed(seed)
    x = torch.randn(n, 30)
    return TensorDataset(x, (x[:, :4] + 0.5 * torch.randn(n, 4)).argmax(-1))


class Classifier(lightning.LightningModule):
    def __init__(self, objective):
        super().__init__()
        hidden = [nn.Linear(30, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU()]
        self.net = nn.Sequential(*hidden, nn.Dropout(0.5), nn.Linear(64, 4))
        self.objective = objective

    def training_step(self, batch, index):
        step = self.objective(self.net, *batch)
        return {"loss": step.total, "parts": step.parts}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def configure_callbacks(self):
        return [UndropCallback(self.objective)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"max_epochs": parser.parse_args().epochs, **dict.fromkeys(off, False)}
    torch.set_num_threads(1)  # enough for a net this small
    x, y = data(4000, 2).tensors
    print(f"{'objective':16} {'accuracy':>8}   last step")
    for objective in (undrop.NoRegularization, undrop.Dropout, undrop.Analytic):
        loader, model = DataLoader(data(1000, 1), 64, shuffle=True), Classifier(objective())
        trainer = lightning.Trainer(accelerator="cpu", **options)
        trainer.fit(model, loader)
        accuracy = float((model.eval().net(x).argmax(-1) == y).float().mean())
        parts = ", ".join(f"{k} {v:.3f}" for k, v in trainer.callback_metrics.items())
        print(f"{objective.__name__:16} {accuracy:8.3f}   {parts}")


if __name__ == "__main__":
    main()
