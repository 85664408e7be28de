import math
import os
import shutil
import signal

import pytest
import torch

from undrop.errors import (
    ConfigError,
    NonFiniteError,
    RunError,
    StoppedError,
)
from undrop.lab import train
from undrop.lab.train import Callback, RunFolder
from undrop.lab.train.optimizers import Stepper
from undrop.lab.train.trainer import Trainer


class Listener(Callback):
    """Stores every call as (name of the event, value)."""

    def __init__(self):
        self.events = []

    def begin(self, info):
        self.events.append(("begin", info))

    def step(self, done, tokens, parts):
        self.events.append(("step done", done))

    def record(self, record):
        self.events.append((record["kind"], record))

    def say(self, text):
        self.events.append(("say", text))

    def end(self, summary):
        self.events.append(("end", summary))

    def close(self):
        self.events.append(("close", None))

    def of(self, kind):
        return [value for name, value in self.events if name == kind]


class Signaller(Listener):
    """Sends a signal to this process at a step."""

    def __init__(self, step, number):
        super().__init__()
        self.step_of_signal, self.number = step, number

    def step(self, done, tokens, parts):
        super().step(done, tokens, parts)
        if len(self.of("step done")) == self.step_of_signal:
            os.kill(os.getpid(), self.number)


def test_a_run_learns_and_writes_its_folder(tiny, tmp_path):
    listener = Listener()
    config = tiny(
        objective={"name": "none"},
        optimizer={"name": "adam", "lr": 0.05},
        train={"epochs": 20, "train_perplexity": True},
    )
    summary = train.run(config, out=tmp_path / "run", callbacks=[listener])
    folder = RunFolder(tmp_path / "run")
    assert train.Config.parse(folder.read_config()) == config
    assert folder.read_summary() == summary.model_dump()
    epochs = [record for record in folder.metrics.read() if record["kind"] == "epoch"]
    assert [record["epoch"] for record in epochs] == list(range(1, 21))
    assert summary.best_valid_ppl < 15.0  # chance would be 31
    assert summary.best_valid_ppl == min(record["valid_ppl"] for record in epochs)
    best = epochs[summary.best_epoch - 1]
    assert (summary.test_ppl, summary.train_ppl) == (best["test_ppl"], best["train_ppl"])
    assert (summary.epochs, summary.ended) == (20, "epochs")
    assert summary.steps == len(listener.of("step done"))
    names = [name for name, _ in listener.events]
    assert (names[0], names[-2], names[-1]) == ("begin", "end", "close")
    done = listener.of("step done")
    assert done == sorted(done)
    assert 0.0 == done[0] < done[-1] < 1.0


def test_records_have_the_same_keys_for_every_objective(tiny, tmp_path):
    keys = {}
    for name in ("none", "dropout", "analytic"):
        train.run(tiny(objective={"name": name}, train={"epochs": 1}), out=tmp_path / name)
        for record in RunFolder(tmp_path / name).metrics.read():
            keys.setdefault(record["kind"], set()).add(tuple(record))
            if name == "analytic":
                assert record["explicit"] > 0.0
            else:
                assert record["explicit"] is None
    assert {kind: len(found) for kind, found in keys.items()} == {"step": 1, "epoch": 1}


def test_a_logged_loss_is_the_mean_over_tokens(tiny, tmp_path):
    listener = Listener()
    train.run(tiny(train={"epochs": 1, "log_every": 1}), out=tmp_path / "a", callbacks=[listener])
    records, (epoch,) = listener.of("step"), listener.of("epoch")
    assert len(records) == len(listener.of("step done"))
    mean = sum(record["loss"] for record in records) / len(records)
    assert epoch["loss"] == pytest.approx(mean, rel=0.02)  # the last window is shorter


