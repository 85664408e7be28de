"""Random numbers that are not dropout are named, with module and line, and stay random."""

import logging
import random

import pytest
import torch
from torch import nn

import undrop
from hand_made import LayerDrop, ModuleDropout
from undrop.errors import NoDropoutError


@torch.jit.script
def scripted(x):
    return torch.dropout(x, 0.5, True)


def patches(x):
    return x[:, torch.rand(x.shape[1]).argsort()]


def removed(x):
    keep = torch.rand(len(x), x.shape[1]) >= 0.5
    return torch.stack([row[k].sum() for row, k in zip(x, keep, strict=True)])[:, None] + x


def masked_scores(x):
    return x.masked_fill(torch.rand_like(x) < 0.3, -1e9).softmax(-1)


OTHERS = {
    "an order": (patches, "rand"),
    "a removal": (removed, "rand"),
    "scores": (masked_scores, "rand"),
    "added scores": (lambda x: (x - 1e9 * (torch.rand_like(x) < 0.3)).softmax(-1), "rand"),
    "other scores": (
        lambda x: (x + ((torch.rand_like(x) < 0.3).float() - 1) * 1e4).softmax(-1),
        "rand",
    ),
    "jitter": (lambda x: x * torch.empty_like(x).uniform_(0.9, 1.1), "uniform_"),
    "Gaussian noise": (lambda x: x + torch.randn_like(x), "randn"),
    "TorchScript": (scripted, "bernoulli"),
    "a scripted module": (torch.jit.script(nn.Dropout(0.5)), "bernoulli"),
    "an aten call": (lambda x: x * torch.ops.aten.bernoulli.p(x, 0.5), "bernoulli"),
    "Python": (lambda x: x if random.random() < 0.5 else 2 * x, "Python's random"),
}


class Net(nn.Module):
    def __init__(self, own, dropout=True):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.own, self.dropout = own, nn.Dropout(0.2 if dropout else 0.0)

    def forward(self, x):
        return self.last(self.dropout(self.own(torch.tanh(self.first(x)))))


X, Y = torch.randn(6, 4), torch.randint(3, (6,))


@pytest.mark.parametrize("name", OTHERS)
def test_unaccounted_numbers_are_named_and_the_same_for_every_seed(name):
    own, function = OTHERS[name]
    net = Net(own)
    for seed in range(3):
        torch.manual_seed(seed)
        random.seed(seed)
        found = undrop.sites(net, X)
        assert found.names == ("dropout",)
        (other,) = found.unaccounted
        assert function in other.function
        assert other.calls == 1
        assert "test_unaccounted.py:" in other.where
    assert "belong to no site" in repr(found)
    assert "belong to no site" in found._repr_html_()


@pytest.mark.parametrize("name", OTHERS)
def test_the_error_for_a_model_without_sites_names_its_unaccounted_numbers(name):
    own, function = OTHERS[name]
    with pytest.raises(NoDropoutError, match=f"{function}.*register_site"):
        undrop.sites(Net(own, dropout=False), X)


@pytest.mark.parametrize("name", OTHERS)
def test_an_objective_logs_unaccounted_numbers_once(name, caplog):
    net = Net(OTHERS[name][0])
    with caplog.at_level(logging.WARNING, "undrop"):
        for _ in range(2):
            undrop.Analytic()(net, X, Y)
    (line,) = [r.message for r in caplog.records if "belong to no dropout site" in r.message]
    assert "test_unaccounted.py" in line


def test_a_scripted_layer_without_noise_changes_nothing():
    """Its statistics are updated once per step, even if a step takes two passes."""

    def step(norm):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Dropout(0.3), nn.Linear(4, 8), norm(nn.BatchNorm1d(8)), nn.Linear(8, 3)
        )
        objective = undrop.Analytic(generator=torch.Generator().manual_seed(0))
        return objective(net, X, Y).parts, net[2].running_mean

    (plain, mean), (scripted, same) = step(lambda layer: layer), step(torch.jit.script)
    assert scripted == pytest.approx(plain, rel=1e-3)
    torch.testing.assert_close(same, mean)


def test_a_random_branch_that_no_module_follows_is_unaccounted():
    def skipped(x):
        return x + torch.sin(x) if torch.rand([]) >= 0.1 else x

    found = undrop.sites(Net(skipped), X)
    assert found.names == ("dropout",)
    assert [other.function for other in found.unaccounted] == ["rand"]


class Skipping(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), inner

    def forward(self, x):
        if torch.rand([]) < 0.1:
            return self.inner(x)
        return x + torch.sin(self.norm(x))


def test_a_random_branch_around_more_than_a_layer_is_a_site_of_its_module():
    found = undrop.sites(Net(Skipping(nn.Identity())), X)
    assert found.names == ("own.module-drop", "dropout")
    assert not found.unaccounted


@pytest.mark.parametrize("buffers", [0, 12])
def test_the_side_of_a_random_branch_with_fewer_functions_drops_whatever_the_buffers(buffers):
    """The copies of the buffers are not calls of the model."""

    class MostlySkipping(Skipping):
        def forward(self, x):
            return x if torch.rand([]) < 0.7 else x + torch.sin(self.norm(x))

    module = MostlySkipping(nn.Identity())
    for index in range(buffers):
        module.register_buffer(f"buffer{index}", torch.zeros(2))
    assert undrop.sites(Net(module), X)[0].p == pytest.approx(0.7)


