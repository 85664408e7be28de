"""DDP and FSDP2 on two processes: the gradients of a single one."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import undrop
from hand_made import KINDS
from integrations.two_processes import Net
from undrop.errors import OptionError

SITES = [
    f"blocks.{i}.{name}" for i in range(2) for name in ("attention.attention", "drop", "drop#2")
]


@pytest.fixture(scope="module")
def found(launch, tmp_path_factory) -> dict[str, object]:
    path = tmp_path_factory.mktemp("processes") / "found.json"
    launch(Path(__file__).with_name("two_processes.py"), path)
    return json.loads(path.read_text())


CASES = ["", " checkpointed", " two samples", " two samples in turn", " fraction", " batch norm"]
BY_HAND = [" drop path", " masks by hand", " layer drop", " module dropout"]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    "case", [*CASES, " dropout", *BY_HAND], ids=lambda case: case.strip() or "plain"
)
def test_gradients_on_two_processes_equal_those_of_one(found, wrapper, case):
    assert found[wrapper + case] < 1e-14


@pytest.mark.parametrize("kind", KINDS)
def test_masks_made_by_hand_have_the_gradients_of_one_process_under_ddp(found, kind):
    assert found[f"ddp {kind}"] < 1e-14


def test_masks_made_by_hand_are_sites_under_ddp(found):
    kinds = [set(kinds) - {"attention", "dropout"} for kinds in found["kinds by hand"]]
    assert kinds == [{"drop-path"}, {"mask"}, {"layer-drop"}, {"module-drop"}]


@pytest.mark.parametrize("engine", ["tangent", "reverse"])
def test_the_other_engines_have_the_same_gradient_under_ddp(found, engine):
    assert found[f"ddp {engine}"] < 1e-14


@pytest.mark.parametrize("engine", ["tangent", "reverse", "exact"])
def test_engines_that_differentiate_twice_are_refused_under_fsdp(found, engine):
    assert "FSDP" in found[f"fsdp2 refuses {engine}"]
    assert "engine='antithetic'" in found[f"fsdp2 refuses {engine}"]


def test_auto_takes_the_antithetic_engine_under_fsdp(found):
    assert found["fsdp2 auto is antithetic"]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_sites_under_ddp_and_fsdp_have_the_names_of_the_model_itself(found, wrapper):
    assert found[f"{wrapper} sites"] == SITES


def test_each_process_draws_its_own_noise(found):
    assert found["own noise"] == {
        "from one seed": True,
        "from one state": True,
        "first goes on": True,
    }


def test_site_names_do_not_contain_wrappers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Net(lambda: nn.Identity(), checkpointed=False)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    assert list(undrop.sites(model, torch.randn(2, 3, 4, dtype=torch.float64)).names) == SITES


def test_threads_of_data_parallel_are_refused():
    model = nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    with pytest.raises(OptionError, match="DistributedDataParallel"):
        undrop.Analytic()(model, torch.ones(1, 2), torch.tensor([0]))
