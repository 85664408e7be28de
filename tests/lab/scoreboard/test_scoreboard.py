"""The scoreboard: its data, its search, equal time, and its page."""

from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from undrop.errors import DataError, RunError
from undrop.lab import cli
from undrop.lab.scoreboard import board as boards
from undrop.lab.scoreboard import data
from undrop.lab.scoreboard.board import METHODS, Board, Spec, execute, run_board
from undrop.lab.scoreboard.report import difference, write_board
from undrop.lab.scoreboard.tasks import GCN, TASKS, AdaptedGPT, ResidualNet

TASK = "table-digits"


def record(spec, validation, *, seconds=1.0, test=None):
    test = validation if test is None else test
    return {
        **{"spec": asdict(spec), "validation": validation, "test": test},
        **{"steps": 10 * spec.epochs, "seconds": seconds * spec.epochs},
    }


def filled(loss, seconds, seeds=3):
    """All records of a task, by a function of the spec for the loss and one for the time."""
    records = {}
    while missing := Board(TASK, records, seeds).missing():
        records.update({s.key: record(s, loss(s), seconds=seconds(s)) for s in missing})
    return Board(TASK, records, seeds)


def paces(spec):
    return 2.0 if spec.kind == "analytic" else 1.0


def test_the_search_takes_the_best_by_validation_on_a_seed_that_is_not_reported():
    task = TASKS[TASK]
    p, decay = task.probabilities[1], task.decays[2]
    board = filled(lambda s: 1.0 + abs(s.p - p) + 0.1 * (s.decay != decay) + s.seed, paces)
    chosen = board.chosen("dropout-decay", timed=False)
    assert (chosen.p, chosen.decay, chosen.seed) == (p, decay, 0)
    assert board.chosen("decay", timed=False).decay == decay
    assert board.chosen("dropout", timed=False).decay == 0.0
    assert sorted(board.losses("dropout", timed=False)) == [1, 2, 3]


def test_at_equal_time_a_slower_method_has_fewer_epochs():
    board = filled(lambda s: 1.0 + s.p, paces)
    epochs = TASKS[TASK].epochs
    assert board.cost("analytic") == pytest.approx(2.0)
    assert board.chosen("analytic", timed=True).epochs == epochs // 2
    assert board.chosen("analytic", timed=False).epochs == epochs
    assert board.chosen("dropout", timed=True) == board.chosen("dropout", timed=False)


def test_a_method_that_is_not_searched_for_completely_is_not_chosen():
    board = Board(TASK, {}, 2)
    first = board.missing()
    assert {s.seed for s in first} == {0}
    records = {s.key: record(s, 1.0) for s in first}
    later = Board(TASK, records, 2)
    assert later.chosen("dropout-decay", timed=False) is None
    assert any(s.decay > 0.0 and s.kind == "dropout" for s in later.missing())


def test_differences_are_paired_with_dropout_and_widened_for_all_comparisons():
    board = filled(lambda s: 1.0 + s.seed - 0.25 * (s.kind == "analytic") + s.p, paces)
    one = difference(board, "analytic", timed=False, comparisons=1)
    assert one.estimate == pytest.approx(-0.25)
    assert one.low == pytest.approx(one.high)
    noisy = filled(lambda s: 1.0 + 0.1 * s.seed * (s.kind == "analytic") + s.p, paces)
    widths = [
        interval.high - interval.low
        for interval in (difference(noisy, "analytic", timed=False, comparisons=n) for n in (1, 9))
    ]
    assert widths[1] > 2 * widths[0]


def test_the_scoreboard_names_tasks_not_run_and_methods_refused(tmp_path):
    board = filled(lambda s: 1.0 + s.p, paces)
    graph = {}
    while missing := Board("graph", graph, 3).missing():
        graph.update({s.key: record(s, 1.0 + 0.01 * s.seed * (s.p > 0.3)) for s in missing})
    (tmp_path / "records").mkdir()
    for key, one in {**board.records, **graph}.items():
        boards.write_json(tmp_path / "records" / f"{key}.json", one)
    text = write_board(tmp_path, tmp_path).read_text()
    assert "Not run yet: GPT, 12,000 words of WikiText-2;" in text
    assert "tuner (dropout): refused, training sees the inputs of the validation split" in text
    assert "| Analytic + decay | p = 0.1, decay 0 | × 2.00 |" in text
    assert (tmp_path / "figures" / "scoreboard.png").stat().st_size > 1000


