"""uᵀHu by class adds up to uᵀHu, for every loss with classes."""

import pytest
import torch

from undrop.diagnosis.measure.explicit import ClassShares
from undrop.losses import MSE, BCEWithLogits, CrossEntropy, Generic, LinearCrossEntropy


@pytest.mark.parametrize("loss", [CrossEntropy(ignore_index=2), BCEWithLogits(), MSE()])
def test_the_quadratic_by_class_adds_up_to_the_quadratic(loss):
    torch.manual_seed(0)
    output, u = torch.randn(2, 6, 5, 4).double().unbind(0)
    classes = isinstance(loss, CrossEntropy)
    target = torch.randint(4, (6, 5)) if classes else torch.rand(6, 5, 4).double()
    found = loss.by_class(output, u, target)
    total = loss.derivatives(output, u, target).quadratic * loss.count(output, target)
    assert found.quadratic.shape == (4,)
    assert float(found.quadratic.sum()) == pytest.approx(float(total))


def test_a_fused_output_layer_has_the_same_quadratic_by_class_as_its_logits():
    torch.manual_seed(0)
    weight, bias = torch.randn(7, 3).double(), torch.randn(7).double()
    features, u = torch.randn(2, 10, 3).double().unbind(0)
    target = torch.randint(7, (10,))
    fused = LinearCrossEntropy(weight, bias).by_class(features, u, target)
    plain = CrossEntropy().by_class(features @ weight.T + bias, u @ weight.T, target)
    for a, b in zip(fused, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_a_loss_without_classes_has_no_quadratic_by_class():
    u = torch.randn(2, 3)
    assert Generic(lambda f, y: f.mean()).by_class(u, u, None) is None


def test_the_weights_of_classes_are_the_diagonal_of_the_hessian():
    logits = torch.tensor([[0.0, 0.0], [100.0, 0.0]]).double()
    found = CrossEntropy().by_class(logits, torch.ones(2, 2), torch.tensor([0, 1]))
    # the model is certain of the second row: p(1 - p) = 0
    torch.testing.assert_close(found.diagonal, torch.tensor([0.25, 0.25]).double())


def test_shares_of_the_top_classes_have_names_and_errors():
    torch.manual_seed(0)
    table, sums = ClassShares(["a", "b", "c"]), torch.zeros(3).double()
    logits, target = torch.randn(20, 3).double(), torch.randint(3, (20,))
    for _ in range(50):
        u = torch.randn(20, 3).double() * torch.tensor([5.0, 1.0, 0.0])
        found = CrossEntropy().by_class(logits, u, target)
        table.add(0, 20.0, found)
        sums += found.quadratic
    top = table.top(2)
    assert top[0].name == "a"
    for share in top:
        assert share.share.value == pytest.approx(float(sums[share.number] / sums.sum()))
        assert 0.0 < share.share.stderr < 0.05
    assert ClassShares().top() == []
