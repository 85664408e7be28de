"""One run: a model, an objective and a corpus, epoch by epoch, from a state that can be saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from undrop.errors import NonFiniteError, RunError, StoppedError
from undrop.lab.corpora import Corpus
from undrop.lab.corpora.batching import TrainingWindows, Window
from undrop.lab.models import LanguageModel, State, detach
from undrop.lab.train import rng
from undrop.lab.train.components import MODELS, OBJECTIVES
from undrop.lab.train.config import Config
from undrop.lab.train.devices import autocast
from undrop.lab.train.evaluation import mean_loss
from undrop.lab.train.interrupts import Interrupts
from undrop.lab.train.journal import Journal
from undrop.lab.train.meters import Clock, Means, Speed, perplexity
from undrop.lab.train.optimizers import Stepper
from undrop.lab.train.parallel import Gradient
from undrop.lab.train.reporters import Watching
from undrop.lab.train.schedules import Progress, rate
from undrop.lab.train.world import World
from undrop.objectives import Objective

__all__ = ["Trainer", "build_model"]

PARTS = {"loss": None, "explicit": None, "implicit": None}
"""The parts that every record has; None where the objective has no such part."""


class _Stop(Exception):
    """A signal asked for an end."""


def build_model(config: Config, vocab_size: int) -> LanguageModel:
    """The model that a config names, newly initialised, in its precision."""
    model: LanguageModel = MODELS.build(
        config.model.name, config.model.options, vocab_size=vocab_size
    )
    return model.to(torch.float64 if config.train.precision == "float64" else torch.float32)


class Trainer:
    """Trains one model: ``advance()`` trains one epoch.

    The global random generators are this run's only while it works, so that runs can take turns in
    one process and each has the bits it would have alone.

    Args:
        config: every setting.
        corpus: the text.
        journal: takes down what happens.
        world: the processes that train together.
        interrupts: may ask for an end.
        watcher: looks at the model after each step; what it says goes to the metrics.
    """

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        *,
        journal: Journal,
        world: World,
        interrupts: Interrupts | None = None,
        watcher: Watching | None = None,
    ) -> None:
        self.config, self.corpus, self.world = config, corpus, world
        self._journal = journal
        self._interrupts = interrupts or Interrupts()
        self._watcher = watcher if world.is_main else None
        self.step = 0
        self.epoch = 0  # epochs that are trained and judged
        self.best: dict[str, Any] | None = None  # the record of the best epoch
        self.last: dict[str, Any] | None = None  # the record of the last one
        self.clock = Clock()
        self._trained = False  # whether the present epoch only waits to be judged
        self._hidden: State | None = None
        self._lr = 0.0
        self._speed = Speed()
        self._since_log, self._since_epoch = Means(), Means()
        with rng.isolated():
            rng.seed(config.train.seed)
            self._build()
            rng.seed(rng.derive(config.train.seed, "noise", world.rank))
            self._rng = rng.capture()

    def _build(self) -> None:
        config = self.config
        self.model = build_model(config, self.corpus.vocabulary.size).to(self.world.device).train()
        self.objective: Objective = OBJECTIVES.build(
            config.objective.name, config.objective.options, loss=self.model.loss(), batch_dim=1
        )
        self._gradient = Gradient(self.model, self.objective, self.world)
        self._stepper = Stepper(list(self.model.parameters()), config.optimizer)
        lengths = torch.Generator().manual_seed(rng.derive(config.train.seed, "lengths"))
        self._windows = TrainingWindows(
            self.corpus.train,
            config.data.batch_size,
            config.data.length,
            generator=lengths if config.data.variable_length else None,
            shard=(self.world.rank, self.world.size),
        )

    @property
    def done(self) -> bool:
        """Whether there is nothing left to train."""
        return self.ended is not None

    @property
    def ended(self) -> str | None:
        """Why there is nothing left to train; None if there is."""
        train = self.config.train
        if train.max_steps is not None and self.step >= train.max_steps and not self._trained:
            return "max_steps"
        if self.epoch >= train.epochs:
            return "epochs"
        if train.patience is None or self.best is None:
            return None
        return "patience" if self.epoch - self.best["epoch"] >= train.patience else None

    def progress(self, position: int | None = None) -> Progress:
        """How far the training is, at a position of the present epoch."""
        train = self.config.train
        position = self._windows.position if position is None else position
        epoch = self.epoch + position / self._windows.steps
        done = epoch / train.epochs if train.max_steps is None else self.step / train.max_steps
        return Progress(self.step, epoch, min(done, 1.0))

    def advance(self) -> dict[str, Any]:
        """Train to the end of the present epoch, judge it, save the state; the epoch's record.

        Raises:
            StoppedError: if a signal asked for an end; the state is saved.
            NonFiniteError: naming the step, if a number came out infinite or NaN.
            RunError: if the memory did not suffice, or the folder could not be written.
        """
        with rng.isolated(self._rng), self.clock.running():
            try:
                self._train()
                return self._judge()
            except _Stop:
                self._save()
                raise StoppedError(self._journal.stopped(self.step)) from None
            finally:
                self._rng = rng.capture()

    def _train(self) -> None:
        """Train what is left of the present epoch."""
        if self._trained:
            return
        train = self.config.train
        start = self._windows.position
        if start == 0:
            self._hidden, self._since_epoch = None, Means()
        self._speed.restart()
        for window in self._windows:
            with self._failures_named(f"step {self.step + 1}", *reversed(window.inputs.shape)):
                self._take_step(window, self.progress(start))
            start = self._windows.position
            if self.step % train.log_every == 0:
                self._log()
            if train.max_steps is not None and self.step >= train.max_steps:
                break
            if self.step % train.checkpoint_every == 0:
                self._save()
            if self.world.any(self._interrupts.received is not None):
                raise _Stop
        self._trained = True

    def _take_step(self, window: Window, progress: Progress) -> None:
        config, device = self.config, self.world.device
        factor = rate(config.schedule, progress)
        if config.data.variable_length:
            factor *= window.scale
        self._lr = config.optimizer.lr * factor
        inputs = {"tokens": window.inputs.to(device), "state": self._hidden, "logits": False}
        targets = window.targets.to(device)
        with autocast(config.train, device):
            step = self._gradient(inputs, targets)
        norm = self._stepper.step(factor)
        self._hidden = detach(step.output[1])
        self.step += 1
        parts, tokens = step.parts, window.inputs.numel()
        for means in (self._since_log, self._since_epoch):
            means.add({**parts, "gradient_norm": norm}, tokens)
        self._speed.add(tokens * self.world.size)
        self._journal.reporter.step(progress.done, tokens, parts)
        self._watch(inputs, targets)

    def _watch(self, inputs: dict[str, Any], targets: Tensor) -> None:
        if self._watcher is None:
            return
        with autocast(self.config.train, self.world.device):
            figures = self._watcher.observe(
                self.step, self.model, inputs, targets, loss=self.objective.loss
            )
        if figures is not None:
            head = {"kind": "watch", "epoch": self.epoch + 1, "step": self.step}
            self._journal.record({**head, **figures, "time": {"seconds": self.clock.seconds}})

    @contextlib.contextmanager
    def _failures_named(self, where: str, streams: int, length: int) -> Iterator[None]:
        """Say of what may fail where it was, and what is saved."""
        try:
            yield
        except NonFiniteError as error:
            why = str(error).rstrip(".")
            saved = self._journal.last_checkpoint()
            raise NonFiniteError(
                f"stopped at {where}: {why}; the last good checkpoint is {saved}."
            ) from error
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            saved = self._journal.last_checkpoint()
            raise RunError(
                f"out of memory at {where}, on {streams} streams of {length} steps: lower the batch "
                f"size or data.length; the last good checkpoint is {saved}."
            ) from error

    def _log(self) -> None:
        means, self._since_log = self._since_log.means(self.world), Means()
        self._journal.record(
            {
                "kind": "step",
                "epoch": self.epoch + 1,
                "step": self.step,
                "lr": self._lr,
                **PARTS,
                **means,
                "time": {"seconds": self.clock.seconds, "tokens_per_second": self._speed.take()},
            }
        )

    def _judge(self) -> dict[str, Any]:
        """Evaluate the epoch that was trained, and end it."""
        started = self.clock.seconds
        train = self.config.train
        with self._stepper.judged():
            valid = self.loss_on("valid")
            test = self.loss_on("test") if train.test == "epoch" else None
            plain = self.loss_on("train") if train.train_perplexity else None
            better = self.best is None or valid < self.best["valid_loss"]
            if better:
                self._journal.save_best(self.model.state_dict())
        self.epoch, self._trained = self.epoch + 1, False
        record = {
            "kind": "epoch",
            "epoch": self.epoch,
            "step": self.step,
            "lr": self._lr,
            **PARTS,
            **self._since_epoch.means(self.world),
            "train_ppl": None if plain is None else perplexity(plain),
            "valid_loss": valid,
            "valid_ppl": perplexity(valid),
            "test_ppl": None if test is None else perplexity(test),
            "averaged": self._stepper.averages,
            "time": {"seconds": self.clock.seconds, "judging": self.clock.seconds - started},
        }
        self.last, self.best = record, record if better else self.best
        self._stepper.observe(valid)
        self._journal.record(record)
        self._save()
        return record

    def loss_on(self, split: str) -> float:
        """The mean loss on a split, without noise."""
        data = self.config.data
        with autocast(self.config.train, self.world.device):
            return mean_loss(
                self.model,
                self.corpus.splits[split][: data.eval_tokens],
                batch_size=data.eval_batch_size,
                length=data.length,
                world=self.world,
                between=self._stop_if_asked,
            )

    def _stop_if_asked(self) -> None:
        # Several processes would have to agree here; they stop at their next step instead.
        if self.world.size == 1 and self._interrupts.received is not None:
            raise _Stop

    def _save(self) -> None:
        own = {
            "hidden": self._hidden,
            "rng": rng.capture(),
            "objective": self.objective.state_dict(),
            "since_log": self._since_log.state_dict(),
            "since_epoch": self._since_epoch.state_dict(),
        }
        state = {
            "config": self.config.as_dict(),
            "vocabulary": self.corpus.vocabulary.sha256,
            "step": self.step,
            "epoch": self.epoch,
            "trained": self._trained,
            "best": self.best,
            "last": self.last,
            "seconds": self.clock.seconds,
            "lr": self._lr,
            "model": self.model.state_dict(),
            "stepper": self._stepper.state_dict(),
            "windows": self._windows.state_dict(),
            "ranks": self.world.gather(own),
        }
        self._journal.save(self.step, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state.

        Raises:
            RunError: if it is of another corpus or another number of processes.
        """
        if state["vocabulary"] != self.corpus.vocabulary.sha256:
            raise RunError(f"the run was begun on another text than this {self.corpus.name}.")
        if len(state["ranks"]) != self.world.size:
            raise RunError(
                f"the run was begun with {len(state['ranks'])} processes and can't go on "
                f"bit for bit with {self.world.size}: start as many."
            )
        own = state["ranks"][self.world.rank]
        self.step, self.epoch, self._trained = state["step"], state["epoch"], state["trained"]
        self.best, self.last, self._lr = state["best"], state["last"], state["lr"]
        self.clock.start_from(state["seconds"])
        self.model.load_state_dict(state["model"])
        self._stepper.load_state_dict(state["stepper"])
        self._windows.load_state_dict(state["windows"])
        self._hidden = _moved(own["hidden"], self.world.device)
        self._rng = own["rng"]
        self.objective.load_state_dict(own["objective"])
        self._since_log.load_state_dict(own["since_log"])
        self._since_epoch.load_state_dict(own["since_epoch"])


def _moved(state: Any, device: torch.device) -> Any:
    if isinstance(state, tuple):
        return tuple(_moved(part, device) for part in state)
    return state.to(device) if isinstance(state, Tensor) else state


def _is_out_of_memory(error: BaseException) -> bool:
    # On the CPU torch raises a plain RuntimeError.
    told = "can't allocate memory" in str(error) or "out of memory" in str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or told
