"""Activation checkpointing: the second run of a region has the noise of the first."""

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import undrop
from hand_made import ModuleDropout
from undrop.errors import EngineError, RecomputationError
from undrop.intercept import checkpointing
from undrop.objectives import SAM, Jacobian, RDrop

D = torch.float64


class Block(nn.Module):
    """One dropout used twice, attention with its own, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True, dtype=D)
        self.linear = nn.Linear(4, 4, dtype=D)
        self.norm = nn.BatchNorm1d(3, dtype=D)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.attention(x, x, x, need_weights=False)[0])
        return x + self.drop(torch.tanh(self.linear(self.norm(y))))


def each(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def without_random_state(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    return x


def nested(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return checkpoint(each, blocks, x, use_reentrant=False)


def in_segments(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return checkpoint_sequential(list(blocks), 2, x, use_reentrant=False)


def with_contexts(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    contexts = lambda: (nullcontext(), nullcontext())  # noqa: E731
    return checkpoint(plain, blocks, x, use_reentrant=False, context_fn=contexts)


def reentrant(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return checkpoint(plain, blocks, x, use_reentrant=True)


def plain(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


class Net(nn.Module):
    def __init__(self, run=plain) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4, dtype=D)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3, dtype=D)
        self.drop = nn.Dropout(0.1)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.run(self.blocks, self.drop(self.enter(x)))))


OBJECTIVES = {
    "antithetic": lambda: undrop.Analytic(engine="antithetic"),
    "fraction": lambda: undrop.Analytic(engine="antithetic", fraction=0.5, samples=2),
    "reverse": lambda: undrop.Analytic(engine="reverse"),
    "exact": lambda: undrop.Analytic(engine="exact"),
    "none": undrop.NoRegularization,
    "dropout": lambda: undrop.Dropout(2),
    "own masks": lambda: undrop.Dropout(2, generator=torch.Generator().manual_seed(3)),
    "jacobian": lambda: Jacobian(1.0, site="blocks.0.drop", step=0.5),
    "r-drop": RDrop,
    "sam": SAM,
}
ROADS = [each, without_random_state, nested, in_segments, with_contexts]


def after_a_step(model: nn.Module, objective: undrop.Objective, backward=None) -> list[Tensor]:
    """Gradients and buffers after one step on a fixed batch with fixed noise."""
    torch.manual_seed(5)
    x, y = torch.randn(2, 3, 4, dtype=D), torch.randint(3, (2, 3))
    torch.manual_seed(6)
    step = objective(model, x, y)
    (backward or Tensor.backward)(step.total)
    return [*(p.grad for p in model.parameters()), *model.buffers()]


def net(run) -> Net:
    torch.manual_seed(4)
    return Net(run)


def assert_same(model: nn.Module, name: str, backward=None) -> None:
    expected = after_a_step(net(plain), OBJECTIVES[name]())
    got = after_a_step(model, OBJECTIVES[name](), backward)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("run", ROADS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("name", ["antithetic", "own masks"])
def test_checkpointing_does_not_change_gradients_and_batch_statistics(name, run):
    assert_same(net(run), name)


@pytest.mark.parametrize("name", ["reverse", "exact", "none", "jacobian", "r-drop", "sam"])
@pytest.mark.parametrize("run", [each, nested], ids=lambda run: run.__name__)
def test_checkpointing_does_not_change_the_gradient_of_any_engine_or_objective(name, run):
    assert_same(net(run), name)


def test_checkpointing_keeps_the_gradient_with_a_fraction_of_the_batch():
    def step(run) -> list[Tensor]:
        model = net(run)
        for block in model.blocks:
            block.norm = nn.Identity()  # batch norm refuses a fraction
        return after_a_step(model, OBJECTIVES["fraction"]())

    torch.testing.assert_close(step(nested), step(plain), rtol=1e-12, atol=1e-14)


def test_plain_dropout_keeps_its_masks_under_checkpointing():
    """Without undrop's noise, torch's random state decides, and undrop must not change it."""
    expected = after_a_step(net(plain), OBJECTIVES["dropout"]())
    got = after_a_step(net(each), OBJECTIVES["dropout"]())
    parameters = len(list(net(plain).parameters()))
    torch.testing.assert_close(got[:parameters], expected[:parameters])


def test_a_checkpoint_wrapper_does_not_change_the_gradient():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        checkpoint_wrapper,
    )

    model = net(plain)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT)
    assert_same(model, "antithetic")


def test_a_checkpointed_region_is_found_by_its_hooks():
    """No function of torch.utils.checkpoint is on the stack here, only its hooks."""
    from torch.distributed._composable import checkpoint as checkpointed

    model = net(plain)
    for block in model.blocks:
        checkpointed(block)
    assert_same(model, "antithetic")


def test_backward_of_a_checkpointed_model_works_in_another_thread():
    """As on a GPU, where autograd's own threads run the region again."""

    def elsewhere(total: Tensor) -> None:
        thread = threading.Thread(target=total.backward)
        thread.start()
        thread.join()

    assert_same(net(nested), "antithetic", elsewhere)


