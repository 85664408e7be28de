"""Bad input raises an error of one sentence, and the model does not change."""

from contextlib import contextmanager, suppress

import pytest
import torch
import torch.autograd.forward_ad as forward
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import undrop
from device import DEVICE, new_generator
from undrop.errors import (
    DataError,
    EngineError,
    EvalModeError,
    GradientsDisabledError,
    NoDropoutError,
    NonFiniteError,
    OptionError,
    OutputError,
    TargetError,
    UndropError,
    UnsupportedDropoutError,
)

ENGINES = ("tangent", "antithetic", "reverse", "exact")
WITH_DROPOUT = {
    "dropout": undrop.Dropout,
    "drop-k": lambda: undrop.Dropout(3),
    "drop-k own masks": lambda: undrop.Dropout(2, generator=torch.Generator(DEVICE)),
    "drop-k resampled": lambda: undrop.Dropout(2, noise="resampled"),
    "drop-k analytic": lambda: undrop.Dropout(2, noise="analytic"),
    "analytic": undrop.Analytic,
    **{name: lambda name=name: undrop.Analytic(engine=name) for name in ENGINES},
}
OBJECTIVES = WITH_DROPOUT | {"none": undrop.NoRegularization, "l2": lambda: undrop.L2(0.1)}


@pytest.fixture(params=OBJECTIVES)
def objective(request):
    return OBJECTIVES[request.param]()


@pytest.fixture(params=WITH_DROPOUT)
def dropping(request):
    return WITH_DROPOUT[request.param]()


class Net(nn.Module):
    """A net with batch norm and a last function that a test chooses."""

    def __init__(self, dropout=None, end=None):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.3) if dropout is None else dropout
        self.last = nn.Linear(4, 5)
        self.end = end

    def forward(self, x):
        y = self.last(self.dropout(self.norm(self.layer(x))))
        return y if self.end is None else self.end(y)


X = torch.randn(4, 3, generator=new_generator(0))
Y = torch.tensor([1, 4, 0, 2])


REPORTED_AT_ONCE = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="a step never waits for a device: a later step reports it"
)


