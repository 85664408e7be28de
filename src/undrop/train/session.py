"""A run from its first step, or from where it was left, to its summary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from undrop import corpora
from undrop.corpora import Corpus
from undrop.errors import ConfigError, RunError
from undrop.train.config import Config, DataConfig
from undrop.train.devices import device_of, settled
from undrop.train.folder import RunFolder
from undrop.train.interrupts import listening
from undrop.train.journal import Journal
from undrop.train.meters import perplexity
from undrop.train.provenance import machine, versions
from undrop.train.reporters import Outline, Reporter, Reporters, TensorBoard
from undrop.train.trainer import Trainer
from undrop.train.world import World, is_main, joined

__all__ = ["Summary", "load_corpus", "run"]

_CHANGEABLE = {
    *("preset", "data.dir", "train.epochs", "train.patience", "train.tensorboard"),
    *("train.log_every", "train.checkpoint_every"),
}
"""The settings that a run may go on with otherwise than it was begun."""


class Summary(BaseModel):
    """How a run ended."""

    model_config = ConfigDict(frozen=True)

    best_valid_ppl: float
    best_epoch: int
    test_ppl: float  # at the best epoch by validation
    train_ppl: float | None  # likewise, without noise, if it was asked for
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


def load_corpus(data: DataConfig) -> Corpus:
    """The corpus that a config names."""
    return corpora.load(
        data.name,
        data_dir=data.dir,
        limit_tokens=data.limit_tokens,
        fraction=data.fraction,
        max_vocab=data.max_vocab,
    )


def run(
    config: Config | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    reporter: Reporter | None = None,
) -> Summary:
    """Train what ``config`` says, in the folder ``out``.

    Args:
        config: every setting; with ``resume`` it may be left out.
        out: the run's folder; it is made.
        resume: go on where the run in that folder was left, to the same bits as if it had never
            been. Where there is none yet it is begun.
        reporter: hears of steps and epochs.

    Raises:
        RunError: if the folder holds a run and ``resume`` was not said, or is in use.
        StoppedError: if SIGINT or SIGTERM asked for an end; the state is saved.
        UndropError: one of its subclasses, for anything else that can be put right.
    """
    folder = RunFolder(out)
    if not resume and is_main():
        folder.refuse_if_taken()
    config = _settle(config, folder, resume)
    corpus = load_corpus(config.data)
    with (
        joined(device_of(config.train)) as world,
        settled(config.train, world.device),
        listening() as interrupts,
        contextlib.closing(_audience(reporter, config, folder, world)) as audience,
    ):
        journal = Journal(folder, audience, world)
        trainer = Trainer(config, corpus, journal=journal, world=world, interrupts=interrupts)
        with _taken(folder, config, resume, world):
            _go_on(trainer, folder, journal)
            journal.reporter.begin(_outline(trainer, folder))
            while not trainer.done:
                trainer.advance()
            return _finish(trainer, folder, journal)


def _settle(config: Config | None, folder: RunFolder, resume: bool) -> Config:
    """The config to train with: the one given, unless the folder's run was begun with another."""
    if not (resume and folder.holds_run()):
        if config is None:
            raise RunError(f"{folder.path} holds no run to go on with.")
        return config
    begun = Config.parse(folder.read_config())
    if config is None:
        return begun
    before, now = _flat(begun.as_dict()), _flat(config.as_dict())
    for name in sorted(before.keys() | now.keys(), key=lambda n: (not n.endswith(".name"), n)):
        if before.get(name) != now.get(name) and name not in _CHANGEABLE:
            raise ConfigError(
                f"the run in {folder.path} was begun with {name} = {before.get(name)!r}, got "
                f"{now.get(name)!r}: go on without changing it, or choose another --out."
            )
    return config


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        inner = value if isinstance(value, dict) else {}
        flat.update({f"{name}.{key}": item for key, item in inner.items()} or {name: value})
    return flat


def _audience(
    reporter: Reporter | None, config: Config, folder: RunFolder, world: World
) -> Reporter:
    listeners = [reporter] if reporter is not None else []
    if config.train.tensorboard and world.is_main:
        listeners.append(TensorBoard(folder.path / "tensorboard"))
    return Reporters(listeners)


@contextlib.contextmanager
def _taken(folder: RunFolder, config: Config, resume: bool, world: World) -> Iterator[None]:
    """Have the folder to ourselves, with the config in it. Only the main process does."""
    if not world.is_main:
        yield
        return
    folder.create()
    with folder.locked():
        if not resume:
            folder.refuse_if_begun()
        folder.sweep()
        folder.write_config(config.as_dict())
        yield


def _go_on(trainer: Trainer, folder: RunFolder, journal: Journal) -> None:
    """Put the trainer where the newest sound checkpoint was, and the metrics with it."""
    world = trainer.world
    found = folder.checkpoints.newest(journal.reporter.say) if world.is_main else None
    step = world.from_main(-1 if found is None else found[0])
    if world.is_main:
        folder.metrics.cut(found[1]["metrics"] if found is not None else 0)
    if step >= 0:
        trainer.load_state_dict(found[1] if found is not None else folder.checkpoints.load(step))


def _outline(trainer: Trainer, folder: RunFolder) -> Outline:
    config, corpus = trainer.config, trainer.corpus
    return Outline(
        name=folder.path.name,
        model=config.model.name,
        objective=config.objective.name,
        corpus=corpus.name,
        parameters=_size(trainer),
        vocabulary=corpus.vocabulary.size,
        train_tokens=len(corpus.train),
        device=str(trainer.world.device),
        epochs=config.train.epochs,
        done=trainer.progress().done,
    )


def _size(trainer: Trainer) -> int:
    return sum(parameter.numel() for parameter in trainer.model.parameters())


def _finish(trainer: Trainer, folder: RunFolder, journal: Journal) -> Summary:
    """Judge the best weights on the test split, if that was left to the end, and sum up."""
    config, best, last = trainer.config, trainer.best, trainer.last
    assert best is not None
    assert last is not None
    test = best["test_ppl"]
    if test is None:
        with trainer.clock.running():
            trainer.model.load_state_dict(folder.read_best())
            test = perplexity(trainer.loss_on("test"))
    summary = Summary(
        best_valid_ppl=best["valid_ppl"],
        best_epoch=best["epoch"],
        test_ppl=test,
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
        folder.write_summary(summary.model_dump())
    journal.reporter.end(summary.model_dump())
    return summary
