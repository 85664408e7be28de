import itertools

import numpy as np
import pytest
import torch

from undrop.errors import OptionError
from undrop.lab.corpora.batching import IGNORED, TrainingWindows, evaluation_windows

TOKENS = np.arange(1003, dtype=np.uint16)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("generator", [None, seeded()])
def test_an_epoch_reads_every_stream_from_end_to_end(generator):
    windows = list(TrainingWindows(TOKENS, 4, 17, generator=generator))
    streams = torch.arange(1000).reshape(4, 250).T
    assert torch.equal(torch.cat([window.inputs for window in windows]), streams[:-1])
    assert torch.equal(torch.cat([window.targets for window in windows]), streams[1:])
    assert all(window.inputs.dtype == torch.int64 for window in windows)


def test_fixed_windows_have_the_given_length_and_the_last_has_the_rest():
    windows = list(TrainingWindows(TOKENS, 4, 100))
    assert [len(window.inputs) for window in windows] == [100, 100, 49]
    assert [window.scale for window in windows] == [1.0, 1.0, 0.49]


def test_random_window_lengths_have_the_distribution_of_awd_lstm():
    windows = TrainingWindows(np.zeros(400_000, dtype=np.uint16), 1, 70, generator=seeded())
    lengths = np.array([len(window.inputs) for window in windows][:-1])
    halves = lengths < 52.5  # 3.5 standard deviations from either mean
    n = len(lengths)
    assert n > 5000
    # Standard errors: of a share of 5 %, of the mean of N(70, 5²), and of its standard deviation.
    assert abs(halves.mean() - 0.05) < 4 * (0.05 * 0.95 / n) ** 0.5
    assert abs(lengths[~halves].mean() - 69.5) < 4 * 5 / n**0.5  # rounding down takes a half
    assert abs(lengths[~halves].std() - 5) < 4 * 5 / (2 * n) ** 0.5
    assert abs(lengths[halves].mean() - 34.5) < 4 * 5 / halves.sum() ** 0.5


def test_random_window_lengths_are_at_least_5():
    windows = TrainingWindows(np.zeros(20_000, dtype=np.uint16), 1, 8, generator=seeded())
    assert min(len(window.inputs) for window in list(windows)[:-1]) == 5


def test_a_windows_scale_is_its_length_over_bptt():
    for window in TrainingWindows(TOKENS, 2, 30, generator=seeded()):
        assert window.scale == len(window.inputs) / 30


def test_epochs_differ_only_in_window_lengths():
    windows = TrainingWindows(TOKENS, 2, 30, generator=seeded())
    first, second = list(windows), list(windows)
    assert [len(w.inputs) for w in first] != [len(w.inputs) for w in second]
    assert torch.equal(torch.cat([w.inputs for w in first]), torch.cat([w.inputs for w in second]))


@pytest.mark.parametrize("variable", [True, False])
def test_a_saved_state_continues_with_exactly_the_same_windows(variable):
    def windows(seed):
        generator = seeded(seed) if variable else None
        return TrainingWindows(TOKENS, 3, 20, generator=generator)

    running = windows(0)
    epochs = itertools.chain(running, running)  # into the second epoch
    states, expected = [running.state_dict()], []
    for window in epochs:
        expected.append(window)
        states.append(running.state_dict())
    for done, state in enumerate(states[:-1]):
        resumed = windows(1)
        resumed.load_state_dict(state)
        got = list(itertools.islice(itertools.chain(resumed, resumed), len(expected) - done))
        # The end of an epoch is where the next pass begins: an empty pass lies between.
        got += list(itertools.islice(resumed, len(expected) - done - len(got)))
        assert len(got) == len(expected) - done
        for a, b in zip(got, expected[done:], strict=True):
            assert torch.equal(a.inputs, b.inputs)
            assert torch.equal(a.targets, b.targets)


def test_a_saved_window_state_does_not_change_later():
    windows = TrainingWindows(TOKENS, 3, 20, generator=seeded())
    state = windows.state_dict()
    before = state["generator"].clone()
    list(windows)
    assert state["position"] == 0
    assert torch.equal(state["generator"], before)


def test_shards_together_cover_the_whole_batch():
    whole = list(TrainingWindows(TOKENS, 6, 20, generator=seeded()))
    shards = [
        list(TrainingWindows(TOKENS, 6, 20, generator=seeded(), shard=(rank, 3)))
        for rank in range(3)
    ]
    for window, *parts in zip(whole, *shards, strict=True):
        assert torch.equal(window.inputs, torch.cat([part.inputs for part in parts], dim=1))
        assert torch.equal(window.targets, torch.cat([part.targets for part in parts], dim=1))


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10])
@pytest.mark.parametrize("length", [25, 100, 101, 103])
def test_evaluation_windows_predict_every_token_but_the_first_exactly_once(batch_size, length):
    tokens = np.arange(length, dtype=np.int32)
    windows = list(evaluation_windows(tokens, batch_size, 7))
    inputs = torch.cat([window.inputs for window in windows]).T.flatten()
    targets = torch.cat([window.targets for window in windows]).T.flatten()
    counted = targets != IGNORED
    assert targets[counted].tolist() == list(range(1, length))
    assert inputs[counted].tolist() == list(range(length - 1))
    assert int((~counted).sum()) < batch_size


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainingWindows(TOKENS, 0, 5), "batch_size and bptt must be at least 1, got 0"),
        (lambda: TrainingWindows(TOKENS[:9], 5, 5), "9 tokens are too few for 5 streams"),
        (lambda: list(evaluation_windows(TOKENS[:3], 2, 5)), "3 tokens are too few for 2 streams"),
        (lambda: TrainingWindows(TOKENS, 5, 5, shard=(0, 2)), "rank 0 of 2 can't have a share"),
        (lambda: TrainingWindows(TOKENS, 4, 5, shard=(2, 2)), "rank 2 of 2 can't have a share"),
    ],
)
def test_too_few_tokens_or_bad_sizes_for_windows_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()


@pytest.mark.parametrize(
    "state", [{"position": 251, "generator": None}, {"position": 0, "generator": torch.empty(0)}]
)
def test_a_window_state_of_other_windows_is_refused(state):
    with pytest.raises(OptionError, match="a saved position must belong to the same tokens"):
        TrainingWindows(TOKENS, 4, 10).load_state_dict(state)