@contextmanager
def left_as_it_was(model):
    """Check that no mode stays active, and that tensors and modes of the model are unchanged."""
    values = {name: value.clone() for name, value in model.state_dict().items()}
    held = [*model.parameters(), *model.buffers()]
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    functions = F.dropout, torch.lstm, F.batch_norm
    modes_around = _get_current_function_mode_stack()
    yield
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name
    after = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(held, after, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert [module.training for module in model.modules()] == modes
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert (F.dropout, torch.lstm, F.batch_norm) == functions
    assert _get_current_function_mode_stack() == modes_around  # the device of the tests is one
    assert _get_current_dispatch_mode_stack() == []
    assert forward._current_level == -1


def refused(objective, error, message, model, x=X, y=Y):
    with left_as_it_was(model), pytest.raises(error, match=message) as caught:
        objective(model, x, y).backward()
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    assert objective.steps == 0


def test_every_error_is_a_subclass_of_undrop_error():
    ours = [e for e in vars(undrop.errors).values() if isinstance(e, type)]
    assert all(issubclass(e, UndropError) for e in ours if issubclass(e, Exception))


def test_a_model_without_dropout_is_refused_with_advice(dropping):
    model = Net(nn.Identity())
    refused(dropping, NoDropoutError, r"no active dropout .* pass of Net: add one", model)


@pytest.mark.parametrize("make", [undrop.NoRegularization, lambda: undrop.L2(0.1)])
def test_no_regularization_and_l2_accept_a_model_without_dropout(make):
    make()(Net(nn.Identity()), X, Y).backward()


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_in_eval_mode_is_noticed_later(engine):
    model, objective = Net(), undrop.Analytic(engine=engine)
    objective(model, X, Y).backward()
    model.zero_grad()
    model.dropout.eval()
    with (
        left_as_it_was(model),
        pytest.raises(NoDropoutError, match="but none was active in the pass"),
    ):
        objective(model, X, Y)


@pytest.mark.parametrize("later", [False, True])
def test_a_drop_probability_of_zero_is_the_plain_loss(objective, later):
    model = Net()
    if later:
        objective(model, X, Y)
    model.dropout.p = 0.0
    plain = undrop.NoRegularization()(model, X, Y).parts["loss"]
    parts = objective(model, X, Y).parts
    assert parts["loss"] == pytest.approx(plain, rel=1e-5)
    assert parts.get("explicit", 0.0) == parts.get("implicit", 0.0) == 0.0


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_drop_probability_of_zero_or_one_logs_nothing_else(p, caplog):
    with suppress(UnsupportedDropoutError):
        undrop.Analytic()(Net(nn.Dropout(p)), X, Y)
    assert caplog.messages == []


@pytest.mark.parametrize("later", [False, True])
def test_every_objective_refuses_an_empty_batch(objective, later):
    model = Net(end=lambda y: y)
    if later:
        objective(model, X, Y)
    with pytest.raises(DataError, match=r"batch is empty \(.* has shape \(0, 3\)\): skip it\.$"):
        objective(model, X[:0], Y[:0])
    assert objective.steps == later


def test_an_empty_tensor_among_others_is_not_an_empty_batch():
    class WithContext(Net):
        def forward(self, context, x):
            return super().forward(x) + context.sum()

    assert undrop.Analytic()(WithContext(), (X[:0], X), Y).parts["loss"] > 0.0


def test_a_model_in_eval_mode_is_refused(objective):
    message = r"Net is in eval mode, where its dropout is off: call model.train\(\) first"
    refused(objective, EvalModeError, message, Net().eval())


def test_p_of_1_is_refused_where_sigma_is_needed(objective):
    message = r"the dropout at 'dropout' has p = 1: undrop needs 0 < p < 1"
    model = Net(nn.Dropout(1.0))
    torch_masks = type(objective) is undrop.Dropout and not objective.draws_masks
    if torch_masks and objective.noise != "analytic":
        assert objective(model, X, Y).total.isfinite()  # torch's own dropout needs no σ
    elif objective.needs_dropout:
        with pytest.raises(UnsupportedDropoutError, match=message):
            objective(model, X, Y).backward()


@pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_is_refused(objective, kind):
    message = r"alpha dropout at 'dropout' is not multiplicative zero-mean noise.*use nn.Dropout"
    refused(objective, UnsupportedDropoutError, message, Net(kind(0.2)))


class Chooses(Net):
    """A net with ``torch.cond``."""

    def forward(self, x):
        h = self.layer(x)
        return self.last(self.dropout(torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,))))


def test_torch_cond_is_refused_in_every_step(objective):
    model = Chooses()
    for _ in range(2):  # the first one loads torch's compiler
        with pytest.raises(EngineError, match=r"Chooses calls torch.cond, .*: use an if statement"):
            objective(model, X, Y)


class Remembers(Net):
    """A net that computes its features once."""

    features = None

    def forward(self, x):
        if self.features is None:
            self.features = self.dropout(self.layer(x))
        return self.last(self.features)


def test_a_model_that_keeps_what_its_dropout_made_is_refused(dropping):
    model = Remembers()
    with pytest.raises(NoDropoutError, match="Remembers reaches 'dropout' in its first pass only"):
        dropping(model, X, Y)
    with pytest.raises(NoDropoutError, match="forward keeps no result of an earlier call"):
        dropping(model, X, Y)


def test_a_step_without_gradients_is_refused(objective):
    message = r"needs gradients: call it outside of torch.no_grad\(\) and torch.inference_mode\(\)"
    with torch.no_grad():
        refused(objective, GradientsDisabledError, message, Net())
    with torch.inference_mode():
        refused(objective, GradientsDisabledError, message, Net())


def test_a_model_without_trainable_parameters_is_refused(objective):
    message = r"no parameter of Net requires a gradient: set requires_grad_\(True\)"
    refused(objective, GradientsDisabledError, message, Net().requires_grad_(False))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_without_trainable_parameters_is_refused_for_your_own_loss_too(engine):
    objective = undrop.Analytic(
        engine=engine, explicit="identity", loss=lambda f, y: f.square().sum(-1).mean()
    )
    model = Net().requires_grad_(False)
    refused(objective, GradientsDisabledError, "no parameter of Net requires a gradient", model)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (Y.float(), "class indices of an integer type, got torch.float32"),
        (Y[:3], r"must have shape \(4,\) .* got \(3,\)"),
        (Y + 5, r"must lie in 0 … 4"),
        ([0, 1, 2, 3], "of an integer type, got list"),
    ],
)
def test_objectives_refuse_targets_that_do_not_fit(objective, y, message):
    refused(objective, TargetError, message, Net(), y=y)


