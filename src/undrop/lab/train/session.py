"""A run from its first step, or from where it was left, to its summary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from undrop.errors import CheckpointError, ConfigError, OptionError, RunError
from undrop.lab import corpora
from undrop.lab.corpora import Corpus
from undrop.lab.train.config import Config, DataConfig
from undrop.lab.train.devices import device_of, settled
from undrop.lab.train.folder import RunFolder
from undrop.lab.train.interrupts import Interrupts, listening
from undrop.lab.train.journal import Journal
from undrop.lab.train.meters import perplexity
from undrop.lab.train.provenance import machine, versions
from undrop.lab.train.reporters import Outline, Reporter, Reporters, TensorBoard, Watching
from undrop.lab.train.trainer import Trainer
from undrop.lab.train.world import World, joined

__all__ = ["Session", "Summary", "load_corpus", "opened", "run", "take_turns"]

_CHANGEABLE = {
    *("preset", "data.dir", "train.epochs", "train.patience", "train.tensorboard"),
    *("train.log_every", "train.checkpoint_every"),
}
"""The settings that a run may go on with otherwise than it was begun."""


_MISFITS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What comes of a state that is sound JSON and not what was saved."""


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


@dataclass(frozen=True)
class Session:
    """A run that is under way."""

    trainer: Trainer
    folder: RunFolder
    journal: Journal

    def finish(self) -> Summary:
        """Judge the best weights on the test split, if that was left to the end, and sum up."""
        trainer, config = self.trainer, self.trainer.config
        best, last = trainer.best, trainer.last
        assert best is not None
        assert last is not None
        summary = Summary(
            best_valid_ppl=best["valid_ppl"],
            best_epoch=best["epoch"],
            test_ppl=best["test_ppl"] or self._test_ppl(),
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
            self.folder.write_summary(summary.model_dump())
        self.journal.reporter.end(summary.model_dump())
        return summary

    def _test_ppl(self) -> float:
        with self.trainer.clock.running():
            self.trainer.model.load_state_dict(self.folder.read_best())
            return perplexity(self.trainer.loss_on("test"))


def run(
    config: Config | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    reporter: Reporter | None = None,
    watcher: Watching | None = None,
) -> Summary:
    """Train what ``config`` says, in the folder ``out``.

    Args:
        config: every setting; with ``resume`` it may be left out.
        out: the run's folder; it is made.
        resume: go on where the run in that folder was left, to the same bits as if it had never
            been. Where there is none yet it is begun.
        reporter: hears of steps and epochs.
        watcher: looks at the model now and then; what it says goes to the metrics.

    Raises:
        RunError: if the folder holds a run and ``resume`` was not said, or is in use.
        StoppedError: if SIGINT or SIGTERM asked for an end; the state is saved.
        UndropError: one of its subclasses, for anything else that can be put right.
    """
    folder = RunFolder(out)
    config = _settle(config, folder, resume)
    with (
        joined(device_of(config.train)) as world,
        settled(config.train, world.device),
        listening() as interrupts,
        opened(config, folder, resume, reporter, world, interrupts, watcher) as session,
    ):
        while not session.trainer.done:
            session.trainer.advance()
        return session.finish()


def take_turns(
    configs: Mapping[str, Config],
    *,
    out: str | Path,
    reporters: Mapping[str, Reporter] | None = None,
) -> dict[str, Summary]:
    """Train several runs side by side in this process, an epoch of each at a time.

    Each has the bits it would have alone; their seconds are of their own turns, under the same load.

    Args:
        configs: the runs by name, which is also the name of each one's folder in ``out``.
        out: where the folders go.
        reporters: hear of the run of the same name.

    Raises:
        OptionError: for a name that is no name of a folder in ``out``.
    """
    for name in configs:
        if name in ("", ".", "..") or Path(name).name != name:
            raise OptionError(f"a run's name must be a plain one, got {name!r}.")
    first = next(iter(configs.values())).train
    world = World(device=device_of(first))
    with settled(first, world.device), listening() as interrupts, contextlib.ExitStack() as stack:
        sessions = {}
        for name, config in configs.items():
            folder, reporter = RunFolder(Path(out) / name), (reporters or {}).get(name)
            opening = opened(config, folder, False, reporter, world, interrupts)
            sessions[name] = stack.enter_context(opening)
        while any(not session.trainer.done for session in sessions.values()):
            for session in sessions.values():
                if not session.trainer.done:
                    session.trainer.advance()
        return {name: session.finish() for name, session in sessions.items()}


@contextlib.contextmanager
def opened(
    config: Config,
    folder: RunFolder,
    resume: bool,
    reporter: Reporter | None,
    world: World,
    interrupts: Interrupts,
    watcher: Watching | None = None,
) -> Iterator[Session]:
    """A run at its beginning, or where it was left, with its folder locked."""
    if not resume and world.is_main:
        folder.refuse_if_taken()
    corpus = load_corpus(config.data)
    with contextlib.closing(_audience(reporter, config, folder, world)) as audience:
        journal = Journal(folder, audience, world)
        trainer = Trainer(
            config, corpus, journal=journal, world=world, interrupts=interrupts, watcher=watcher
        )
        with _taken(folder, config, resume, world):
            _go_on(trainer, folder, journal)
            journal.reporter.begin(_outline(trainer, folder))
            yield Session(trainer, folder, journal)


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
    if step < 0:
        if world.is_main:
            folder.metrics.cut(0)
        return
    state = found[1] if found is not None else folder.checkpoints.load(step)
    try:
        trainer.load_state_dict(state)
        length = int(state["metrics"])
        if length < 0:
            raise ValueError(f"metrics of {length} bytes")
    except (*_MISFITS, RuntimeError) as error:
        raise CheckpointError(
            f"{folder.checkpoints.path(step)} does not hold the state of this run: {error}."
        ) from error
    if world.is_main:
        folder.metrics.cut(length)


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
