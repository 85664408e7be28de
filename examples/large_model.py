"""A model too large for one device: FSDP2 and activation checkpointing, with the antithetic engine.

torchrun --standalone --nproc-per-node 2 examples/large_model.py
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import undrop


class Model(nn.Module):
    """A transformer whose backward pass recomputes each block, with the same noise."""

    def __init__(self, words=50, width=64):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        block = {"dim_feedforward": 4 * width, "dropout": 0.2, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, **block) for _ in range(4))
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")  # on GPUs "nccl", and "cuda" for the mesh, model and tokens
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model, objective = Model(), undrop.Analytic(engine="antithetic")
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())  # each process has its own data
    for index in range(steps):
        tokens = torch.randint(50, (16, 12), generator=generator)
        step = objective(model, tokens, tokens.flip(1))  # learn to reverse a sequence
        step.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (index % 10 == 0 or index == steps - 1):
            print(f"step {index:3}", *(f"{k} {v:+.4f}" for k, v in step.parts.items()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo that still holds a tensor would abort Python when it shuts down
