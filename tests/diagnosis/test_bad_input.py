"""Bad input is refused in one sentence that names it."""

import math

import pytest
import torch
from torch import nn

import undrop
from undrop import errors


def model():
    return nn.Sequential(nn.Linear(3, 30), nn.Dropout(0.3), nn.Linear(30, 3))


def batch():
    return torch.randn(4, 3), torch.tensor([0, 1, 2, 0])


def refused(error, message, *args, **options):
    with pytest.raises(error, match=message):
        undrop.diagnose(*args, **{"progress": False, "seconds": 1.0, **options})


def test_diagnose_refuses_an_empty_list_of_batches():
    refused(errors.DataError, "there are no batches: pass at least one pair", model(), [])


def test_diagnose_refuses_an_empty_batch():
    x, y = batch()
    refused(errors.DataError, r"the batch is empty .*: skip it\.$", model(), [(x[:0], y[:0])])


def test_diagnose_refuses_a_used_up_generator():
    spent = (batch() for _ in range(3))
    list(spent)
    refused(errors.DataError, "a generator that has been used up is empty", model(), spent)


def test_fewer_batches_than_the_limit_are_all_used():
    found = undrop.diagnose(
        model(), (batch() for _ in range(3)), seconds=1e3, draws=2, max_batches=16, progress=False
    )
    assert found.explicit.batches == 3


def test_an_endless_generator_of_batches_is_cut_at_the_limit():
    def forever():
        while True:
            yield batch()

    found = undrop.diagnose(
        model(), forever(), seconds=1e3, draws=2, max_batches=2, implicit=False, progress=False
    )
    assert found.explicit.batches == 2


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (torch.randn(4, 3), r"got Tensor: put a single batch into a list, \[\(inputs, targets\)\]"),
        (3, "batches must be an iterable of pairs"),
        (
            [torch.randn(4, 3)],
            r"each of the batches must be a pair \(inputs, targets\), got Tensor",
        ),
        ([(1, 2, 3)], "got a tuple of 3 for batch 0"),
        ([{"input_ids": 1}], "got dict for batch 0"),
    ],
)
def test_batches_that_are_not_pairs_are_refused(batches, message):
    refused(errors.DataError, message, model(), batches)


def test_any_callable_loss_is_measured():
    def pinball(output, target):
        error = nn.functional.one_hot(target, 3) - output
        return torch.where(error > 0, 0.9 * error, -0.1 * error).mean() + error.pow(4).mean()

    torch.manual_seed(0)
    found = undrop.diagnose(model(), [batch()], loss=pinball, seconds=1e3, draws=4, progress=False)
    assert found.explicit.parts.half_quadratic.value > 0.0
    assert found.explicit.classes == []
    assert found.implicit.trace_analytic.value > 0.0


def test_nan_in_the_data_is_refused_and_the_batch_named():
    x, y = batch()
    x[0, 0] = math.nan
    refused(
        errors.NonFiniteError,
        "the loss of batch 1 without dropout is nan: look for NaN or infinity in its inputs",
        model(),
        [batch(), (x, y)],
    )


def test_diagnose_refuses_infinite_weights():
    broken = model()
    nn.init.constant_(broken[2].weight, math.inf)
    refused(errors.NonFiniteError, "in the weights of Sequential", broken, [batch()])


def test_diagnose_refuses_a_model_without_dropout():
    plain = nn.Sequential(nn.Linear(3, 3))
    refused(errors.NoDropoutError, "no active dropout runs", plain, [batch()])


def test_diagnose_refuses_targets_out_of_range():
    x, _ = batch()
    refused(errors.TargetError, "targets must lie in 0 … 2", model(), [(x, torch.full((4,), 7))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seconds": 0.0}, "seconds must be more than 0, got 0.0"),
        ({"seconds": math.nan}, "seconds must be more than 0, got nan"),
        ({"draws": 1}, "draws must be at least 2, got 1"),
        ({"max_batches": 0}, "max_batches must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be positive and finite, got 0.0"),
        ({"weight_decay": -1.0}, "weight_decay must be positive and finite, got -1.0"),
    ],
)
def test_diagnose_refuses_options_out_of_range(options, message):
    refused(errors.OptionError, message, model(), [batch()], **options)
