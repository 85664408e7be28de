"""Calls of torch's recurrent functions, layer by layer."""

import pytest
import torch
from torch import nn

from undrop.intercept.recurrent import parse_call


def test_a_state_of_another_batch_size_is_refused_before_it_reaches_the_kernel():
    rnn, x, state = nn.LSTM(3, 4), torch.randn(5, 4, 3), torch.zeros(1, 2, 4)
    weights = rnn._flat_weights
    call = parse_call(torch.lstm, (x, (state, state), weights, True, 1, 0.0, True, False, False))
    with pytest.raises(RuntimeError, match="4 examples and a state of another batch size"):
        call.run()