def test_runs_are_bit_for_bit_the_same_for_equal_seeds_only(tiny, tmp_path):
    def weights(seed, name):
        train.run(tiny(train={"seed": seed, "epochs": 1}), out=tmp_path / name)
        return RunFolder(tmp_path / name).read_best()

    torch.rand(3)  # the state of the global generators before a run does not matter
    first, again, other = weights(1, "a"), weights(1, "b"), weights(2, "c")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_run_restores_the_global_generators_and_threads(tiny, tmp_path):
    before = torch.get_rng_state(), torch.get_num_threads()
    train.run(tiny(train={"epochs": 1, "threads": 2}), out=tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


def test_max_steps_ends_a_run_within_an_epoch(tiny, tmp_path):
    summary = train.run(tiny(train={"epochs": 9, "max_steps": 5}), out=tmp_path / "a")
    assert (summary.steps, summary.epochs, summary.ended) == (5, 1, "max_steps")


def test_patience_stops_a_run_early(tiny, tmp_path):
    config = tiny(train={"epochs": 50, "patience": 2}, optimizer={"lr": 1e-9})
    summary = train.run(config, out=tmp_path / "a")
    assert summary.ended == "patience"
    assert summary.epochs == summary.best_epoch + 2


def test_the_test_split_can_be_evaluated_only_at_the_end(tiny, tmp_path):
    each = train.run(tiny(), out=tmp_path / "each")
    end = train.run(tiny(train={"test": "end"}), out=tmp_path / "end")
    assert end.test_ppl == pytest.approx(each.test_ppl, rel=1e-6)
    records = RunFolder(tmp_path / "end").metrics.read()
    assert all(record["test_ppl"] is None for record in records if record["kind"] == "epoch")


@pytest.mark.portable
@pytest.mark.parametrize("precision", ["bfloat16", "float64"])
def test_runs_train_in_bfloat16_and_float64(tiny, tmp_path, precision):
    summary = train.run(tiny(train={"precision": precision, "epochs": 1}), out=tmp_path / "a")
    assert math.isfinite(summary.best_valid_ppl)
    dtype = next(iter(RunFolder(tmp_path / "a").read_best().values())).dtype
    assert dtype == (torch.float64 if precision == "float64" else torch.float32)


@pytest.mark.parametrize("model", ["qrnn", "transformer-xl", "gpt"])
def test_every_model_trains_with_every_kind_of_objective(tiny, tmp_path, model):
    sizes = {
        "qrnn": {"embedding_size": 8, "hidden_size": 8, "layers": 2},
        "transformer-xl": {"size": 8, "inner_size": 8, "layers": 1, "heads": 2, "cutoffs": [10]},
        "gpt": {"size": 8, "layers": 1, "heads": 2, "context": 16},
    }
    for name in ("none", "drop-k", "analytic"):
        config = tiny(
            model={"name": model, **sizes[model]},
            objective={"name": name},
            optimizer={"name": "adam", "lr": 0.01},
            train={"epochs": 1, "max_steps": 6},
        )
        assert train.run(config, out=tmp_path / name).best_valid_ppl < 100


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_run_and_says_how_to_resume(tiny, tmp_path, number):
    config = tiny(train={"epochs": 3, "checkpoint_every": 1000})
    whole = train.run(config, out=tmp_path / "whole")
    out = tmp_path / "stopped"
    message = (
        f"stopped at step 20 with everything saved: resume with undrop train --resume --out {out}"
    )
    with pytest.raises(StoppedError, match=message):
        train.run(config, out=out, callbacks=[Signaller(20, number)])
    assert RunFolder(out).checkpoints.steps()[-1] == 20
    assert signal.getsignal(number) is not None
    listener = Listener()
    summary = train.run(out=out, resume=True, callbacks=[listener])
    assert listener.of("begin")[0].done > 0.4
    assert summary.model_dump(exclude={"seconds"}) == whole.model_dump(exclude={"seconds"})


def test_a_signal_during_evaluation_resumes_at_the_evaluation(tiny, tmp_path, monkeypatch):
    config = tiny(train={"epochs": 2})
    whole = train.run(config, out=tmp_path / "whole")
    original = Trainer._finish_epoch

    def interrupt_and_evaluate(self):
        os.kill(os.getpid(), signal.SIGINT)
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_finish_epoch", interrupt_and_evaluate)
        with pytest.raises(StoppedError, match="stopped at step 15"):
            train.run(config, out=tmp_path / "a")
    summary = train.run(out=tmp_path / "a", resume=True)
    assert summary.model_dump(exclude={"seconds"}) == whole.model_dump(exclude={"seconds"})


def test_a_damaged_checkpoint_is_named_and_the_run_is_bit_for_bit_the_same(tiny, tmp_path):
    whole = train.run(tiny(), out=tmp_path / "whole")
    out = tmp_path / "a"
    with pytest.raises(StoppedError):
        train.run(tiny(), out=out, callbacks=[Signaller(25, signal.SIGINT)])
    newest = RunFolder(out).checkpoints.path(25)
    newest.write_bytes(newest.read_bytes()[:-10])
    listener = Listener()
    summary = train.run(tiny(), out=out, resume=True, callbacks=[listener])
    assert f"{newest} is damaged" in listener.of("say")[0]
    assert summary.model_dump(exclude={"seconds"}) == whole.model_dump(exclude={"seconds"})


def test_a_nonfinite_loss_names_step_part_and_checkpoint(tiny, tmp_path, monkeypatch):
    original = Stepper.step

    def write_nan_after_step_13(self, factor):
        norm = original(self, factor)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 13:
            with torch.no_grad():
                self._parameters[0].fill_(float("nan"))
        return norm

    monkeypatch.setattr(Stepper, "step", write_nan_after_step_13)
    checkpoint = RunFolder(tmp_path / "a").checkpoints.path(10)
    message = (
        f"stopped at step 14: the loss part is not finite.*last good checkpoint is {checkpoint}"
    )
    with pytest.raises(NonFiniteError, match=message):
        train.run(tiny(), out=tmp_path / "a")
    assert RunFolder(tmp_path / "a").checkpoints.steps() == [0, 10]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"
        ),
    ],
)
def test_out_of_memory_names_the_batch(tiny, tmp_path, monkeypatch, error):
    def fail(self, factor):
        raise error

    monkeypatch.setattr(Stepper, "step", fail)
    message = (
        "out of memory at step 1, on 4 streams of 10 steps: lower the batch size or data.length"
    )
    with pytest.raises(RunError, match=message):
        train.run(tiny(), out=tmp_path / "a")