def test_a_folder_without_records_is_an_error(tmp_path):
    with pytest.raises(RunError, match="has no records: run `undrop reproduce scoreboard` first"):
        write_board(tmp_path, tmp_path)


def test_reproduce_scoreboard_without_data_dir_is_refused(capsys):
    assert cli.main(["reproduce", "scoreboard"]) != 0
    assert "the scoreboard needs --data-dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [("--dry-run",), ("--step-costs",), ("--executor", "ray"), ("--scale", "paper")]
)
def test_an_option_that_the_scoreboard_does_not_have_is_refused(
    capsys, monkeypatch, tmp_path, options
):
    monkeypatch.setattr(boards, "run_board", None)  # calling it would fail
    words = ["reproduce", "scoreboard", "--data-dir", str(tmp_path), *options]
    assert cli.main(words) == 2
    assert f"the scoreboard takes no {options[0]}: leave it out." in capsys.readouterr().err


@pytest.mark.parametrize("kind", sorted({method.kind for method in METHODS.values()}))
def test_a_scoreboard_run_of_each_kind_learns(kind, tmp_path):
    pytest.importorskip("sklearn")
    spec = Spec(TASK, kind, 0.1, 0.01, 1, epochs=8)
    result = execute(spec, str(tmp_path))
    assert result["test"] < 2.0  # chance is log 10 = 2.3
    assert result["steps"] == 8 * (150 // 25)
    again = execute(spec, str(tmp_path))
    assert again["test"] == result["test"]


def test_scoreboard_runs_are_done_once_and_their_records_are_kept(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    short = replace(TASKS["table-diabetes"], epochs=1, probabilities=(0.1,), decays=(0.1,))
    monkeypatch.setattr(boards, "TASKS", {"table-diabetes": short})
    done = []
    monkeypatch.setattr(boards, "ProcessPoolExecutor", InThisProcess)
    words = {"tasks": ["table-diabetes"], "seeds": 1, "say": lambda spec, record: done.append(spec)}
    count = run_board(tmp_path, tmp_path, **words)
    assert count == len(done) == len(list((tmp_path / "records").iterdir()))
    assert run_board(tmp_path, tmp_path, **words) == count == len(done)


class InThisProcess:
    """An executor without processes."""

    def __init__(self, jobs, context):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, *args):
        from concurrent.futures import Future

        future = Future()
        future.set_result(function(*args))
        return future


def test_each_seed_reads_a_different_piece_of_a_text(tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(f"w{(i * i) % 47}" for i in range(2_000)))
    make = partial(data.words, file="text.txt", sizes=(64, 32, 32), vocabulary=20, steps=8)
    one, two = make(tmp_path, 0), make(tmp_path, 1)
    inputs, targets = one.train
    assert inputs.shape == targets.shape == (8, 7)
    assert torch.equal(inputs[1:], targets[:-1])
    assert not torch.equal(one.train[0], two.train[0]) or not torch.equal(one.test[0], two.test[0])
    with pytest.raises(DataError, match=r"the scoreboard needs .*nowhere\.txt"):
        data.words(tmp_path, 0, "nowhere.txt", (1, 1, 1), 2, 1)


def test_a_graph_has_every_node_in_one_part():
    made = data.graph(None, 3, 40, 3, 5, (10, 10, 20))
    known = [target != -100 for _, target in (made.train, made.validation, made.test)]
    assert torch.stack(known).sum(0).eq(1).all()
    adjacency = made.train[0][:, :40]
    torch.testing.assert_close(adjacency, adjacency.t())
    assert GCN(40, 5, 3, 0.2)(made.train[0]).shape == (40, 3)
    assert next(data.batches(made, "train", 7, torch.Generator()))[0] is made.train[0]


def test_a_residual_net_without_dropout_is_the_same_in_both_modes():
    net, x = ResidualNet(0.0), torch.randn(2, 1, 14, 14)
    torch.testing.assert_close(net.train()(x), net.eval()(x))
    assert not torch.equal(ResidualNet(0.9).train()(x), ResidualNet(0.9).train()(x))


@pytest.mark.slow
def test_lora_begins_at_the_pretrained_model_and_trains_only_its_adapters(tmp_path):
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    text = " ".join(f"w{(i * i) % 997}" for i in range(110_000))
    (folder / "wiki.train.tokens").write_text(text)
    model = AdaptedGPT(tmp_path, 0.1)
    assert all("up" in n or "down" in n for n, p in model.named_parameters() if p.requires_grad)
    tokens = torch.randint(1_000, (8, 2))
    torch.testing.assert_close(model.train()(tokens), model.eval()(tokens))  # up starts at zero
