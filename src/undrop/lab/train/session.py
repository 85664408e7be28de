"""Train a run from its first step, or from its last checkpoint, to its summary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from undrop.errors import CheckpointError, ConfigError, OptionError, RunError
from undrop.files import write_json
from undrop.lab.train.callbacks import LOGGERS, Callback, RunInfo
from undrop.lab.train.config import Config
from undrop.lab.train.environment import (
    Interrupts,
    World,
    catch_signals,
    find_device,
    join_world,
    machine,
    torch_settings,
    versions,
)
from undrop.lab.train.folder import RunFolder
from undrop.lab.train.metrics import perplexity
from undrop.lab.train.trainer import Trainer

_CHANGEABLE = {
    *("preset", "data.dir", "train.epochs", "train.patience", "train.loggers"),
    *("train.log_every", "train.checkpoint_every"),
}
"""The settings that may change when a run is resumed."""

_WRONG_STATE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""What loading a state can raise if it is valid JSON but not a state of this run."""


class Summary(BaseModel):
    """The result of a run."""

    model_config = ConfigDict(frozen=True)

    best_valid_ppl: float
    best_epoch: int
    test_ppl: float  # at the best epoch by validation
    train_ppl: float | None  # at the best epoch, without noise; None if it was not evaluated
    valid_ppl: float  # at the last epoch
    epochs: int
    steps: int
    seconds: float
    ended: str  # "epochs", "max_steps" or "patience"
    parameters: int
    seed: int
    preset: str | None
    model: str
    data: str
    objective: str
    config_sha256: str
    versions: dict[str, str]
    machine: dict[str, Any]


