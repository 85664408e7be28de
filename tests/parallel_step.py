"""The gradient of one step in one of several processes, with noise that is a slice of one draw."""

import os
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from undrop import noise
from undrop.engines import draw as draws
from undrop.lab.corpora.batching import TrainingWindows
from undrop.lab.models import AWDLSTM
from undrop.lab.train.config import ObjectiveConfig, OptimizerConfig
from undrop.lab.train.environment import Gradient, World, join_world
from undrop.lab.train.optimizers import Stepper

BATCH, LENGTH, WORDS = 6, 5, 13
TOKENS = np.random.default_rng(0).integers(0, WORDS, BATCH * (2 * LENGTH + 1))


def _agree_on_noise(world: World) -> None:
    """Draw noise for the whole batch in every process, and use this process's columns."""
    generator = torch.Generator().manual_seed(7)

    def agreed(
        kind: str, shape: tuple[int, ...], q: float, *, like: Tensor, scale: float = 1.0, **_: Any
    ) -> Tensor:
        share = BATCH // world.size
        dim = 1 if len(shape) == 3 else 0  # (1, B, features), or all sites at once: (B, features)
        if shape[dim] != share:  # noise on weights, which all examples share
            return noise.draw_noise(kind, shape, q, like=like, scale=scale, generator=generator)
        whole = (*shape[:dim], BATCH, *shape[dim + 1 :])
        drawn = noise.draw_noise(kind, whole, q, like=like, scale=scale, generator=generator)
        own = world.columns(BATCH)
        return drawn[own] if dim == 0 else drawn[:, own].contiguous()

    draws.draw_noise = agreed


def steps(world: World, objective: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Take two steps with a carried state; return the second gradient and the weights after it."""
    torch.manual_seed(world.rank)  # DDP copies the first process's weights to all
    model = AWDLSTM(WORDS, embedding_size=4, hidden_size=6, layers=2).double().train()
    built = ObjectiveConfig(name=objective, **options).build(loss=model.loss(), batch_dim=1)
    gradient = Gradient(model, built, world)
    stepper = Stepper(list(model.parameters()), OptimizerConfig(lr=0.5))
    windows = TrainingWindows(TOKENS, BATCH, LENGTH, shard=(world.rank, world.size))
    state = None
    for window in windows:
        inputs = {"tokens": window.inputs, "state": state, "logits": False}
        step = gradient(inputs, window.targets)
        state = tuple(tuple(t.detach() for t in layer) for layer in step.output[1])
        gradients = {f"grad/{n}": p.grad.clone() for n, p in model.named_parameters()}
        stepper.step(1.0)
    return {**gradients, **{n: p.detach() for n, p in model.named_parameters()}}


def work(
    rank: int, size: int, port: int, objective: str, options: dict[str, Any], out: str
) -> None:
    """Run one process; the first one saves the result."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # The store already exists, so no other program can take its port in between.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    torch.set_num_threads(1)
    with join_world(torch.device("cpu")) as world:
        _agree_on_noise(world)
        found = steps(world, objective, options)
        if world.is_main:
            save_file(found, out)
