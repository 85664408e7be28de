"""undrop.sites lists every dropout with its name, kind, p, mask and shape, and changes nothing."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import undrop
from undrop.errors import NoDropoutError, OptionError
from undrop.nn import EmbeddingDropout, LockedDropout, WeightDrop


class Calls(nn.Module):
    """A model that is one function of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def rows(model, inputs):
    found = undrop.sites(model, inputs)
    return [(s.name, s.kind, s.p, s.mask, s.shape, s.mask_shape) for s in found]


X = torch.randn(2, 3)
IMAGE = torch.randn(2, 3, 4, 4)
INDEPENDENT = "independent"
KINDS = {
    "Dropout": (
        nn.Sequential(nn.Dropout(0.3)),
        X,
        ("0", "dropout", 0.3, INDEPENDENT, (2, 3), (2, 3)),
    ),
    "Dropout itself": (
        nn.Dropout(),
        X,
        ("dropout", "dropout", 0.5, INDEPENDENT, (2, 3), (2, 3)),
    ),
    "in place": (
        nn.Sequential(nn.Dropout(0.3, inplace=True)),
        X,
        ("0", "dropout", 0.3, INDEPENDENT, (2, 3), (2, 3)),
    ),
    "F.dropout": (
        Calls(lambda self, x: F.dropout(x, 0.2, self.training)),
        X,
        ("dropout", "dropout", 0.2, INDEPENDENT, (2, 3), (2, 3)),
    ),
    "F.dropout with its default p": (
        Calls(lambda self, x: F.dropout(x, training=self.training)),
        X,
        ("dropout", "dropout", 0.5, INDEPENDENT, (2, 3), (2, 3)),
    ),
    "torch.dropout": (
        Calls(lambda self, x: torch.dropout(x, 0.2, self.training)),
        X,
        ("dropout", "dropout", 0.2, INDEPENDENT, (2, 3), (2, 3)),
    ),
    "torch.dropout_": (
        Calls(lambda self, x: torch.dropout_(x.clone(), 0.2, self.training)),
        X,
        ("dropout", "dropout", 0.2, INDEPENDENT, (2, 3), (2, 3)),
    ),
    "aten.dropout": (
        Calls(lambda self, x: torch.ops.aten.dropout(x, 0.2, self.training)),
        X,
        ("dropout", "dropout", 0.2, INDEPENDENT, (2, 3), (2, 3)),
    ),
    "aten.native_dropout.default": (
        Calls(lambda self, x: torch.ops.aten.native_dropout.default(x, 0.2, self.training)[0]),
        X,
        ("dropout", "dropout", 0.2, INDEPENDENT, (2, 3), (2, 3)),
    ),
    "torch.native_dropout": (
        Calls(lambda self, x: torch.native_dropout(x, 0.2, self.training)[0]),
        X,
        ("dropout", "dropout", 0.2, INDEPENDENT, (2, 3), (2, 3)),
    ),
    "torch.feature_dropout": (
        Calls(lambda self, x: torch.feature_dropout(x, 0.2, self.training)),
        IMAGE,
        ("dropout2d", "dropout2d", 0.2, "per feature map", (2, 3, 4, 4), (2, 3, 1, 1)),
    ),
    "Dropout1d": (
        nn.Sequential(nn.Dropout1d(0.3)),
        torch.randn(2, 3, 5),
        ("0", "dropout1d", 0.3, "per feature map", (2, 3, 5), (2, 3, 1)),
    ),
    "Dropout1d without batch": (
        nn.Sequential(nn.Dropout1d(0.3)),
        torch.randn(3, 5),
        ("0", "dropout1d", 0.3, "per feature map", (3, 5), (3, 1)),
    ),
    "Dropout2d": (
        nn.Sequential(nn.Dropout2d(0.3)),
        IMAGE,
        ("0", "dropout2d", 0.3, "per feature map", (2, 3, 4, 4), (2, 3, 1, 1)),
    ),
    "Dropout3d": (
        nn.Sequential(nn.Dropout3d(0.3)),
        torch.randn(2, 3, 4, 4, 2),
        ("0", "dropout3d", 0.3, "per feature map", (2, 3, 4, 4, 2), (2, 3, 1, 1, 1)),
    ),
    "attention": (
        Calls(lambda self, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)),
        torch.randn(2, 3, 5, 4),
        ("attention", "attention", 0.1, "per probability", (2, 3, 5, 5), (2, 3, 5, 5)),
    ),
    "LSTM": (
        nn.Sequential(nn.LSTM(3, 4, num_layers=2, dropout=0.3)),
        torch.randn(5, 2, 3),
        ("0.layer0", "recurrent", 0.3, INDEPENDENT, (5, 2, 4), (5, 2, 4)),
    ),
    "LockedDropout": (
        nn.Sequential(LockedDropout(0.3)),
        torch.randn(5, 2, 3),
        ("0", "locked", 0.3, "shared over time", (5, 2, 3), (1, 2, 3)),
    ),
    "LockedDropout, batch first": (
        nn.Sequential(LockedDropout(0.3, time_dim=1)),
        torch.randn(5, 2, 3),
        ("0", "locked", 0.3, "shared over time", (5, 2, 3), (5, 1, 3)),
    ),
    "WeightDrop": (
        nn.Sequential(WeightDrop(nn.Linear(3, 4), ["weight"], 0.4)),
        X,
        ("0.weight", "weight", 0.4, "per weight", (4, 3), (4, 3)),
    ),
    "EmbeddingDropout": (
        nn.Sequential(EmbeddingDropout(nn.Embedding(7, 3), 0.4)),
        torch.tensor([[1, 2]]),
        ("0", "embedding", 0.4, "per word", (7, 1), (7, 1)),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_dropout_is_a_site(kind):
    model, inputs, expected = KINDS[kind]
    assert rows(model, inputs) == [expected]


@pytest.mark.parametrize("weights", [True, False])
def test_multi_head_attention_has_one_site(weights):
    attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
    model = Calls(lambda self, x: self.attention(x, x, x, need_weights=weights)[0])
    model.attention = attention
    assert rows(model, torch.randn(3, 5, 4)) == [
        ("attention.attention", "attention", 0.1)
        + (("independent", (6, 5, 5), (6, 5, 5)) if weights else ())
        + (() if weights else ("per probability", (3, 2, 5, 5), (3, 2, 5, 5)))
    ]


def test_a_transformer_layer_has_four_named_sites():
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.1, batch_first=True)
    found = undrop.sites(nn.Sequential(layer), torch.randn(2, 3, 4))
    assert found.names == ("0.self_attn.attention", "0.dropout1", "0.dropout", "0.dropout2")
    assert {site.p for site in found} == {0.1}


