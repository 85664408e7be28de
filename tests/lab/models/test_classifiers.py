"""MLP and ConvNet."""

import pytest
import torch
from torch import nn

from undrop.errors import OptionError
from undrop.lab.models import MLP, ConvNet


def test_an_mlp_matches_its_equations():
    torch.manual_seed(0)
    model = MLP([6, 5, 4, 3]).double().eval()
    x = torch.randn(2, 2, 3, dtype=torch.double)
    a, b, c = model.layers
    torch.testing.assert_close(model(x), c(b(a(x.flatten(1)).relu()).relu()))


def test_an_mlp_drops_only_inputs_and_hidden_units():
    model = MLP([6, 5, 4, 3], dropout=0.3, input_dropout=0.2)
    found = {n: m.p for n, m in model.named_modules() if isinstance(m, nn.Dropout)}
    assert found == {"input_dropout": 0.2, "hidden_dropouts.0": 0.3, "hidden_dropouts.1": 0.3}
    linear = MLP([6, 3])
    x = torch.randn(4, 6)
    assert torch.equal(linear(x), linear.layers[0](x))


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("side", [8, 28, 33])
def test_a_convnet_takes_images_of_any_size(batch_norm, side):
    torch.manual_seed(0)
    model = ConvNet(3, 7, widths=(4, 5, 6), batch_norm=batch_norm)
    x = torch.randn(2, 3, side, side)
    assert model(x).shape == (2, 7)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == (3 if batch_norm else 0)


def test_a_convnet_drops_whole_feature_maps():
    torch.manual_seed(0)
    stage = ConvNet(widths=(16,), feature_dropout=0.5).stages[0]
    with torch.no_grad():
        stage.convolution.weight.zero_()
        stage.convolution.bias.fill_(1.0)
        maps = stage(torch.randn(3, 1, 8, 8))
    assert torch.equal(maps, maps[..., :1, :1].expand_as(maps))
    assert set(maps.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MLP([4]), r"sizes must name at least 2 sizes, got \[4\]"),
        (lambda: MLP([4, 0]), r"sizes\[1\] must be a whole number of at least 1, got 0"),
        (lambda: MLP([4, 2], dropout=1.0), r"dropout must lie in \[0, 1\), got 1\.0"),
        (lambda: MLP([4, 2], input_dropout=-1.0), r"input_dropout must lie in .* got -1\.0"),
        (lambda: ConvNet(0), "channels must be a whole number of at least 1, got 0"),
        (lambda: ConvNet(1, 0), "classes must be a whole number of at least 1, got 0"),
        (lambda: ConvNet(widths=()), r"widths must name at least 1 sizes, got \[\]"),
        (lambda: ConvNet(feature_dropout=1.0), r"feature_dropout must lie in .* got 1\.0"),
        (lambda: ConvNet(output_dropout=1.0), r"output_dropout must lie in .* got 1\.0"),
    ],
)
def test_invalid_options_of_classifiers_raise_errors_that_name_them(make, message):
    with pytest.raises(OptionError, match=message):
        make()