def test_a_folder_with_a_run_is_not_overwritten(tiny, tmp_path):
    train.run(tiny(train={"epochs": 1}), out=tmp_path / "a")
    with pytest.raises(RunError, match="already holds a run: resume it with --resume"):
        train.run(tiny(), out=tmp_path / "a")


def test_a_run_without_its_config_is_neither_overwritten_nor_resumed(tiny, tmp_path):
    train.run(tiny(train={"epochs": 1}), out=tmp_path / "a")
    (tmp_path / "a" / "config.json").unlink()
    with pytest.raises(RunError, match="already holds a run"):
        train.run(tiny(), out=tmp_path / "a")
    with pytest.raises(RunError, match=r"holds no run: it has no config.json"):
        train.run(tiny(), out=tmp_path / "a", resume=True)


def test_interleaved_runs_are_bit_for_bit_the_same_as_alone(tiny, tmp_path):
    configs = {name: tiny(objective={"name": name}) for name in ("dropout", "analytic")}
    configs["dropout"] = tiny(objective={"name": "dropout"}, train={"epochs": 3})
    together = train.train_interleaved(configs, out=tmp_path / "together")
    for name, config in configs.items():
        alone = train.run(config, out=tmp_path / name)
        assert together[name].model_dump(exclude={"seconds"}) == alone.model_dump(
            exclude={"seconds"}
        )


def test_a_finished_run_can_be_extended_but_its_settings_cannot_change(tiny, tmp_path):
    train.run(tiny(train={"epochs": 1}), out=tmp_path / "a")
    longer = train.run(tiny(train={"epochs": 2}), out=tmp_path / "a", resume=True)
    assert longer.epochs == 2
    assert longer.steps == train.run(tiny(), out=tmp_path / "b").steps
    with pytest.raises(ConfigError, match=r"was started with optimizer.lr = 5.0, got 6.0: resume"):
        train.run(tiny(optimizer={"lr": 6.0}), out=tmp_path / "a", resume=True)


def test_resuming_without_a_run_starts_one_or_is_refused(tiny, tmp_path):
    with pytest.raises(RunError, match="holds no run to resume"):
        train.run(out=tmp_path / "a", resume=True)
    assert train.run(tiny(train={"epochs": 1}), out=tmp_path / "b", resume=True).epochs == 1


def test_invalid_settings_leave_no_run_folder(tiny, tmp_path):
    for section, message in (
        ({"data": {"batch_size": 5000}}, "too few for 5000 streams"),
        ({"model": {"layers": 0}}, "layers must be a whole number of at least 1"),
        ({"objective": {"name": "drop-k", "k": 0}}, "k must be a whole number of at least 1"),
    ):
        with pytest.raises(Exception, match=message):
            train.run(tiny(**section), out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_resuming_on_another_text_is_refused(tiny, tmp_path, text):
    with pytest.raises(StoppedError):
        train.run(tiny(), out=tmp_path / "a", callbacks=[Signaller(3, signal.SIGINT)])
    changed = text / "train.txt"
    original = changed.read_text()
    changed.write_text(original + "a few new words\n")
    try:
        with pytest.raises(RunError, match="is not the one that the run was started on"):
            train.run(tiny(), out=tmp_path / "a", resume=True)
    finally:
        changed.write_text(original)


def test_a_missing_device_is_refused(tiny, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match=r"train.device is 'cuda', but this machine has only"):
        train.run(tiny(train={"device": "cuda"}), out=tmp_path / "a")


@pytest.mark.parametrize("deleted", ["folder", "files"])
def test_resuming_a_run_whose_checkpoints_are_deleted_is_refused(tiny, tmp_path, deleted):
    out = tmp_path / "a"
    train.run(tiny(), out=out)
    before = (out / "metrics.jsonl").read_bytes()
    if deleted == "folder":
        shutil.rmtree(out / "checkpoints")
    else:
        for path in (out / "checkpoints").iterdir():
            path.unlink()
    with pytest.raises(
        RunError, match="can't be resumed: its checkpoints are gone; choose another"
    ):
        train.run(tiny(), out=out, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == before


def test_a_run_killed_before_its_first_checkpoint_starts_again(tiny, tmp_path):
    folder = RunFolder(tmp_path / "a")
    folder.path.mkdir()
    folder.write_config(tiny(train={"epochs": 1}).as_dict())
    assert train.run(out=tmp_path / "a", resume=True).epochs == 1


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("awd-lstm", {"hidden_size": 99999999999999}),
        ("awd-lstm", {"hidden_size": 2**62}),
        ("awd-lstm", {"layers": 10**14}),
        ("gpt", {"context": 10**14, "size": 8, "heads": 1}),
    ],
)
def test_a_model_beyond_any_memory_is_refused_and_leaves_no_run(tiny, tmp_path, model, options):
    config = tiny(model={"name": model, **options})
    with pytest.raises(RunError, match=f"the model {model} does not fit in memory"):
        train.run(config, out=tmp_path / "a")
    assert not (tmp_path / "a").exists()