@pytest.mark.parametrize(
    ("end", "got"),
    [(lambda y: None, "NoneType"), (lambda y: {"scores": y}, "dict"), (lambda y: (), "tuple")],
)
def test_an_output_without_a_tensor_is_refused(objective, end, got):
    message = rf"the model returned {got}, in which undrop finds no tensor .* `logits`"
    refused(objective, OutputError, message, Net(end=end))


@pytest.mark.parametrize(
    "end", [lambda y: {"logits": y}, lambda y: (y, "state"), lambda y: [y], lambda y: y]
)
def test_an_output_with_one_tensor_for_the_loss_is_accepted(objective, end):
    step = objective(Net(end=end), X, Y)
    assert step.total.isfinite()


NOT_FINITE = r"the (loss part is|loss(, explicit)? and \w+ parts are) not finite at step 0"


@REPORTED_AT_ONCE
def test_an_activation_that_is_not_finite_is_named_by_its_site(objective):
    message = rf"{NOT_FINITE}: the first activation that is not finite is at site 'dropout'"
    refused(objective, NonFiniteError, message, Net(), X.clone().fill_(torch.inf))


@REPORTED_AT_ONCE
def test_the_error_for_a_nonfinite_loss_says_that_all_sites_are_finite(objective):
    message = rf"{NOT_FINITE}, but the activations at all sites are finite: look at"
    refused(objective, NonFiniteError, message, Net(end=lambda y: y / 0.0))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the CPU reports it at once")
def test_on_another_device_a_later_step_reports_a_nonfinite_value():
    model, objective = Net(end=lambda y: y / 0.0), undrop.Analytic()
    with pytest.raises(NonFiniteError, match="not finite at step 0, but the activations"):
        [objective(model, X, Y) for _ in range(5)]


@REPORTED_AT_ONCE
@pytest.mark.parametrize("engine", ENGINES)
def test_a_nonfinite_regularizer_raises_an_error(engine):
    """The square root is finite at 0 and its derivative is not."""
    objective = undrop.Analytic(
        engine=engine, loss=lambda f, y: (f - f.detach()).abs().sqrt().mean()
    )
    with pytest.raises(UndropError):
        objective(Net(), X, Y)


class Broken(RuntimeError):
    """What a model may raise."""


def breaks(y):
    raise Broken("from inside of the model")


def test_a_model_that_raises_is_left_as_it_was(objective):
    model = Net(end=breaks)
    with left_as_it_was(model), pytest.raises(Broken, match="from inside of the model"):
        objective(model, X, Y)


def test_a_model_that_raises_after_its_first_step_is_left_as_it_was(objective):
    """The model raises after its sites are found and an engine is chosen, in a pass of a step."""
    model = Net()
    objective(model, X, Y).backward()
    model.zero_grad()
    model.end = breaks
    with left_as_it_was(model), pytest.raises(Broken, match="from inside of the model"):
        objective(model, X, Y)


@pytest.mark.parametrize("make", ["drop-k", "drop-k own masks", "drop-k resampled"])
def test_a_model_that_raises_in_a_later_pass_is_left_as_it_was(make):
    model, objective = Net(), OBJECTIVES[make]()
    step = objective(model, X, Y)
    model.end = breaks
    with left_as_it_was(model), pytest.raises(Broken):
        _ = step.total


def test_a_model_that_raised_works_in_the_next_step(objective):
    model = Net(end=breaks)
    with pytest.raises(Broken):
        objective(model, X, Y)
    model.end = None
    assert objective(model, X, Y).total.isfinite()


