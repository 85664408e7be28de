"""The scoreboard: data, searches, runs at equal time, and the page."""

from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from undrop.errors import DataError, RunError
from undrop.lab import cli
from undrop.lab.scoreboard import board as boards
from undrop.lab.scoreboard import data
from undrop.lab.scoreboard.board import METHODS, Spec, TaskRuns, run_board, run_spec
from undrop.lab.scoreboard.report import difference, write_board
from undrop.lab.scoreboard.tasks import GCN, TASKS, AdaptedGPT, ResidualNet

TASK = "table-digits"


def record(spec, validation, *, seconds=1.0, test=None):
    test = validation if test is None else test
    return {
        **{"spec": asdict(spec), "validation": validation, "test": test},
        **{"steps": 10 * spec.epochs, "seconds": seconds * spec.epochs},
    }


def completed_runs(loss, seconds, seeds=3):
    """Return the runs of a task with all records; ``loss`` and ``seconds`` are functions of the spec."""
    records = {}
    while missing := TaskRuns(TASK, records, seeds).missing():
        records.update({s.key: record(s, loss(s), seconds=seconds(s)) for s in missing})
    return TaskRuns(TASK, records, seeds)


def seconds_per_epoch(spec):
    return 2.0 if spec.kind == "analytic" else 1.0


def test_the_search_chooses_the_lowest_validation_loss_on_a_seed_that_is_not_reported():
    task = TASKS[TASK]
    p, decay = task.probabilities[1], task.decays[2]
    runs = completed_runs(
        lambda s: 1.0 + abs(s.p - p) + 0.1 * (s.decay != decay) + s.seed, seconds_per_epoch
    )
    chosen = runs.chosen_spec("dropout-decay", equal_time=False)
    assert (chosen.p, chosen.decay, chosen.seed) == (p, decay, 0)
    assert runs.chosen_spec("decay", equal_time=False).decay == decay
    assert runs.chosen_spec("dropout", equal_time=False).decay == 0.0
    assert sorted(runs.test_losses("dropout", equal_time=False)) == [1, 2, 3]


def test_at_equal_time_a_slower_method_has_fewer_epochs():
    runs = completed_runs(lambda s: 1.0 + s.p, seconds_per_epoch)
    epochs = TASKS[TASK].epochs
    assert runs.step_cost("analytic") == pytest.approx(2.0)
    assert runs.chosen_spec("analytic", equal_time=True).epochs == epochs // 2
    assert runs.chosen_spec("analytic", equal_time=False).epochs == epochs
    assert runs.chosen_spec("dropout", equal_time=True) == runs.chosen_spec(
        "dropout", equal_time=False
    )


def test_a_method_has_no_chosen_spec_before_its_search_ends():
    runs = TaskRuns(TASK, {}, 2)
    first = runs.missing()
    assert {s.seed for s in first} == {0}
    records = {s.key: record(s, 1.0) for s in first}
    later = TaskRuns(TASK, records, 2)
    assert later.chosen_spec("dropout-decay", equal_time=False) is None
    assert any(s.decay > 0.0 and s.kind == "dropout" for s in later.missing())


def test_differences_are_paired_with_dropout_and_widened_for_all_comparisons():
    runs = completed_runs(
        lambda s: 1.0 + s.seed - 0.25 * (s.kind == "analytic") + s.p, seconds_per_epoch
    )
    one = difference(runs, "analytic", equal_time=False, comparisons=1)
    assert one.estimate == pytest.approx(-0.25)
    assert one.low == pytest.approx(one.high)
    noisy = completed_runs(
        lambda s: 1.0 + 0.1 * s.seed * (s.kind == "analytic") + s.p, seconds_per_epoch
    )
    widths = [
        interval.high - interval.low
        for interval in (
            difference(noisy, "analytic", equal_time=False, comparisons=n) for n in (1, 9)
        )
    ]
    assert widths[1] > 2 * widths[0]


def test_the_page_names_tasks_that_are_not_run_and_methods_that_are_left_out(tmp_path):
    runs = completed_runs(lambda s: 1.0 + s.p, seconds_per_epoch)
    graph = {}
    while missing := TaskRuns("graph", graph, 3).missing():
        graph.update({s.key: record(s, 1.0 + 0.01 * s.seed * (s.p > 0.3)) for s in missing})
    (tmp_path / "records").mkdir()
    for key, one in {**runs.records, **graph}.items():
        boards.write_json(tmp_path / "records" / f"{key}.json", one)
    text = write_board(tmp_path, tmp_path).read_text()
    assert "Not run yet: GPT, 12,000 words of WikiText-2;" in text
    assert "Left out: tuner (dropout), because the validation nodes are in the same graph" in text
    assert "| Analytic + decay | p = 0.1, decay 0 | × 2.00 |" in text
    assert (tmp_path / "figures" / "scoreboard.png").stat().st_size > 1000


def test_a_scoreboard_page_of_a_folder_without_records_is_refused(tmp_path):
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
    result = run_spec(spec, str(tmp_path))
    assert result["test"] < 2.0  # chance is log 10 = 2.3
    assert result["steps"] == 8 * (150 // 25)
    again = run_spec(spec, str(tmp_path))
    assert again["test"] == result["test"]


def test_a_scoreboard_run_with_a_record_is_not_repeated(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    short = replace(TASKS["table-diabetes"], epochs=1, probabilities=(0.1,), decays=(0.1,))
    monkeypatch.setattr(boards, "TASKS", {"table-diabetes": short})
    done = []
    monkeypatch.setattr(boards, "ProcessPoolExecutor", InThisProcess)
    words = {
        "tasks": ["table-diabetes"],
        "seeds": 1,
        "on_record": lambda spec, record: done.append(spec),
    }
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


def test_every_node_of_a_graph_has_a_target_in_one_part():
    graph = data.graph(None, 3, 40, 3, 5, (10, 10, 20))
    in_part = [target != -100 for _, target in (graph.train, graph.validation, graph.test)]
    assert torch.stack(in_part).sum(0).eq(1).all()
    adjacency = graph.train[0][:, :40]
    torch.testing.assert_close(adjacency, adjacency.t())
    assert GCN(40, 5, 3, 0.2)(graph.train[0]).shape == (40, 3)
    assert next(data.batches(graph, "train", 7, torch.Generator()))[0] is graph.train[0]


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
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trainable) == 2 * 2 * 2  # two layers in each of two blocks have "down" and "up"
    assert all("up" in name or "down" in name for name in trainable)
    tokens = torch.randint(1_000, (8, 2))
    torch.testing.assert_close(model.train()(tokens), model.eval()(tokens))  # up starts at zero
