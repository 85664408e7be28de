"""Train a run, from its first step or from its newest checkpoint, to its summary.

A run resumes like this:

1. ``_trainer`` builds the ``Trainer`` from the config, as for a new run, and calls ``_resume``.
2. ``Checkpoints.newest`` (``folder.py``) loads the newest checkpoint whose checksums match its files.
3. ``Trainer.load_state_dict`` (``trainer.py``) restores the state, and ``_resume`` truncates
   ``metrics.jsonl`` to the length that it had at the checkpoint.

``Trainer.state_dict`` explains why the resumed run is exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict

from undrop.errors import CheckpointError, ConfigError, OptionError, RunError
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
    "preset",
    "data.dir",
    "train.epochs",
    "train.patience",
    "train.loggers",
    "train.log_every",
    "train.checkpoint_every",
}
"""The settings that may change when a run is resumed."""

_Run: TypeAlias = tuple[Config, RunFolder, Sequence[Callback]]

_STATE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""The errors that loading can raise for an intact checkpoint that holds no state of this run."""


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
    """Train the run that ``config`` describes, in the folder ``out``.

    Args:
        config: all settings. With ``resume`` it can be omitted.
        out: the run's folder, which is created.
        resume: continue the run in that folder from its newest checkpoint, bit for bit as if it had
            never stopped. If the folder holds no run yet, start one.
        callbacks: follow the run, in addition to the loggers that the config names.

    Raises:
        RunError: if the folder holds a run and ``resume`` is False, or another process uses it.
        StoppedError: if SIGINT or SIGTERM stopped the run; the state is saved.
        UndropError: a subclass of it, for any other problem that you can fix.
    """
    folder = RunFolder(out)
    config = _resolve_config(config, folder, resume)
    with join_world(find_device(config.train.device)) as world:
        return _train([(config, folder, callbacks)], resume, world)[0]


def train_interleaved(
    configs: Mapping[str, Config],
    *,
    out: str | Path,
    callbacks: Mapping[str, Callback] | None = None,
) -> dict[str, Summary]:
    """Train several runs in this process, one epoch of each in turn.

    Each run is bit for bit what it would be alone. The seconds of a run count only its own epochs, and
    other work on the machine slows all runs down alike, so their times can be compared.

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
    callbacks = callbacks or {}
    runs = [
        (config, RunFolder(Path(out) / name), [callbacks[name]] if name in callbacks else [])
        for name, config in configs.items()
    ]
    world = World(device=find_device(runs[0][0].train.device))
    return dict(zip(configs, _train(runs, False, world), strict=True))


def _resolve_config(config: Config | None, folder: RunFolder, resume: bool) -> Config:
    """Return the config to train with; refuse a resumed run whose settings have changed."""
    if not (resume and folder.holds_run()):
        if config is None:
            raise RunError(f"{folder.path} holds no run to resume.")
        return config
    original = Config.parse(folder.read_config())
    if config is None:
        return original
    before, now = _settings_by_name(original), _settings_by_name(config)
    # A changed "model.name" changes the options of the model as well: name it first.
    for name in sorted(before.keys() | now.keys(), key=lambda n: (not n.endswith(".name"), n)):
        if before.get(name) != now.get(name) and name not in _CHANGEABLE:
            raise ConfigError(
                f"the run in {folder.path} was started with {name} = {before.get(name)!r}, got "
                f"{now.get(name)!r}: resume without this change, or choose another --out."
            )
    return config


def _settings_by_name(config: Config) -> dict[str, Any]:
    """Return the settings with names such as ``optimizer.lr``."""
    sections = config.as_dict()
    settings = {"preset": sections.pop("preset")}
    for section, values in sections.items():
        settings.update({f"{section}.{key}": value for key, value in values.items()})
    return settings


def _train(runs: Sequence[_Run], resume: bool, world: World) -> list[Summary]:
    """Train runs, one epoch of each in turn."""
    with (
        torch_settings(runs[0][0].train, world.device),
        catch_signals() as interrupts,
        contextlib.ExitStack() as stack,
    ):
        trainers = [stack.enter_context(_trainer(run, resume, world, interrupts)) for run in runs]
        while unfinished := [trainer for trainer in trainers if trainer.end_reason is None]:
            for trainer in unfinished:
                trainer.advance()
        return [_finish(trainer) for trainer in trainers]


@contextlib.contextmanager
def _trainer(run: _Run, resume: bool, world: World, interrupts: Interrupts) -> Iterator[Trainer]:
    """Yield the trainer of a new or resumed run, with the lock on its folder."""
    config, folder, callbacks = run
    if not resume and world.is_main:
        folder.refuse_if_used()  # before the corpus is loaded, which can take long
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
        info = RunInfo(
            name=folder.path.name,
            model=config.model.name,
            objective=config.objective.name,
            corpus=corpus.name,
            parameters=_parameter_count(trainer),
            vocabulary=corpus.vocabulary.size,
            train_tokens=len(corpus.train),
            device=str(world.device),
            epochs=config.train.epochs,
            step=trainer.step,
            done=trainer.progress().done,
        )
        for callback in callbacks:
            callback.begin(info)
        yield trainer


def _resume(trainer: Trainer) -> bool:
    """Restore the newest intact checkpoint and the metrics up to it; return whether there was one."""
    world, folder = trainer.world, trainer.folder
    # The main process chooses the checkpoint, and the other processes load the same one.
    newest = folder.checkpoints.newest(trainer.say) if world.is_main else None
    step = world.broadcast(-1 if newest is None else newest[0])
    if step < 0:
        if world.is_main and folder.metrics.sync() > 0:
            raise RunError(
                f"{folder.path} can't be resumed: its checkpoints are gone; choose another --out, or "
                "delete the folder to start again."
            )
        return False
    state = folder.checkpoints.load(step) if newest is None else newest[1]
    try:
        trainer.load_state_dict(state)
        length = int(state["metrics"])
        if length < 0:
            raise ValueError(f"metrics of {length} bytes")
    except _STATE_ERRORS as error:
        raise CheckpointError(
            f"{folder.checkpoints.path(step)} does not hold the state of this run: {error}."
        ) from error
    if world.is_main:
        folder.metrics.truncate(length)
    return True


def _finish(trainer: Trainer) -> Summary:
    """Write the summary and return it; with ``train.test = "end"``, evaluate the test split first."""
    config, best, last = trainer.config, trainer.best_record, trainer.last_record
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
        ended=str(trainer.end_reason),
        parameters=_parameter_count(trainer),
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
        trainer.folder.write_summary(summary.model_dump())
    for callback in trainer.callbacks:
        callback.end(summary.model_dump())
    return summary


def _test_ppl(trainer: Trainer) -> float:
    """Evaluate the test split with the weights of the best epoch."""
    with trainer.clock.running():
        trainer.model.load_state_dict(trainer.folder.read_best())
        return perplexity(trainer.loss_on("test"))


def _parameter_count(trainer: Trainer) -> int:
    return sum(parameter.numel() for parameter in trainer.model.parameters())