def test_bad_input_to_the_model_is_the_models_own_error(objective):
    model = Net()
    with left_as_it_was(model), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        objective(model, torch.randn(4, 7), Y)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: undrop.Analytic(explicit="fisher"),
            "explicit must be one of 'hessian', 'identity'",
        ),
        (lambda: undrop.Analytic(explicit=None, implicit=False), "use undrop.NoRegularization"),
        (lambda: undrop.Analytic(fraction=0.0), r"fraction must lie in \(0, 1\], got 0.0"),
        (lambda: undrop.Analytic(fraction=1.1), r"fraction must lie in \(0, 1\], got 1.1"),
        (
            lambda: undrop.Analytic(fraction=0.5, engine="reverse"),
            "got engine='reverse'",
        ),
        (
            lambda: undrop.Analytic(fraction=0.5, engine="exact"),
            "got engine='exact'",
        ),
        (lambda: undrop.Analytic(samples=0), "samples must be a whole number of at least 1, got 0"),
        (lambda: undrop.Analytic(samples=1.5), "samples must be a whole number .* got 1.5"),
        (lambda: undrop.Analytic(interval=0), "interval must be a whole number .* got 0"),
        (lambda: undrop.Analytic(mask="locked"), "no mask structure 'locked': use one of as-dec"),
        (lambda: undrop.Analytic(engine="fast"), "unknown engine 'fast': there are antithetic"),
        (lambda: undrop.Analytic(samples=True), "samples must be a whole number .* got True"),
        (lambda: undrop.Analytic(interval=True), "interval must be a whole number .* got True"),
        (lambda: undrop.Analytic(fraction="half"), r"fraction must lie in \(0, 1\], got 'half'"),
        (lambda: undrop.Analytic(fraction=None), r"fraction must lie in \(0, 1\], got None"),
        (lambda: undrop.Analytic(strength=None), "strength must be finite .* got None: pass a"),
        (lambda: undrop.Analytic(strength="1"), "strength must be finite .* got '1': pass a"),
        (lambda: undrop.Analytic(strength=-1.0), "strength must be finite and not negative"),
        (lambda: undrop.Analytic(sites={"*": -1.0}), "site weights must be finite and not neg"),
        (lambda: undrop.Analytic(sites={"*": "x"}), r"site weights .* got \{'\*': 'x'\}"),
        (lambda: undrop.Analytic(sites=3), "sites must be a name pattern, .* got int"),
        (lambda: undrop.Dropout(sites=3), "sites must be a name pattern, .* got int"),
        (lambda: undrop.Analytic(loss="mse"), "loss must be a Loss or a callable, got str"),
        (lambda: undrop.Analytic(loss=nn.MSELoss), r"got the class MSELoss: pass MSELoss\(\)"),
        (lambda: undrop.Watcher(loss=undrop.MSE), r"got the class MSE: pass MSE\(\)"),
        (lambda: undrop.Dropout(True), "k must be a whole number of at least 1, got True"),
        (lambda: undrop.Dropout(0), "k must be a whole number of at least 1, got 0"),
        (lambda: undrop.Dropout(2.0), "k must be a whole number of at least 1, got 2.0"),
        (lambda: undrop.Dropout(noise="white"), "noise must be None, 'resampled' or 'analytic'"),
        (
            lambda: undrop.Dropout(2, noise="analytic", engine="exact"),
            "which have no noise: use another engine",
        ),
        (lambda: undrop.Dropout(mask="locked"), "no mask structure 'locked'"),
        (lambda: undrop.L2(-1.0), "L2 weight must be finite and not negative, got -1.0"),
        (lambda: undrop.L2(float("inf")), "L2 weight must be finite"),
        (lambda: undrop.L2(None), "L2 weight must be finite and not negative, got None"),
    ],
)
def test_options_outside_of_their_range_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()


@pytest.mark.parametrize("strength", [-1.0, float("nan"), float("inf"), None, "1"])
def test_a_strength_schedule_that_returns_an_invalid_strength_is_refused(strength):
    objective = undrop.Analytic(strength=lambda step: strength)
    refused(objective, OptionError, "strength must be finite and not negative", Net())


@pytest.mark.parametrize("strength", [1, torch.tensor(1.0), lambda step: torch.tensor(1.0)])
def test_a_strength_may_be_any_number(strength):
    model = Net()
    parts = [
        undrop.Analytic(strength=s, generator=new_generator(0))(model, X, Y).parts
        for s in (1.0, strength)
    ]
    assert parts[0] == parts[1]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda x: x, "model must be an nn.Module, got function: wrap it in one"),
        (nn.Linear, r"model must be an nn.Module, got the class Linear: pass Linear\(…\)"),
    ],
)
def test_a_model_that_is_not_a_module_is_refused(objective, model, message):
    with pytest.raises(OptionError, match=message):
        objective(model, X, Y)


def test_wrong_targets_are_refused_before_the_search_for_a_plan(caplog):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), torch.randn(6, 4)
    with pytest.raises(TargetError):
        undrop.Analytic()(model, x, torch.randint(3, (5,)))
    assert not caplog.messages
