"""Tensors in torch's pytrees, and in objects of classes that torch does not know."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from undrop.intercept import map_tensors, tensors_in


@dataclass(frozen=True)
class Frozen:
    h: Tensor
    name: str = "frozen"


class Slotted:
    __slots__ = "h"  # one name, and not always set


class Mixed(dict):
    """Has tensors in a slot, in an attribute and under a key."""

    __slots__ = ("__dict__", "h")


def mixed():
    out = Mixed(a=torch.tensor(4), b="b")
    out.h, out.more = torch.tensor(5), (torch.tensor(6), None)
    return out


def tree():
    space = SimpleNamespace(pair=(torch.tensor(2), 3.0), empty=None)
    return {
        "x": torch.tensor(0),
        "y": [Frozen(torch.tensor(1)), space, mixed(), Slotted(), "s", None],
    }


def numbers(x):
    return sorted(int(t) for t in tensors_in(x))


def test_map_tensors_and_tensors_in_reach_every_tensor_and_change_none():
    before, others = tree(), tree()
    assert numbers(before) == [0, 1, 2, 4, 5, 6]
    after = map_tensors(lambda a, b: 10 * a + b, before, others)
    assert numbers(before) == numbers(others) == [0, 1, 2, 4, 5, 6]
    assert numbers(after) == [0, 11, 22, 44, 55, 66]
    frozen, space, container, slotted, *rest = after["y"]
    assert frozen == Frozen(torch.tensor(11))
    assert (type(container), int(container["a"]), container["b"]) == (Mixed, 44, "b")
    assert (int(container.h), int(container.more[0]), container.more[1]) == (55, 66, None)
    assert (int(space.pair[0]), space.pair[1], space.empty) == (22, 3.0, None)
    assert slotted is before["y"][3]  # undrop leaves objects without tensors alone
    assert rest == ["s", None]


def test_map_tensors_and_tensors_in_ignore_the_tensors_of_modules():
    module = nn.Linear(2, 2)
    assert map_tensors(torch.zeros_like, (module, torch.ones(1)))[0] is module
    assert [*tensors_in(module)] == []
