"""Accelerate: its backward, its accumulation and its checkpoints, in one process."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

import undrop


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def batch(n: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_accumulation_with_accelerate_gives_the_gradient_of_one_large_batch():
    """With the exact engine, which draws no noise."""
    x, y = batch()
    whole, parts = net(), net()
    undrop.Analytic(engine="exact")(whole, x, y).backward()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, objective = accelerator.prepare(parts), undrop.Analytic(engine="exact")
    for rows in (slice(0, 3), slice(3, 6)):
        with accelerator.accumulate(model):
            accelerator.backward(objective(model, x[rows], y[rows]).total)
    torch.testing.assert_close(gradient(parts), gradient(whole))


def test_a_checkpoint_of_accelerate_restores_the_noise(tmp_path):
    x, y = batch()
    accelerator = Accelerator(cpu=True)
    model, objective = accelerator.prepare(net()), undrop.Analytic()
    accelerator.register_for_checkpointing(objective)
    objective(model, x, y)
    accelerator.save_state(str(tmp_path / "state"))
    expected = objective(model, x, y).parts
    assert objective(model, x, y).parts != expected
    accelerator.load_state(str(tmp_path / "state"))
    assert objective.steps == 1
    assert objective(model, x, y).parts == expected


@pytest.fixture
def bf16_accelerator():
    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(True)


def test_autocast_inside_a_prepared_model_computes_what_autocast_around_it_does(bf16_accelerator):
    """Accelerate puts autocast into the model's forward, where no caller sees it."""

    def parts(model):
        objective = undrop.Analytic(
            engine="antithetic", implicit=False, generator=torch.Generator().manual_seed(3)
        )
        return objective(model, *batch(32)).parts

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = parts(net())
    found = parts(bf16_accelerator.prepare(net()))
    assert found == pytest.approx(expected, rel=0.02)


class Centered(nn.Sequential):
    """Examples interact, under autocast inside the model."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = super().forward(x)
            return (h - h.mean(0)).float()


def test_examples_that_interact_under_autocast_inside_a_model_are_not_stacked():
    torch.manual_seed(0)
    model = Centered(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
    assert undrop.Analytic()(model, *batch(32)).engine != "antithetic: one stacked pass"
