"""Targets of the wrong shape, type or range, and the values that ``loss=`` accepts."""

import re

import pytest
import torch
from torch import nn

from undrop.errors import OptionError, TargetError
from undrop.losses import (
    CONVERTERS,
    MSE,
    BCEWithLogits,
    CrossEntropy,
    Generic,
    LinearCrossEntropy,
    ModelLoss,
    as_loss,
)

LOGITS = torch.zeros(2, 3, 5)


@pytest.mark.parametrize(
    ("loss", "target", "message"),
    [
        (CrossEntropy(), torch.zeros(2, 3), "class indices of an integer type, got torch.float32"),
        (CrossEntropy(), torch.zeros(2, 3).bool(), "of an integer type, got torch.bool"),
        (CrossEntropy(), [[0, 1, 2]] * 2, "of an integer type, got list"),
        (
            CrossEntropy(),
            None,
            r"there are no targets: pass them .*objective\(model, inputs, targets",
        ),
        (MSE(), None, r"there are no targets: .* as a pair \(inputs, targets\)"),
        (
            CrossEntropy(),
            torch.zeros(6).long(),
            r"must have shape \(2, 3\) \(the output's without .* 5 classes\), got \(6,\)",
        ),
        (CrossEntropy(), torch.full((2, 3), 5), r"must lie in 0 … 4 .* got 5"),
        (CrossEntropy(), torch.full((2, 3), -1), r"ignore_index = -100\), got -1"),
        (CrossEntropy(ignore_index=7), torch.full((2, 3), -100), "ignore_index = 7.*got -100"),
        (BCEWithLogits(), torch.zeros(2, 3, 5).long(), "floating-point type, got torch.int64"),
        (BCEWithLogits(), torch.zeros(2, 3), r"the output's shape \(2, 3, 5\), got \(2, 3\)"),
        (BCEWithLogits(), torch.full((2, 3, 5), 1.5), r"must lie in \[0, 1\], got 1.5"),
        (BCEWithLogits(), torch.full((2, 3, 5), torch.nan), r"must lie in \[0, 1\], got nan"),
        (MSE(), torch.zeros(2, 3, 1), r"the output's shape \(2, 3, 5\), got \(2, 3, 1\)"),
        (MSE(), torch.full((2, 3, 5), torch.nan), "got nan"),
        (Generic(lambda f, y: f), torch.zeros(2), r"got a tensor of shape \(2, 3, 5\)"),
        (Generic(lambda f, y: 1.0), torch.zeros(2), "must return one number .* got a float"),
    ],
)
def test_losses_refuse_targets_that_do_not_fit(loss, target, message):
    def checks():
        loss.check(LOGITS, target)
        loss.check_values(LOGITS, target)
        loss.value(LOGITS, target)

    with pytest.raises(TargetError, match=message):
        checks()


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (CrossEntropy(), torch.full((2, 3), 4)),
        (CrossEntropy(), torch.full((2, 3), -100)),
        (CrossEntropy(), torch.full((2, 3), 4, dtype=torch.int32)),
        (CrossEntropy(), torch.full((2, 3), 4, dtype=torch.uint8)),
        (BCEWithLogits(), torch.ones(2, 3, 5)),
        (MSE(), torch.randn(2, 3, 5)),
        (Generic(lambda f, y: f.mean() * len(y)), ["anything"]),
    ],
)
def test_losses_accept_targets_that_fit(loss, target):
    loss.check(LOGITS, target)
    loss.check_values(LOGITS, target)


def test_every_method_of_a_loss_names_a_target_out_of_range():
    loss, target = CrossEntropy(), torch.full((2, 3), 5)
    u = torch.ones_like(LOGITS)
    for call in (
        lambda: loss.value(LOGITS, target),
        lambda: loss.derivatives(LOGITS, u, target),
        lambda: loss.combined(LOGITS, u, target),
    ):
        with pytest.raises(TargetError, match=r"must lie in 0 … 4 .* got 5"):
            call()


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (None, ModelLoss),
        (nn.CrossEntropyLoss(), CrossEntropy),
        (nn.CrossEntropyLoss(weight=torch.ones(5)), Generic),
        (nn.CrossEntropyLoss(reduction="sum"), Generic),
        (nn.BCEWithLogitsLoss(), BCEWithLogits),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(5)), Generic),
        (nn.MSELoss(), MSE),
        (nn.MSELoss(reduction="sum"), Generic),
        (nn.functional.smooth_l1_loss, Generic),
    ],
)
def test_torchs_losses_convert_to_the_matching_loss_class(given, kind):
    assert type(as_loss(given)) is kind