def test_a_decoder_layer_has_six_sites():
    layer = nn.TransformerDecoderLayer(4, 2, 5, dropout=0.1, batch_first=True)
    x = torch.randn(2, 3, 4)
    found = undrop.sites(layer, (x, x))
    assert found.names == (
        *("self_attn.attention", "dropout1", "multihead_attn.attention"),
        *("dropout2", "dropout", "dropout3"),
    )


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_drop_between_layers_only(cell):
    model = cell(3, 4, num_layers=3, dropout=0.2, bidirectional=True)
    found = undrop.sites(model, torch.randn(5, 2, 3))
    assert [(s.name, s.shape) for s in found] == [("layer0", (5, 2, 8)), ("layer1", (5, 2, 8))]


def test_packed_sequences_are_dropped_entry_by_entry():
    packed = pack_padded_sequence(torch.randn(5, 2, 3), torch.tensor([5, 2]))
    model = Calls(lambda self, x: self.gru(x)[0].data)
    model.gru = nn.GRU(3, 4, num_layers=2, dropout=0.2)
    assert undrop.sites(model, (packed,))[0].shape == (7, 4)


def test_a_module_that_is_called_again_is_another_site():
    dropout = nn.Dropout(0.3)
    model = Calls(lambda self, x: self.a(self.b(self.a(x))))
    model.a, model.b = nn.Sequential(dropout), nn.Dropout(0.1)
    assert undrop.sites(model, X).names == ("a.0", "b", "a.0#2")


def test_functional_dropout_is_named_by_the_module_that_calls_it():
    inner = Calls(lambda self, x: F.dropout(F.dropout(x, 0.2), 0.3))
    model = nn.ModuleDict({"block": nn.Sequential(nn.Identity(), inner)})
    found = undrop.sites(model["block"], X)
    assert [(s.name, s.p) for s in found] == [("1.dropout", 0.2), ("1.dropout#2", 0.3)]


def test_idle_dropout_is_not_a_site():
    frozen = nn.Dropout(0.5)
    model = nn.Sequential(nn.Dropout(0.0), frozen, nn.Dropout(0.2))
    assert undrop.sites(model, X).names == ("1", "2")
    model.train()
    frozen.eval()
    assert undrop.sites(model, X).names == ("2",)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [(X, (2, 3)), ((X, X), (4, 3)), ([X, X], (4, 3)), ({"other": X, "x": X}, (4, 3))],
)
def test_sites_takes_inputs_as_a_tensor_a_tuple_or_a_dict(inputs, expected):
    class Joined(nn.Module):
        def forward(self, x, other=None):
            return F.dropout(x if other is None else torch.cat((x, other)), 0.5, self.training)

    assert undrop.sites(Joined(), inputs)[0].shape == expected


def test_a_dropout_that_drops_in_eval_mode_is_flagged():
    attend = Calls(lambda self, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1))
    found = undrop.sites(nn.Sequential(nn.Dropout(0.2), attend), torch.randn(2, 3, 4))
    assert [(s.name, s.active_in_eval) for s in found] == [("0", False), ("1.attention", True)]


