"""The training loop of a run, and the state from which it resumes exactly: ``Trainer.state_dict``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from undrop.errors import NonFiniteError, RunError, StoppedError
from undrop.lab.corpora import Corpus
from undrop.lab.corpora.batching import TrainingWindows, Window
from undrop.lab.models import State, detach
from undrop.lab.train.callbacks import Callback
from undrop.lab.train.config import Config
from undrop.lab.train.environment import Gradient, Interrupts, World, autocast, is_out_of_memory
from undrop.lab.train.folder import RunFolder
from undrop.lab.train.metrics import Clock, Means, mean_loss, perplexity
from undrop.lab.train.optimizers import RunProgress, Stepper, lr_factor
from undrop.lab.train.tuning import build_tuner
from undrop.rng_snapshot import RngSnapshot, derive_seed, seed_all

_PARTS = {"loss": None, "explicit": None, "implicit": None}
"""The parts that records of steps and epochs always list; None if the objective has no such part."""


class _StopRequested(Exception):
    """A signal asked the run to stop."""


class Trainer:
    """Trains one model; each call of ``advance()`` trains and evaluates one epoch.

    Each trainer has its own state of the global random generators. It sets this state before it works,
    and restores the previous one afterwards. So several runs can alternate in one process, and each is
    bit for bit what it would be alone.

    Args:
        config: all settings.
        corpus: the text.
        folder: the run's folder, which the main process writes to.
        callbacks: follow the run; only the main process has any.
        world: the processes that train together.
        interrupts: remembers a signal that asks the run to stop.
    """

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        folder: RunFolder,
        callbacks: Sequence[Callback],
        world: World,
        interrupts: Interrupts,
    ) -> None:
        self.config, self.corpus, self.folder = config, corpus, folder
        self.callbacks, self.world, self._interrupts = callbacks, world, interrupts
        self._observers = [c for c in callbacks if type(c).observe is not Callback.observe]
        self.step = 0  # optimizer steps taken
        self.epoch = 0  # epochs trained and evaluated
        self.best_record: dict[str, Any] | None = None
        self.last_record: dict[str, Any] | None = None
        self.clock = Clock()
        self._epoch_trained = False  # whether the current epoch is trained but not yet evaluated
        self._hidden: State | None = None
        self._lr = 0.0
        self._last_log_time, self._tokens_since_log = time.perf_counter(), 0
        self._means_since_log, self._epoch_means = Means(), Means()
        with RngSnapshot():
            seed_all(config.train.seed)
            self._build()
            seed_all(derive_seed(config.train.seed, "noise", world.rank))
            self._rng = RngSnapshot()

    def _build(self) -> None:
        """Create the model, objective, tuner, optimizer and windows of text."""
        config, data = self.config, self.config.data
        self.model = config.build_model(self.corpus, self.world.device).train()
        self.objective = config.build_objective(self.model)
        self.tuner, text = build_tuner(config, self.objective, self.corpus.train, self.world)
        self._gradient = Gradient(self.model, self.objective, self.world)
        self._stepper = Stepper(list(self.model.parameters()), config.optimizer)
        lengths = torch.Generator().manual_seed(derive_seed(config.train.seed, "lengths"))
        self._windows = TrainingWindows(
            text,
            data.batch_size,
            data.length,
            generator=lengths if data.variable_length else None,
            shard=(self.world.rank, self.world.size),
        )

    @property
    def end_reason(self) -> str | None:
        """Why the run is complete: "max_steps", "epochs" or "patience"; None while it is not."""
        train = self.config.train
        if train.max_steps is not None and self.step >= train.max_steps and not self._epoch_trained:
            return "max_steps"
        if self.epoch >= train.epochs:
            return "epochs"
        if train.patience is None or self.best_record is None:
            return None
        return "patience" if self.epoch - self.best_record["epoch"] >= train.patience else None

    def progress(self) -> RunProgress:
        """Return the present progress of the run."""
        train = self.config.train
        epoch = self.epoch + self._windows.position / self._windows.steps
        done = epoch / train.epochs if train.max_steps is None else self.step / train.max_steps
        return RunProgress(self.step, epoch, min(done, 1.0))

    def advance(self) -> dict[str, Any]:
        """Train the rest of the current epoch, evaluate it, save the state; return the epoch's record.

        Raises:
            StoppedError: if a signal asked the run to stop; the state is saved.
            NonFiniteError: if a number is infinite or NaN; the message names the step.
            RunError: if memory ran out, or the run's folder can't be written.
        """
        with self._random_state(), self.clock.running():
            try:
                self._train_epoch()
                return self._finish_epoch()
            except _StopRequested:
                self._save()
                raise StoppedError(
                    f"stopped at step {self.step} with everything saved: resume with "
                    f"undrop train --resume --out {self.folder.path}"
                ) from None

    @contextlib.contextmanager
    def _random_state(self) -> Iterator[None]:
        """Give the global random generators this run's state within the block."""
        with RngSnapshot():
            self._rng.restore()
            try:
                yield
            finally:
                self._rng = RngSnapshot()

    def _train_epoch(self) -> None:
        """Train the rest of the current epoch; if only its evaluation is missing, do nothing."""
        if self._epoch_trained:
            return
        train = self.config.train
        if self._windows.position == 0:
            self._hidden, self._epoch_means = None, Means()
        self._last_log_time, self._tokens_since_log = time.perf_counter(), 0
        progress = self.progress()  # before the loop takes a window, which moves the position
        for window in self._windows:
            with self._explain_failures(window):
                self._take_step(window, progress)
            progress = self.progress()
            if self.step % train.log_every == 0:
                self._log()
            if train.max_steps is not None and self.step >= train.max_steps:
                break
            if self.step % train.checkpoint_every == 0:
                self._save()
            if self.world.any(self._interrupts.received is not None):
                raise _StopRequested
        self._epoch_trained = True

    def _take_step(self, window: Window, progress: RunProgress) -> None:
        config, device = self.config, self.world.device
        factor = lr_factor(config.schedule, progress)
        if config.data.variable_length:
            factor *= window.scale
        self._lr = config.optimizer.lr * factor
        inputs = {"tokens": window.inputs.to(device), "state": self._hidden, "logits": False}
        targets = window.targets.to(device)
        trial: dict[str, float] | None = None
        with autocast(config.train, device):
            if self.tuner is not None:  # the batches of a trial begin without a hidden state
                trial = self.tuner.observe(self.model, {**inputs, "state": None}, targets)
            step = self._gradient(inputs, targets)
        norm = self._stepper.step(factor)
        self._hidden = detach(step.output[1])
        self.step += 1
        parts, tokens = step.parts, window.inputs.numel()
        for means in (self._means_since_log, self._epoch_means):
            means.add({**parts, "gradient_norm": norm}, tokens)
        self._tokens_since_log += tokens * self.world.size
        for callback in self.callbacks:
            callback.step(progress.done, tokens, parts)
        if trial is not None:
            self._record("tune", trial)
        self._observe(inputs, targets)

    def _observe(self, inputs: dict[str, Any], targets: Tensor) -> None:
        """Let the callbacks observe the model, and add the numbers that they return to the metrics."""
        for callback in self._observers:
            with RngSnapshot(), autocast(self.config.train, self.world.device):
                values = callback.observe(self, inputs, targets)
            if values is not None:
                self._record(callback.kind, values)

    @contextlib.contextmanager
    def _explain_failures(self, window: Window) -> Iterator[None]:
        """Add the step and the last good checkpoint to an error's message."""
        step = self.step + 1
        try:
            yield
        except NonFiniteError as error:
            reason = f"{str(error).rstrip('.')}; {self._last_checkpoint()}."
            raise NonFiniteError(f"stopped at step {step}: {reason}") from error
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            length, streams = window.inputs.shape
            raise RunError(
                f"out of memory at step {step}, on {streams} streams of {length} steps: lower the "
                f"batch size or data.length; {self._last_checkpoint()}."
            ) from error

    def _last_checkpoint(self) -> str:
        checkpoints = self.folder.checkpoints
        steps = checkpoints.steps()
        return f"the last good checkpoint is {checkpoints.path(steps[-1]) if steps else 'none yet'}"

    def _record(self, kind: str, values: Mapping[str, Any], **times: float) -> dict[str, Any]:
        """Add a record of the current epoch to the metrics, and return it.

        Only the values in its ``time`` can differ between a resumed and an uninterrupted run.
        """
        head = {"kind": kind, "epoch": self.epoch + 1, "step": self.step}
        record = {**head, **values, "time": {"seconds": self.clock.seconds, **times}}
        if self.world.is_main:
            self.folder.metrics.append(record)
        for callback in self.callbacks:
            callback.record(record)
        return record

    def say(self, text: str) -> None:
        """Pass a message to the user."""
        for callback in self.callbacks:
            callback.say(text)

    def _log(self) -> None:
        """Record the means of the steps since the previous record."""
        means, self._means_since_log = self._means_since_log.means(self.world), Means()
        values = {"lr": self._lr, **_PARTS, **means}
        seconds = time.perf_counter() - self._last_log_time
        speed = self._tokens_since_log / max(seconds, 1e-9)
        self._last_log_time, self._tokens_since_log = time.perf_counter(), 0
        self._record("step", values, tokens_per_second=speed)

    def _finish_epoch(self) -> dict[str, Any]:
        """Evaluate the epoch, record it, save the state, and return the record."""
        start = self.clock.seconds
        train = self.config.train
        with self._stepper.average.applied():
            valid = self.loss_on("valid")
            test_ppl = perplexity(self.loss_on("test")) if train.test == "epoch" else None
            train_ppl = perplexity(self.loss_on("train")) if train.train_perplexity else None
            is_best = self.best_record is None or valid < self.best_record["valid_loss"]
            if is_best and self.world.is_main:
                self.folder.write_best(self.model.state_dict())
        values = {
            "lr": self._lr,
            **_PARTS,
            **self._epoch_means.means(self.world),
            "train_ppl": train_ppl,
            "valid_loss": valid,
            "valid_ppl": perplexity(valid),
            "test_ppl": test_ppl,
            "averaged": self._stepper.average.active,
        }
        self._stepper.average.observe(valid)
        self.last_record = self._record("epoch", values, evaluation=self.clock.seconds - start)
        if is_best:
            self.best_record = self.last_record
        self.epoch, self._epoch_trained = self.epoch + 1, False
        self._save()
        return self.last_record

    def loss_on(self, split: str) -> float:
        """Compute the mean loss on a split, without noise."""
        data = self.config.data
        with autocast(self.config.train, self.world.device):
            return mean_loss(
                self.model,
                self.corpus.splits[split][: data.eval_tokens],
                batch_size=data.eval_batch_size,
                length=data.length,
                world=self.world,
                after_window=self._stop_if_requested,
            )

    def _stop_if_requested(self) -> None:
        # Several processes have to stop together: they agree on that in _train_epoch.
        if self.world.size == 1 and self._interrupts.received is not None:
            raise _StopRequested

    def save(self) -> None:
        """Write a checkpoint, outside ``advance()``."""
        with self._random_state():
            self._save()

    def _save(self) -> None:
        state = self.state_dict()  # in all processes, because it gathers values from all of them
        if self.world.is_main:
            self.folder.save(self.step, state)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the remaining steps depend on, apart from the config and the text.

        A resumed run is exact because it continues with the same weights, optimizer state, hidden state
        and random generators, at the same window of the text. The objective and the tuner save the state
        of their own generators. Everything else, such as the learning rate (:func:`lr_factor`), is
        computed from these values.

        The values in ``ranks`` differ between processes; each process returns those of all. The
        global random generators must be in this run's state, as they are within ``advance()``.
        """
        local = {
            "hidden": self._hidden,
            "rng": RngSnapshot().state_dict(),
            "objective": self.objective.state_dict(),
            "tuner": None if self.tuner is None else self.tuner.state_dict(),
            "since_log": self._means_since_log.state_dict(),
            "since_epoch": self._epoch_means.state_dict(),
        }
        return {
            "config": self.config.as_dict(),
            "vocabulary": self.corpus.vocabulary.sha256,
            "step": self.step,
            "epoch": self.epoch,
            "trained": self._epoch_trained,
            "best": self.best_record,
            "last": self.last_record,
            "seconds": self.clock.seconds,
            "lr": self._lr,
            "model": self.model.state_dict(),
            "stepper": self._stepper.state_dict(),
            "windows": self._windows.state_dict(),
            "ranks": self.world.gather(local),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`.

        Raises:
            RunError: if the state belongs to another text or another number of processes.
        """
        if state["vocabulary"] != self.corpus.vocabulary.sha256:
            raise RunError(
                f"the text of {self.corpus.name} is not the one that the run was started on: restore "
                "that text, or choose another --out."
            )
        if (size := len(state["ranks"])) != self.world.size:
            raise RunError(
                f"the run was started with {size} processes and can't be resumed exactly with "
                f"{self.world.size}: start {size} processes."
            )
        self.step, self.epoch, self._epoch_trained = state["step"], state["epoch"], state["trained"]
        self.best_record, self.last_record, self._lr = state["best"], state["last"], state["lr"]
        self.clock.start_from(state["seconds"])
        self.model.load_state_dict(state["model"])
        self._stepper.load_state_dict(state["stepper"])
        self._windows.load_state_dict(state["windows"])
        local = state["ranks"][self.world.rank]
        self._hidden = tree_map_only(Tensor, lambda x: x.to(self.world.device), local["hidden"])
        self._rng = RngSnapshot.from_state_dict(local["rng"])
        self.objective.load_state_dict(local["objective"])
        if self.tuner is not None:
            self.tuner.load_state_dict(local["tuner"])
        self._means_since_log.load_state_dict(local["since_log"])
        self._epoch_means.load_state_dict(local["since_epoch"])