def test_torchs_cross_entropy_keeps_its_settings():
    loss = as_loss(nn.CrossEntropyLoss(ignore_index=3, label_smoothing=0.1))
    assert (loss.ignore_index, loss.label_smoothing) == (3, 0.1)
    assert as_loss(loss) is loss


def test_a_string_as_loss_is_refused():
    with pytest.raises(OptionError, match="loss must be a Loss or a callable, got str"):
        as_loss("cross-entropy")


class Focal(nn.CrossEntropyLoss):
    def forward(self, output, target):
        return super().forward(output, target) ** 2


class Rooted(nn.MSELoss):
    def forward(self, output, target):
        return super().forward(output, target).sqrt()


@pytest.mark.parametrize(
    ("loss", "target"),
    [(Focal(), torch.tensor([1, 0])), (Rooted(), torch.zeros(2, 3))],
    ids=["focal", "rooted"],
)
def test_a_subclass_of_a_torch_loss_keeps_its_own_computation(loss, target):
    output = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]])
    assert as_loss(loss).value(output, target) == loss(output, target)


def test_torchs_cross_entropy_has_its_classes_in_dimension_one():
    output, target = torch.randn(2, 4, 4), torch.randint(4, (2, 4))  # as many classes as positions
    theirs = nn.CrossEntropyLoss()
    torch.testing.assert_close(as_loss(theirs).value(output, target), theirs(output, target))
    with pytest.raises(
        TargetError, match=r"must have shape \(2, 4\).* its 4 classes\), got \(2, 5\)"
    ):
        as_loss(theirs).check(output, torch.zeros(2, 5, dtype=torch.long))


@pytest.mark.parametrize("loss", [CrossEntropy(), LinearCrossEntropy(torch.randn(200, 3))])
def test_uint8_targets_have_no_ignored_value(loss):
    """-100 is 156 as a byte, and 156 is a class."""
    output = torch.randn(4, 200 if isinstance(loss, CrossEntropy) else 3)
    target = torch.tensor([156, 3, 156, 7])
    for kind in (torch.uint8, torch.int64):
        assert loss.count(output, target.to(kind)) == 4
    torch.testing.assert_close(
        loss.value(output, target.to(torch.uint8)), loss.value(output, target)
    )


@pytest.mark.parametrize(
    ("loss", "target"),
    [(nn.NLLLoss(), torch.tensor([1, 0])), (nn.L1Loss(), torch.zeros(2, 3))],
    ids=["nll", "l1"],
)
def test_a_loss_without_curvature_is_logged_once(loss, target, caplog):
    output, u = torch.randn(2, 2, 3)
    converted = as_loss(loss)
    for _ in range(2):
        assert converted.derivatives(output.requires_grad_(), u, target).quadratic == 0.0
    (record,) = caplog.records
    assert "is linear around the model's output" in record.message


def test_class_probabilities_are_refused_except_by_torchs_function():
    output, target = torch.randn(2, 3), torch.softmax(torch.randn(2, 3), -1)
    with pytest.raises(TargetError, match=r"float32: .* F.cross_entropy for class probabilities"):
        CrossEntropy().check(output, target)
    found = as_loss(nn.functional.cross_entropy).derivatives(output, torch.ones(2, 3), target)
    torch.testing.assert_close(found.quadratic, torch.tensor(0.0), atol=1e-6, rtol=0.0)
    p, u = torch.softmax(output, -1), torch.randn(2, 3)
    expected = ((p * u.square()).sum(-1) - (p * u).sum(-1).square()).mean()
    found = as_loss(nn.functional.cross_entropy).derivatives(output, u, target)
    torch.testing.assert_close(found.quadratic, expected)


@pytest.mark.parametrize("loss", ["nn.MSELoss()", "nn.BCEWithLogitsLoss()", "F.cross_entropy"])
def test_the_error_for_float_targets_names_the_losses_that_take_them(loss):
    """0 and 1 may be numbers, labels or certain probabilities."""
    with pytest.raises(TargetError, match=rf"--loss torch.nn:MSELoss.*{re.escape(loss)} for"):
        CrossEntropy().check(torch.randn(4, 3), torch.ones(4, 3))


def test_a_new_loss_is_registered_for_a_torch_class():
    class Halved(nn.MSELoss):
        pass

    assert type(as_loss(Halved())) is Generic
    CONVERTERS.register(Halved)(lambda loss: MSE() if loss.reduction == "mean" else None)
    assert type(as_loss(Halved())) is MSE
    assert type(as_loss(Halved(reduction="sum"))) is Generic