def test_the_sites_print_as_a_table():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.25), LockedDropout(0.1))
    assert str(undrop.sites(model, X)).splitlines() == [
        "name  kind        p  mask              shape  in eval",
        "1     dropout  0.25  independent       2×4    off",
        "2     locked    0.1  shared over time  2×4    off",
    ]


def test_the_table_of_sites_fits_the_terminal_and_rounds_p(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name = "encoder_layer_with_a_very_long_name_in_a_model_of_many_parts"
    model = nn.Sequential(OrderedDict({f"{name}_{i}": LockedDropout(1 / 15) for i in (0, 1)}))
    found = undrop.sites(model, X)
    assert len(found.table().text(500).splitlines()[1]) > 80
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("0.0667" in line for line in lines) == 2
    assert "0.06666" not in str(found)
    assert found.to_json()[0]["p"] == 1 / 15


def test_sites_are_a_sequence_and_convert_to_json():
    found = undrop.sites(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.2)), X)
    assert len(found) == 2
    assert found[1].sigma == pytest.approx(0.5)
    assert found[:1].names == ("0",)
    assert found == undrop.sites(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.2)), X)
    assert found.to_json()[0]["name"] == "0"
    assert hash(found) == hash(found[:])


def test_finding_sites_changes_nothing():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Dropout(0.1))
    model[3].eval()
    modes = [module.training for module in model.modules()]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    buffers = dict(model[1].named_buffers())
    state = torch.get_rng_state()
    undrop.sites(model, X)
    undrop.sites(model.eval(), X)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(b is buffers[name] for name, b in model[1].named_buffers())
    model.train()
    model[3].eval()
    assert [module.training for module in model.modules()] == modes


def test_finding_sites_keeps_a_graph_that_holds_the_models_buffers():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[1].eval()
    loss = model(X).sum()
    undrop.sites(model, X)
    loss.backward()


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        (nn.Linear(3, 3), r"Linear: add one, e.g. nn.Dropout\(0.1\)"),
        (nn.Sequential(nn.Dropout(0.0)), r"Sequential: it has '0' \(p = 0\), but none was active"),
    ],
)
def test_a_model_without_dropout_is_an_error(model, hint):
    with pytest.raises(NoDropoutError, match=rf"no active dropout .* pass of {hint}"):
        undrop.sites(model, X)


def test_sites_refuses_a_function_as_model():
    with pytest.raises(OptionError, match=r"must be an nn.Module, got function: wrap it in one"):
        undrop.sites(lambda x: F.dropout(x, 0.5), torch.randn(2, 3))


@pytest.mark.slow
def test_undrop_finds_the_sites_of_a_compiled_model():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    assert undrop.sites(torch.compile(model), X).names == ("1",)


class RegistersABuffer(nn.Module):
    """Registers a buffer in its first pass."""

    def __init__(self):
        super().__init__()
        self.dropout, self.ready = nn.Dropout(0.3), False

    def forward(self, x):
        if not self.ready:
            self.register_buffer("scale", x.new_ones(()))
            self.ready = True
        return self.dropout(x) * self.scale


def test_a_buffer_that_the_first_pass_registers_is_kept():
    model, x = RegistersABuffer(), torch.ones(2, 3)
    assert [site.name for site in undrop.sites(model, x)] == ["dropout"]
    assert model(x).shape == (2, 3)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    "script", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 3), check_trace=False)]
)
def test_a_model_in_torchscript_is_refused(script):
    model = script(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3)))
    with pytest.raises(OptionError, match="TorchScript hides its dropout: pass the module"):
        undrop.sites(model, torch.ones(2, 3))


class Gated(nn.Module):
    """Two dropouts, one behind a gate."""

    def __init__(self, gate):
        super().__init__()
        self.first, self.second, self.gate = nn.Dropout(0.1), nn.Dropout(0.2), gate

    def forward(self, x):
        return self.first(x) + self.gate * self.second(x)


@pytest.mark.parametrize(("gate", "acts"), [(0.0, False), (1e-30, True)])
def test_each_site_says_whether_its_noise_reaches_the_output(gate, acts):
    found = undrop.sites(Gated(gate), X)
    assert [site.acts for site in found] == [True, acts]
    assert [row["acts"] for row in found.to_json()] == [True, acts]
    assert ("NO, u = 0" in repr(found)) == (not acts)


def test_without_a_derivative_it_is_unknown_whether_a_site_acts():
    class Fails(nn.Dropout):
        def forward(self, x):
            if torch.is_grad_enabled():
                raise RuntimeError("no gradients here")
            return super().forward(x)

    (site,) = undrop.sites(Fails(), X)
    assert site.acts is None


def test_finding_sites_does_not_change_the_inputs_of_in_place_dropout():
    x = torch.randn(2, 3)
    before = x.clone()
    undrop.sites(nn.Dropout(0.5, inplace=True), x)
    assert not x.requires_grad
    assert torch.equal(x, before)
