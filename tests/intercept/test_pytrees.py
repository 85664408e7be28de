"""Tensors in containers that torch knows, and in objects that it does not."""

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
    """Holds by slot, by attribute and by key."""

    __slots__ = ("__dict__", "h")


def mixed():
    made = Mixed(a=torch.tensor(4), b="b")
    made.h, made.more = torch.tensor(5), (torch.tensor(6), None)
    return made


def tree():
    space = SimpleNamespace(pair=(torch.tensor(2), 3.0), empty=None)
    return {
        "x": torch.tensor(0),
        "y": [Frozen(torch.tensor(1)), space, mixed(), Slotted(), "s", None],
    }


def numbers(of):
    return sorted(int(t) for t in tensors_in(of))


def test_every_tensor_is_found_and_mapped_and_nothing_is_changed():
    before, others = tree(), tree()
    assert numbers(before) == [0, 1, 2, 4, 5, 6]
    after = map_tensors(lambda a, b: 10 * a + b, before, others)
    assert numbers(before) == numbers(others) == [0, 1, 2, 4, 5, 6]
    assert numbers(after) == [0, 11, 22, 44, 55, 66]
    frozen, space, held, slotted, *rest = after["y"]
    assert frozen == Frozen(torch.tensor(11))
    assert (type(held), int(held["a"]), held["b"]) == (Mixed, 44, "b")
    assert (int(held.h), int(held.more[0]), held.more[1]) == (55, 66, None)
    assert (int(space.pair[0]), space.pair[1], space.empty) == (22, 3.0, None)
    assert slotted is before["y"][3]  # undrop leaves objects without tensors alone
    assert rest == ["s", None]


def test_modules_are_left_alone():
    module = nn.Linear(2, 2)
    assert map_tensors(torch.zeros_like, (module, torch.ones(1)))[0] is module
    assert [*tensors_in(module)] == []
