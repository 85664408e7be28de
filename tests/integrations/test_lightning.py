"""Lightning: real fits of a few steps, without loggers, and without files except checkpoints."""

import logging
import sys

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import undrop
from undrop.errors import MissingExtraError, OptionError
from undrop.integrations.lightning import UndropCallback


class Classifier(L.LightningModule):
    def __init__(self, objective: undrop.Objective) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
        self.objective = objective

    def training_step(self, batch, index):
        step = self.objective(self.net, *batch)
        return {"loss": step.total, "parts": step.parts}

    def validation_step(self, batch, index):
        x, y = batch
        self.log("valid", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def configure_callbacks(self):
        return [UndropCallback(self.objective)]


def loader(n: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 4, generator=generator), torch.randint(3, (16,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=n)


def trainer(folder=None, **options) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options = {"max_steps": 3, "enable_checkpointing": False, **options}
    return L.Trainer(default_root_dir=folder, accelerator="cpu", **quiet, **options)


def module(objective: undrop.Objective | None = None) -> Classifier:
    torch.manual_seed(0)
    return Classifier(undrop.Analytic() if objective is None else objective)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def exact() -> undrop.Analytic:
    return undrop.Analytic(engine="exact")


def test_a_lightning_fit_trains_and_logs_that_undrop_is_active(caplog):
    model, before = module(), weights(module())
    fit = trainer()
    with caplog.at_level(logging.WARNING, "undrop"):
        fit.fit(model, loader())
    assert model.objective.steps == 3
    assert not torch.equal(weights(model), before)
    assert {"undrop/loss", "undrop/explicit", "undrop/implicit"} <= fit.callback_metrics.keys()
    assert caplog.text.count("undrop is active: Analytic on Classifier, loss = ") == 1


def test_a_lightning_step_equals_that_of_a_plain_loop():
    model, plain = module(exact()), module(exact())
    trainer(max_steps=1).fit(model, loader())
    plain.objective(plain.net, *next(iter(loader()))).backward()
    expected = torch.cat([(p - 0.5 * p.grad).detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(weights(model), expected)


def test_accumulation_in_lightning_gives_the_step_of_one_large_batch():
    one, two = module(exact()), module(exact())
    trainer(max_steps=2).fit(one, loader(4))
    trainer(max_steps=2, accumulate_grad_batches=2).fit(two, loader(2))
    torch.testing.assert_close(weights(one), weights(two))


def test_validation_in_lightning_is_unchanged():
    model = module()
    fit = trainer(max_steps=4)  # an epoch
    fit.fit(model, loader(), loader(16))
    x, y = next(iter(loader(16)))
    expected = nn.functional.cross_entropy(model.eval().net(x), y)
    torch.testing.assert_close(fit.callback_metrics["valid"], expected.detach())


def test_a_lightning_step_in_mixed_precision_is_close_to_one_in_float32():
    losses = []
    for precision in ("32-true", "bf16-mixed"):
        fit = trainer(max_steps=1, precision=precision)
        fit.fit(module(), loader())
        losses.append(float(fit.callback_metrics["undrop/loss"]))
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_a_lightning_fit_resumes_exactly(tmp_path):
    whole = module()
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer(tmp_path, max_steps=6, enable_checkpointing=True, callbacks=[keep]).fit(whole, loader())
    torch.manual_seed(99)  # must not matter
    resumed = Classifier(undrop.Analytic())
    trainer(tmp_path, max_steps=6).fit(resumed, loader(), ckpt_path=tmp_path / "step=4.ckpt")
    assert torch.equal(weights(resumed), weights(whole))
    assert resumed.objective.steps == 6


class Forgetful(Classifier):
    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)


class Elsewhere(Classifier):
    def training_step(self, batch, index):
        step = undrop.Analytic()(self.net, *batch)
        return {"loss": step.total, "parts": step.parts}


@pytest.mark.parametrize("cls", [Forgetful, Elsewhere])
def test_a_training_step_without_the_objective_is_an_error(cls):
    with pytest.raises(OptionError, match=r"training_step does not train on the objective: call"):
        trainer().fit(cls(undrop.Analytic()), loader())


def test_importing_the_lightning_callback_without_lightning_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "undrop.integrations.lightning")
    with pytest.raises(MissingExtraError, match=r"pip install 'undrop\[lightning\]'"):
        import undrop.integrations.lightning  # noqa: F401


class Tuned(Classifier):
    def training_step(self, batch, index):
        step = self.objective.step(self.net, *batch)
        return {"loss": step.total, "parts": step.parts}


def tuned_module() -> Tuned:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(7)
    held = [(torch.randn(4, 4, generator=generator), torch.tensor([0, 1, 2, 0])) for _ in range(3)]
    objective = undrop.Dropout(generator=torch.Generator().manual_seed(2))
    return Tuned(
        undrop.Tuner(objective, held, interval=2, generator=torch.Generator().manual_seed(3))
    )


def test_a_tuner_is_logged_and_resumes_bit_for_bit_in_lightning(tmp_path):
    whole = tuned_module()
    fit = trainer(max_steps=8)
    fit.fit(whole, loader())
    assert fit.logged_metrics["undrop/p/2"] == pytest.approx(whole.objective.probabilities["2"])
    assert "undrop/benefit/2" in fit.logged_metrics

    keep = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    first = tuned_module()
    trainer(max_steps=4, enable_checkpointing=True, callbacks=[keep]).fit(first, loader())
    again = tuned_module()
    trainer(max_steps=8).fit(again, loader(), ckpt_path=next(tmp_path.glob("*step=4*.ckpt")))
    assert again.objective.probabilities == whole.objective.probabilities
    assert torch.equal(weights(again), weights(whole))
