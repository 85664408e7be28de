"""One step's gradient in one of several processes, with noise that is a slice of the same draw."""

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
from undrop.lab.train.components import OBJECTIVES
from undrop.lab.train.config import OptimizerConfig
from undrop.lab.train.optimizers import Stepper
from undrop.lab.train.parallel import Gradient
from undrop.lab.train.world import World, joined

BATCH, LENGTH, WORDS = 6, 5, 13
TOKENS = np.random.default_rng(0).integers(0, WORDS, BATCH * (2 * LENGTH + 1))


def _agree_on_noise(world: World) -> None:
    """Draw for the whole batch everywhere, and use this process's columns of it."""
    generator = torch.Generator().manual_seed(7)

    def agreed(kind: str, shape: tuple[int, ...], q: float, *, like: Tensor, **_: Any) -> Tensor:
        columns = len(shape) == 3  # (1, B, features); weights have two dimensions, and no batch
        whole = (shape[0], shape[1] * world.size, shape[2]) if columns else shape
        drawn = noise.draw(kind, whole, q, like=like, generator=generator)
        return drawn[:, world.share(whole[1])].contiguous() if columns else drawn

    draws.draw_noise = agreed


def steps(world: World, objective: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Two steps with a carried state; the second one's gradient and the weights after it."""
    torch.manual_seed(world.rank)  # DDP hands the first process's weights to all
    model = AWDLSTM(WORDS, embedding_size=4, hidden_size=6, layers=2).double().train()
    built = OBJECTIVES.build(objective, options, loss=model.loss(), batch_dim=1)
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
    """Take part; the first process saves what came out."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # The store is there already, at a port that nobody else can have taken in between.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    torch.set_num_threads(1)
    with joined(torch.device("cpu")) as world:
        _agree_on_noise(world)
        found = steps(world, objective, options)
        if world.is_main:
            save_file(found, out)