def test_a_random_branch_around_another_dropout_is_unaccounted():
    found = undrop.sites(Net(Skipping(nn.Dropout(0.5))), X)
    assert "own.module-drop" not in found.names
    assert [other.module for other in found.unaccounted] == ["own"]


class SkipsLayers(LayerDrop):
    """Each layer has a random branch, which skips the call of ``run``."""

    def __init__(self, run):
        super().__init__()
        self.run, self.dropout = run, nn.Dropout(0.2)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        for layer in self.layers:
            if torch.rand([]) >= self.layerdrop:
                h = self.run(self, layer, h)
        return self.last(h.mean(1))


def test_a_random_branch_around_a_layer_and_a_dropout_is_unaccounted():
    """The branch also skips the noise of the dropout, which a blend of the layer alone would miss."""
    net = SkipsLayers(lambda net, layer, h: net.dropout(layer(h)[0]))
    found = undrop.sites(net, torch.randn(3, 5, 3))
    assert found.names == ("dropout", "dropout#2")
    assert [other.function for other in found.unaccounted] == ["rand"]


class Inner(nn.Module):
    """A layer that contains another module, which drops."""

    def __init__(self, drop):
        super().__init__()
        self.drop = drop

    def forward(self, x):
        return x + torch.tanh(self.drop(x))


def test_a_skipped_layer_may_use_torchs_attention():
    net = SkipsLayers(lambda net, layer, h: layer(h))
    net.layers = nn.ModuleList(
        [nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2)]
    )
    found = undrop.sites(net, torch.randn(3, 5, 3))
    assert [s.kind for s in found].count("layer-drop") == 2
    assert not found.unaccounted


def test_a_random_branch_inside_a_skipped_layer_is_a_site():
    net = SkipsLayers(lambda net, layer, h: layer(h))
    net.layers = nn.ModuleList([Inner(ModuleDropout()), Inner(ModuleDropout())])
    found = undrop.sites(net, torch.randn(3, 5, 3))
    assert {s.kind for s in found} == {"layer-drop", "module-drop"}
    assert len(found) == 4
    assert not found.unaccounted


class ScalesByCount(nn.Module):
    """Not a product with a mask: the factor is the number of examples that the mask keeps."""

    def forward(self, x):
        kept = torch.rand(len(x), 1, 1) < 0.5
        return x * torch.nonzero(kept).numel() + 0.0 * kept


def test_a_comparison_after_a_skipped_layer_is_not_taken_for_a_mask():
    net = SkipsLayers(lambda net, layer, h: layer(h))
    net.layers = nn.ModuleList([Inner(nn.Identity()), Inner(ScalesByCount())])
    found = undrop.sites(net, torch.randn(3, 5, 3))
    assert {s.kind for s in found} == {"layer-drop"}
    assert [other.module for other in found.unaccounted] == ["layers.1.drop"]


def test_p_of_a_skipped_layer_stays_its_drop_probability_above_a_half():
    net, x = LayerDrop(0.1), torch.randn(3, 5, 3)
    for p in (0.4, 0.5, 0.9):
        net.layerdrop = p
        assert [(s.kind, s.p) for s in undrop.sites(net, x)] == [("layer-drop", p)] * 2


def test_no_regularization_runs_with_a_mask_made_by_hand_and_other_random_numbers():
    class Both(nn.Module):
        def forward(self, x):
            return patches(x * (torch.rand(len(x), 1) < 0.8))

    net = Net(Both())
    step = undrop.NoRegularization()(net, X, Y)
    step.backward()
    assert step.total.isfinite()


class Sometimes(nn.Module):
    def forward(self, x):
        if torch.rand([]) < 0.5:
            x = x + torch.sin(x) * (torch.rand(x.shape[1]) < 0.8)
        return x


def test_a_random_branch_with_even_chances_before_a_layer_is_not_layer_drop():
    found = undrop.sites(Net(Sometimes()), X)
    assert "own.layer-drop" not in found.names
    assert ("own", "rand") in [(other.module, other.function) for other in found.unaccounted]


def test_a_site_behind_a_branch_that_stays_random_is_listed():
    net = Net(nn.Sequential(*(Sometimes() for _ in range(4))))
    found = undrop.sites(net, X)
    assert set(found.names) == {"dropout", *(f"own.{i}.mask" for i in range(4))}


class Experts(nn.Module):
    """Calls one of several modules, chosen at random."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Dropout(0.1) for _ in range(8)])

    def forward(self, x):
        return self.experts[int(torch.randint(8, ()))](x)


def test_the_sites_of_all_experts_are_listed():
    found = undrop.sites(Net(Experts()), X)
    assert set(found.names) == {"dropout", *(f"own.experts.{i}" for i in range(8))}


def test_the_line_of_a_package_whose_name_begins_like_torch_is_shown():
    utils = pytest.importorskip("torch_geometric.utils", reason="torch_geometric is not installed")

    def dropped(x):
        edges, _ = utils.dropout_edge(torch.randint(6, (2, 12)), p=0.5)
        return x + edges.shape[1]

    found = undrop.sites(Net(dropped), X)
    assert any("torch_geometric" in other.where for other in found.unaccounted)