def test_the_retained_graph_of_a_checkpointed_model_can_be_run_again():
    expected = after_a_step(net(plain), OBJECTIVES["antithetic"]())

    def twice(total: Tensor) -> None:
        total.backward(retain_graph=True)
        total.backward()

    model = net(each)
    got = after_a_step(model, OBJECTIVES["antithetic"](), twice)
    n = len(list(model.parameters()))
    torch.testing.assert_close(got[:n], [2 * g for g in expected[:n]])


TARGET = torch.tensor([[0, 1, 2], [2, 1, 0]])


def test_reentrant_checkpointing_is_refused():
    with pytest.raises(RecomputationError, match=r"CheckpointFunction.*use_reentrant=False"):
        after_a_step(net(reentrant), OBJECTIVES["antithetic"]())


def test_the_tangent_engine_refuses_checkpointing_and_auto_takes_a_stacked_pass():
    with pytest.raises(EngineError, match=r"activation checkpointing: use engine='antithetic'"):
        after_a_step(net(each), undrop.Analytic(engine="tangent"))
    got = after_a_step(net(each), undrop.Analytic())
    expected = after_a_step(net(plain), OBJECTIVES["antithetic"]())
    torch.testing.assert_close(got, expected)


def test_checkpointing_that_is_switched_on_later_does_not_change_the_gradient():
    model, objective = net(plain), undrop.Analytic()
    after_a_step(model, objective)
    model.run = each
    other, again = net(plain), undrop.Analytic()
    after_a_step(other, again)
    torch.testing.assert_close(after_a_step(model, objective), after_a_step(other, again))


def test_checkpointing_that_is_switched_on_later_stops_the_tangent_engine():
    model, objective = net(plain), undrop.Analytic(engine="tangent")
    after_a_step(model, objective)
    model.run = each
    with pytest.raises(RecomputationError, match=r"no forward mode: use engine='antithetic'"):
        after_a_step(model, objective)


def test_finding_checkpointed_regions_leaves_saved_tensor_hooks_unchanged():
    from torch.autograd.graph import save_on_cpu

    found = []

    def top():
        return torch._C._autograd._top_saved_tensors_default_hooks(False)

    def look(x: Tensor) -> Tensor:
        with save_on_cpu():
            before = top()
            found.append(len(checkpointing.regions()))
            assert top() == before
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    with save_on_cpu():
        before = top()
        checkpoint(look, x, use_reentrant=False).sum().backward()
        assert top() == before
    assert top() is None
    assert found == [1, 0]  # the second run is not another region
    torch.testing.assert_close(x.grad, x.detach().cos())


class SkippedLayers(nn.Module):
    """LayerDrop with layers that are checkpointed one by one, as in Transformers."""

    def __init__(self, layer: type[nn.Module], checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(), layer()]).to(D)
        self.head, self.checkpointed = nn.Linear(8, 3, dtype=D), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) < 0.2:
                continue
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


class DroppingLayer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh())


@pytest.mark.parametrize("layer", [DroppingLayer, ModuleDropout])
def test_layers_that_are_skipped_may_be_checkpointed(layer):
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = SkippedLayers(layer, checkpointed)
        x, y = torch.randn(4, 8, dtype=D), torch.tensor([0, 1, 2, 0])
        assert len(undrop.sites(model, x)) == 4
        undrop.Analytic(generator=torch.Generator().manual_seed(0))(model, x, y).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*found)
