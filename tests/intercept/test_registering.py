"""register_site declares a function or a module class, whose noise undrop can't see, as a site."""

import numpy as np
import pytest
import torch
from torch import nn

import undrop
from undrop.errors import NoDropoutError, OptionError


def hidden(h, p):
    return h * torch.from_numpy(np.random.binomial(1, 1 - p, h.shape)).to(h) / (1 - p)


class Net(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, 8), nn.Linear(8, 3), drop

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.first(x)), 0.3))


X, Y = torch.randn(6, 4), torch.randint(3, (6,))


def test_noise_from_numpy_is_named_in_the_error():
    with pytest.raises(NoDropoutError, match=r"NumPy's random in 'the model'.*register_site"):
        undrop.sites(Net(hidden), X)


def test_a_declared_function_is_a_site():
    net = Net(undrop.register_site(hidden, p="p", shared=(1,), mask="per example"))
    (site,) = undrop.sites(net, X)
    assert (site.p, site.mask_shape, site.mask) == (0.3, (6, 1), "per example")
    step = undrop.Analytic()(net, X, Y)
    assert step.engine == "antithetic: one stacked pass"
    assert step.parts["explicit"] > 0.0


def test_a_declared_class_is_a_site_and_drops_as_before():
    @undrop.register_site(p="rate")
    class Hidden(nn.Module):
        rate = 0.4

        def forward(self, h, _):
            return hidden(h, self.rate) if self.training else h

    net = Net(Hidden())
    (site,) = undrop.sites(net, X)
    assert (site.name, site.p, site.active_in_eval) == ("drop", 0.4, False)
    assert not torch.equal(net(X), net(X))


def test_a_declared_function_runs_compiled(caplog):
    """This holds even for a function that torch can't compile: the site rule runs in its place."""
    found = []
    for wrap in (lambda net: net, lambda net: torch.compile(net, backend="eager")):
        torch.manual_seed(0)
        net = Net(undrop.register_site(hidden, p="p"))
        objective = undrop.Analytic(generator=torch.Generator().manual_seed(0))
        found.append(objective(wrap(net), X, Y).parts)
    assert found[0] == pytest.approx(found[1])
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        assert "without torch.compile" not in caplog.text


def test_register_site_refuses_what_it_cannot_declare():
    with pytest.raises(OptionError, match="has no argument 'q'"):
        undrop.register_site(hidden, p="q")
    with pytest.raises(OptionError, match="takes a function or a module class"):
        undrop.register_site(nn.Dropout(), p=0.1)