def run(
    config: Config | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Summary:
    """Train what ``config`` describes, in the folder ``out``.

    Args:
        config: every setting; optional with ``resume``.
        out: the run's folder, which is created.
        resume: continue the run in that folder from its last checkpoint, bit for bit as if it had never
            stopped. If there is no run yet, start one.
        callbacks: follow the run, in addition to the loggers that the config names.

    Raises:
        RunError: if the folder holds a run and ``resume`` is False, or another process uses it.
        StoppedError: if SIGINT or SIGTERM stopped the run; the state is saved.
        UndropError: for any other problem that you can fix; always a subclass.
    """
    folder = RunFolder(out)
    config = resolve_config(config, folder, resume)
    with join_world(find_device(config.train.device)) as world:
        return _train([(config, folder, callbacks)], resume, world)[0]


def train_interleaved(
    configs: Mapping[str, Config],
    *,
    out: str | Path,
    callbacks: Mapping[str, Callback] | None = None,
) -> dict[str, Summary]:
    """Train several runs in this process, one epoch of each in turn.

    Each run is bit for bit what it would be alone. Its seconds count only its own epochs, so the times
    of the runs can be compared: other work on the machine slows all of them down alike.

    Args:
        configs: the runs by name; each name is also the name of the run's folder in ``out``.
        out: the folder that holds the runs' folders.
        callbacks: one callback for each run, by the run's name.

    Raises:
        OptionError: if a name can't be the name of a folder in ``out``.
    """
    for name in configs:
        if name in ("", ".", "..") or Path(name).name != name:
            raise OptionError(f"the name of a run must be a plain folder name, got {name!r}.")
    followers = {name: [callback] for name, callback in (callbacks or {}).items()}
    runs = [
        (c, RunFolder(Path(out) / name), followers.get(name, [])) for name, c in configs.items()
    ]
    world = World(device=find_device(runs[0][0].train.device))
    return dict(zip(configs, _train(runs, False, world), strict=True))


def _train(
    runs: Sequence[tuple[Config, RunFolder, Sequence[Callback]]], resume: bool, world: World
) -> list[Summary]:
    """Train runs, one epoch of each in turn."""
    with (
        torch_settings(runs[0][0].train, world.device),
        catch_signals() as interrupts,
        contextlib.ExitStack() as stack,
    ):
        trainers = [
            stack.enter_context(_open_trainer(*run, resume, world, interrupts)) for run in runs
        ]
        while waiting := [trainer for trainer in trainers if not trainer.done]:
            for trainer in waiting:
                trainer.advance()
        return [_finish(trainer) for trainer in trainers]


def _finish(trainer: Trainer) -> Summary:
    """Write the summary; with ``train.test = "end"``, evaluate the test split first."""
    config, best, last = trainer.config, trainer.best, trainer.last
    assert best is not None
    assert last is not None
    summary = Summary(
        best_valid_ppl=best["valid_ppl"],
        best_epoch=best["epoch"],
        test_ppl=best["test_ppl"] or _test_ppl(trainer),
        train_ppl=best["train_ppl"],
        valid_ppl=last["valid_ppl"],
        epochs=trainer.epoch,
        steps=trainer.step,
        seconds=trainer.clock.seconds,
        ended=str(trainer.ended),
        parameters=_size(trainer),
        seed=config.train.seed,
        preset=config.preset,
        model=config.model.name,
        data=trainer.corpus.name,
        objective=config.objective.name,
        config_sha256=config.digest(),
        versions=versions(),
        machine=machine(trainer.world.device, trainer.world.size),
    )
    if trainer.world.is_main:
        write_json(trainer.folder.summary, summary.model_dump())
    for callback in trainer.callbacks:
        callback.end(summary.model_dump())
    return summary


def _test_ppl(trainer: Trainer) -> float:
    with trainer.clock.running():
        trainer.model.load_state_dict(trainer.folder.read_best())
        return perplexity(trainer.loss_on("test"))


@contextlib.contextmanager
def _open_trainer(
    config: Config,
    folder: RunFolder,
    callbacks: Sequence[Callback],
    resume: bool,
    world: World,
    interrupts: Interrupts,
) -> Iterator[Trainer]:
    """Prepare a new run, or one at its last checkpoint, and lock its folder."""
    if not resume and world.is_main:
        folder.refuse_if_in_use()
    corpus = config.load_corpus()
    with contextlib.ExitStack() as stack:
        loggers = [LOGGERS[name](folder, config) for name in config.train.loggers if world.is_main]
        callbacks = [*callbacks, *loggers] if world.is_main else []
        for callback in callbacks:
            stack.callback(callback.close)
        trainer = Trainer(config, corpus, folder, callbacks, world, interrupts)
        if world.is_main:
            stack.enter_context(folder.locked())
            if not resume:
                folder.refuse_if_started()
            folder.remove_leftovers()
            folder.write_config(config.as_dict())
        if not _resume(trainer):
            trainer.save()
        info = _run_info(trainer)
        for callback in callbacks:
            callback.begin(info)
        yield trainer


def resolve_config(config: Config | None, folder: RunFolder, resume: bool) -> Config:
    """Return the config to train with; refuse changes to the config of the run to resume."""
    if not (resume and folder.holds_run()):
        if config is None:
            raise RunError(f"{folder.path} holds no run to resume.")
        return config
    started = Config.parse(folder.read_config())
    if config is None:
        return started
    before, now = _flat(started.as_dict()), _flat(config.as_dict())
    for name in sorted(before.keys() | now.keys(), key=lambda n: (not n.endswith(".name"), n)):
        if before.get(name) != now.get(name) and name not in _CHANGEABLE:
            raise ConfigError(
                f"the run in {folder.path} was started with {name} = {before.get(name)!r}, got "
                f"{now.get(name)!r}: resume without this change, or choose another --out."
            )
    return config


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        inner = value if isinstance(value, dict) else {}
        flat.update({f"{name}.{key}": item for key, item in inner.items()} or {name: value})
    return flat


def _resume(trainer: Trainer) -> bool:
    """Load the newest intact checkpoint and truncate the metrics to match; False if the run is new."""
    world, folder = trainer.world, trainer.folder
    found = folder.checkpoints.newest(trainer.say) if world.is_main else None
    step = world.from_main(-1 if found is None else found[0])
    if step < 0:
        if world.is_main and folder.metrics.sync() > 0:
            raise RunError(
                f"{folder.path} can't be resumed: its checkpoints are gone; choose another --out, or "
                "delete the folder to start again."
            )
        return False
    state = found[1] if found is not None else folder.checkpoints.load(step)
    try:
        trainer.load_state_dict(state)
        length = int(state["metrics"])
        if length < 0:
            raise ValueError(f"metrics of {length} bytes")
    except _WRONG_STATE as error:
        raise CheckpointError(
            f"{folder.checkpoints.path(step)} does not hold the state of this run: {error}."
        ) from error
    if world.is_main:
        folder.metrics.truncate(length)
    return True


def _run_info(trainer: Trainer) -> RunInfo:
    config, corpus = trainer.config, trainer.corpus
    return RunInfo(
        name=trainer.folder.path.name,
        model=config.model.name,
        objective=config.objective.name,
        corpus=corpus.name,
        parameters=_size(trainer),
        vocabulary=corpus.vocabulary.size,
        train_tokens=len(corpus.train),
        device=str(trainer.world.device),
        epochs=config.train.epochs,
        step=trainer.step,
        done=trainer.progress().done,
    )


def _size(trainer: Trainer) -> int:
    return sum(parameter.numel() for parameter in trainer.model.parameters())
