import json
import random

import numpy as np
import torch

from device import DEVICE
from undrop.rng_snapshot import RngSnapshot, derive_seed, seed_all
from undrop.tensor_files import pack, unpack


def draws():
    return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.random(), random.gauss(0, 1)


def test_a_snapshot_restores_the_generators_of_torch_numpy_and_python():
    snapshot = RngSnapshot()
    first = draws()
    assert draws() != first
    snapshot.restore()
    assert draws() == first


def test_a_snapshot_as_a_context_undoes_what_the_block_draws():
    with RngSnapshot():
        first = draws()
    assert draws() == first


def test_a_saved_snapshot_restores_the_same_state():
    random.gauss(0, 1), np.random.randn()  # each leaves a second number for the next call
    packed, tensors = pack(RngSnapshot().state_dict())
    first = draws()
    RngSnapshot.from_state_dict(unpack(json.loads(json.dumps(packed)), tensors)).restore()
    assert draws() == first


def test_seeding_and_derived_seeds_are_reproducible_and_independent():
    seed_all(5)
    first = draws()
    seed_all(5)
    assert draws() == first
    assert derive_seed(1, "noise", 0) == derive_seed(1, "noise", 0)
    assert len({derive_seed(1, "noise", rank) for rank in range(100)}) == 100


def test_random_numbers_of_the_device_are_restored():
    """Also from a saved snapshot."""
    snapshot = RngSnapshot()
    first = torch.rand(3, device=DEVICE)
    for each in (snapshot, RngSnapshot.from_state_dict(snapshot.state_dict())):
        each.restore()
        assert torch.equal(torch.rand(3, device=DEVICE), first)
