"""Run by two processes: gradients of wrapped models against those of one process, as JSON."""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import undrop

sys.path.insert(0, str(Path(__file__).parents[1]))
from hand_made import KINDS

D = torch.float64
Make = Callable[[torch.Generator], undrop.Objective]
Given = Callable[[int], tuple[Tensor, Tensor]]


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True, dtype=D)
        self.linear = nn.Linear(4, 4, dtype=D)
        self.norm = norm
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.attention(x, x, x, need_weights=False)[0])
        return x + self.drop(torch.tanh(self.linear(self.norm(y))))


class DropPath(nn.Module):
    """Keeps or drops each example, by a mask made by hand."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_empty(len(x), 1, 1).bernoulli_(0.8)
        return x * mask.div_(0.8)


class ByHand(nn.Module):
    """Other masks made by hand: per batch, per token, between two values, and on rows of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=D) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x * (torch.rand((), dtype=D) >= 0.2)
        x = x.masked_fill((torch.rand(x.shape[:2], dtype=D) < 0.2).unsqueeze(-1), 0.0)
        old = (torch.rand_like(x) < 0.2).to(D)
        x = old * x.roll(1, 1) + (1 - old) * x
        rows = (torch.rand(4, 1, dtype=D) > 0.2).to(D)
        return F.linear(x, self.weight * rows)


class LayerDrop(nn.Module):
    """A layer that is skipped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand((), dtype=D) < 0.2 else self.layer(x)


class ModuleDropout(LayerDrop):
    """A module whose output is added or not, at random."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + torch.sin(x) if torch.rand((), dtype=D) > 0.2 else y


class Net(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module], checkpointed: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4, dtype=D)
        self.blocks = nn.ModuleList([Block(norm()), Block(norm())])
        self.head = nn.Linear(4, 3, dtype=D)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


LAYER = partial(nn.LayerNorm, 4, dtype=D)
BATCH = partial(nn.BatchNorm1d, 3, dtype=D)


def net(norm: Callable[[], nn.Module] = LAYER, checkpointed: bool = False) -> Net:
    torch.manual_seed(4)
    return Net(norm, checkpointed)


def sharded(model: Net) -> Net:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(2, 3, 4, dtype=D, generator=generator)
    return x, torch.randint(3, (2, 3), generator=generator)


def small_batch(rank: int) -> tuple[Tensor, Tensor]:
    """The same for the nets of ``hand_made``."""
    x, y = batch(rank)
    return x.movedim(1, 2), y[:, 0]


def gradient(
    model: nn.Module, make: Make, rank: int, in_turn: bool = False, given: Given = batch
) -> Tensor:
    """The gradient of a step on this rank's batch with this rank's noise."""
    step = make(torch.Generator().manual_seed(rank))(model, *given(rank))
    step.backward() if in_turn else step.total.backward()
    grads = [p.grad for p in model.parameters()]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
    return torch.cat([g.flatten() for g in whole])


def difference(
    wrap: Callable[[Net], nn.Module], make: Make, in_turn: bool = False, **options
) -> float:
    """How far the wrapped model's gradient is from the mean over the ranks in one process."""
    alone = sum(gradient(net(**options), make, rank) for rank in range(dist.get_world_size()))
    together = gradient(wrap(net(**options)), make, dist.get_rank(), in_turn)
    return float((together - alone / dist.get_world_size()).abs().max())


def by_hand(kind: str) -> float:
    """The same for a net that drops by hand."""
    torch.set_default_dtype(D)
    found = []
    for wrap in (lambda model: model, DistributedDataParallel):
        torch.manual_seed(4)
        model = wrap(KINDS[kind][0]())
        found.append(gradient(model, analytic(), dist.get_rank(), given=small_batch))
    torch.set_default_dtype(torch.float32)
    dist.all_reduce(found[0])
    return float((found[1] - found[0] / dist.get_world_size()).abs().max())


def refusal(make: Make) -> str:
    try:
        gradient(sharded(net()), make, dist.get_rank())
    except undrop.errors.EngineError as error:
        return str(error)
    return ""


def analytic(**options) -> Make:
    return lambda generator: undrop.Analytic(generator=generator, **options)


def by_rank(objective: undrop.Objective) -> list[list[int]]:
    """The state of the objective's generator in each process."""
    states: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(states, objective.state_dict()["generators"]["cpu"].tolist())
    return states


def own_noise() -> dict[str, bool]:
    """Whether the ranks draw different noise from one seed, and from the state of the first."""
    torch.manual_seed(0)
    objective = undrop.Analytic()
    objective(net(), *batch(0))
    before = by_rank(objective)
    shared = [objective.state_dict()]
    dist.broadcast_object_list(shared, src=0)
    objective.load_state_dict(shared[0])
    after = by_rank(objective)
    return {
        "from one seed": before[0] != before[1],
        "from one state": after[1] not in before and after[1] != after[0],
        "first goes on": after[0] == before[0],
    }


def results() -> dict[str, object]:
    antithetic, two = analytic(engine="antithetic"), analytic(engine="antithetic", samples=2)
    found: dict[str, object] = {}
    for name, wrap in (("ddp", DistributedDataParallel), ("fsdp2", sharded)):
        found |= {
            name: difference(wrap, antithetic),
            f"{name} checkpointed": difference(wrap, antithetic, checkpointed=True),
            f"{name} two samples": difference(wrap, two),
            f"{name} two samples in turn": difference(wrap, two, True, checkpointed=True),
            f"{name} fraction": difference(wrap, analytic(engine="antithetic", fraction=0.5)),
            f"{name} batch norm": difference(wrap, antithetic, norm=BATCH),
            f"{name} dropout": difference(wrap, lambda g: undrop.Dropout(2, generator=g)),
            f"{name} drop path": difference(wrap, antithetic, norm=DropPath),
            f"{name} masks by hand": difference(wrap, antithetic, norm=ByHand),
            f"{name} layer drop": difference(wrap, antithetic, norm=LayerDrop),
            f"{name} module dropout": difference(wrap, antithetic, norm=ModuleDropout),
        }
    for engine in ("tangent", "reverse"):
        found[f"ddp {engine}"] = difference(DistributedDataParallel, analytic(engine=engine))
    for engine in ("tangent", "reverse", "exact"):
        found[f"fsdp2 refuses {engine}"] = refusal(analytic(engine=engine))
    found |= {f"ddp {kind}": by_hand(kind) for kind in KINDS}
    auto, fixed = (gradient(sharded(net()), make, 0) for make in (analytic(), antithetic))
    return found | {
        "fsdp2 auto is antithetic": torch.equal(auto, fixed),
        "kinds by hand": [
            [site.kind for site in undrop.sites(net(norm), batch(0)[0])]
            for norm in (DropPath, ByHand, LayerDrop, ModuleDropout)
        ],
        "ddp sites": undrop.sites(DistributedDataParallel(net()), batch(0)[0]).names,
        "fsdp2 sites": undrop.sites(sharded(net()), batch(0)[0]).names,
        "own noise": own_noise(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = results()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo that still holds a tensor would abort Python when it shuts down
