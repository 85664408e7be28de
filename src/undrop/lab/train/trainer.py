"""The training loop: one model, one objective and one corpus, epoch by epoch, exactly resumable."""

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
from undrop.lab.train.tuning import tuner_for
from undrop.rng_snapshot import RngSnapshot, derive_seed, seed_all

_PARTS = {"loss": None, "explicit": None, "implicit": None}
"""The parts that every record has; None if the objective has no such part."""


class _StopRequested(Exception):
    """A signal asked the run to stop."""


class Trainer:
    """Trains one model; each call of ``advance()`` trains and evaluates one epoch.

    A trainer uses the global random generators only while it works and restores them afterwards. So
    several runs can alternate in one process, and each is bit for bit what it would be alone.

    Args:
        config: every setting.
        corpus: the text.
        folder: the run's folder, which the main process writes to.
        callbacks: follow the run; there are none outside the main process.
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
        self.config, self.corpus, self.world = config, corpus, world
        self.folder = folder
        self.callbacks = callbacks
        self._observers = [c for c in callbacks if type(c).observe is not Callback.observe]
        self._interrupts = interrupts
        self.step = 0  # optimizer steps taken
        self.epoch = 0  # epochs trained and evaluated
        self.best: dict[str, Any] | None = None  # the record of the best epoch
        self.last: dict[str, Any] | None = None  # the record of the last epoch
        self.clock = Clock()
        self._trained = False  # whether the current epoch is trained but not yet evaluated
        self._hidden: State | None = None
        self._lr = 0.0
        self._logged, self._tokens = time.perf_counter(), 0
        self._since_log, self._since_epoch = Means(), Means()
        with RngSnapshot():
            seed_all(config.train.seed)
            self._build()
            seed_all(derive_seed(config.train.seed, "noise", world.rank))
            self._rng = RngSnapshot()

    def _build(self) -> None:
        config, data = self.config, self.config.data
        self.model = config.build_model(self.corpus, self.world.device).train()
        self.objective = config.build_objective(self.model)
        self.tuner, text = tuner_for(config, self.objective, self.corpus.train, self.world)
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
    def done(self) -> bool:
        """Whether the run is complete."""
        return self.ended is not None

    @property
    def ended(self) -> str | None:
        """Why the run is complete: "max_steps", "epochs" or "patience"; None if it is not."""
        train = self.config.train
        if train.max_steps is not None and self.step >= train.max_steps and not self._trained:
            return "max_steps"
        if self.epoch >= train.epochs:
            return "epochs"
        if train.patience is None or self.best is None:
            return None
        return "patience" if self.epoch - self.best["epoch"] >= train.patience else None

    def progress(self, position: int | None = None) -> RunProgress:
        """Return the progress of the run at a position in the epoch, by default the current one."""
        train = self.config.train
        position = self._windows.position if position is None else position
        epoch = self.epoch + position / self._windows.steps
        done = epoch / train.epochs if train.max_steps is None else self.step / train.max_steps
        return RunProgress(self.step, epoch, min(done, 1.0))

    def advance(self) -> dict[str, Any]:
        """Train the rest of the current epoch, evaluate, save; return the epoch's record.

        Raises:
            StoppedError: if a signal asked the run to stop; the state is saved.
            NonFiniteError: naming the step, if a number is infinite or NaN.
            RunError: if memory ran out, or the run's folder can't be written.
        """
        with self._own_rng(), self.clock.running():
            try:
                self._train()
                return self._validate()
            except _StopRequested:
                self._save()
                raise StoppedError(
                    f"stopped at step {self.step} with everything saved: resume with "
                    f"undrop train --resume --out {self.folder.path}"
                ) from None

    @contextlib.contextmanager
    def _own_rng(self) -> Iterator[None]:
        """Use the run's own state of the random generators within the block."""
        with RngSnapshot():
            self._rng.restore()
            try:
                yield
            finally:
                self._rng = RngSnapshot()

    def _train(self) -> None:
        """Train the rest of the current epoch."""
        if self._trained:
            return
        train = self.config.train
        start = self._windows.position
        if start == 0:
            self._hidden, self._since_epoch = None, Means()
        self._logged, self._tokens = time.perf_counter(), 0
        for window in self._windows:
            with self._explain_failures(f"step {self.step + 1}", *reversed(window.inputs.shape)):
                self._take_step(window, self.progress(start))
            start = self._windows.position
            if self.step % train.log_every == 0:
                self._log()
            if train.max_steps is not None and self.step >= train.max_steps:
                break
            if self.step % train.checkpoint_every == 0:
                self._save()
            if self.world.any(self._interrupts.received is not None):
                raise _StopRequested
        self._trained = True

    def _take_step(self, window: Window, progress: RunProgress) -> None:
        config, device = self.config, self.world.device
        factor = lr_factor(config.schedule, progress)
        if config.data.variable_length:
            factor *= window.scale
        self._lr = config.optimizer.lr * factor
        inputs = {"tokens": window.inputs.to(device), "state": self._hidden, "logits": False}
        targets = window.targets.to(device)
        with autocast(config.train, device):
            tuned = self._tune({**inputs, "state": None}, targets)
            step = self._gradient(inputs, targets)
        norm = self._stepper.step(factor)
        self._hidden = detach(step.output[1])
        self.step += 1
        parts, tokens = step.parts, window.inputs.numel()
        for means in (self._since_log, self._since_epoch):
            means.add({**parts, "gradient_norm": norm}, tokens)
        self._tokens += tokens * self.world.size
        for callback in self.callbacks:
            callback.step(progress.done, tokens, parts)
        if tuned is not None:
            self._record("tune", tuned, {})
        self._observe(inputs, targets)

    def _tune(self, inputs: dict[str, Any], targets: Tensor) -> dict[str, float] | None:
        """Let the tuner count the step; it compares batches that all begin without a hidden state."""
        return None if self.tuner is None else self.tuner.observe(self.model, inputs, targets)

    def _observe(self, inputs: dict[str, Any], targets: Tensor) -> None:
        """Let callbacks look at the model, and add their figures to the metrics."""
        for callback in self._observers:
            with RngSnapshot(), autocast(self.config.train, self.world.device):
                figures = callback.observe(self, inputs, targets)
            if figures is not None:
                self._record(callback.kind, figures, {})

    @contextlib.contextmanager
    def _explain_failures(self, where: str, streams: int, length: int) -> Iterator[None]:
        """Add to an error's message where it happened, and the last good checkpoint."""
        try:
            yield
        except NonFiniteError as error:
            why = str(error).rstrip(".")
            raise NonFiniteError(f"stopped at {where}: {why}; {self._last_saved()}.") from error
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(
                f"out of memory at {where}, on {streams} streams of {length} steps: lower the batch "
                f"size or data.length; {self._last_saved()}."
            ) from error

    def _last_saved(self) -> str:
        steps = self.folder.checkpoints.steps()
        where = self.folder.checkpoints.path(steps[-1]) if steps else "none yet"
        return f"the last good checkpoint is {where}"

    def _record(
        self, kind: str, values: Mapping[str, Any], times: Mapping[str, float]
    ) -> dict[str, Any]:
        """Add a record of the current epoch to the metrics, and return it."""
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
        means, self._since_log = self._since_log.means(self.world), Means()
        values = {"lr": self._lr, **_PARTS, **means}
        seconds = time.perf_counter() - self._logged
        speed = self._tokens / max(seconds, 1e-9)  # the only figure that a restart may change
        self._logged, self._tokens = time.perf_counter(), 0
        self._record("step", values, {"tokens_per_second": speed})

    def _validate(self) -> dict[str, Any]:
        """Evaluate the epoch that was trained, and end it."""
        started = self.clock.seconds
        train = self.config.train
        with self._stepper.average.applied():
            valid = self.loss_on("valid")
            test = self.loss_on("test") if train.test == "epoch" else None
            plain = self.loss_on("train") if train.train_perplexity else None
            better = self.best is None or valid < self.best["valid_loss"]
            if better and self.world.is_main:
                self.folder.write_best(self.model.state_dict())
        values = {
            "lr": self._lr,
            **_PARTS,
            **self._since_epoch.means(self.world),
            "train_ppl": None if plain is None else perplexity(plain),
            "valid_loss": valid,
            "valid_ppl": perplexity(valid),
            "test_ppl": None if test is None else perplexity(test),
            "averaged": self._stepper.average.active,
        }
        self._stepper.average.observe(valid)
        times = {"evaluation": self.clock.seconds - started}
        self.last = self._record("epoch", values, times)
        self.best = self.last if better else self.best
        self.epoch, self._trained = self.epoch + 1, False
        self._save()
        return self.last

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
                between=self._stop_if_requested,
            )

    def _stop_if_requested(self) -> None:
        # Several processes would have to agree here; they stop at their next step instead.
        if self.world.size == 1 and self._interrupts.received is not None:
            raise _StopRequested

    def save(self) -> None:
        """Write a checkpoint of the current state."""
        with self._own_rng():
            self._save()

    def _save(self) -> None:
        own = {
            "hidden": self._hidden,
            "rng": RngSnapshot().state_dict(),
            "objective": self.objective.state_dict(),
            "tuner": None if self.tuner is None else self.tuner.state_dict(),
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
        if self.world.is_main:
            self.folder.save(self.step, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a checkpoint.

        Raises:
            RunError: if it belongs to another corpus or another number of processes.
        """
        if state["vocabulary"] != self.corpus.vocabulary.sha256:
            raise RunError(
                f"the text of {self.corpus.name} is not the one that the run was started on: restore "
                "that text, or choose another --out."
            )
        if len(state["ranks"]) != self.world.size:
            raise RunError(
                f"the run was started with {len(state['ranks'])} processes and can't be resumed "
                f"exactly with {self.world.size}: start {len(state['ranks'])} processes."
            )
        own = state["ranks"][self.world.rank]
        self.step, self.epoch, self._trained = state["step"], state["epoch"], state["trained"]
        self.best, self.last, self._lr = state["best"], state["last"], state["lr"]
        self.clock.start_from(state["seconds"])
        self.model.load_state_dict(state["model"])
        self._stepper.load_state_dict(state["stepper"])
        self._windows.load_state_dict(state["windows"])
        self._hidden = tree_map_only(Tensor, lambda x: x.to(self.world.device), own["hidden"])
        self._rng = RngSnapshot.from_state_dict(own["rng"])
        self.objective.load_state_dict(own["objective"])
        if self.tuner is not None:
            self.tuner.load_state_dict(own["tuner"])
        self._since_log.load_state_dict(own["since_log"])
        self._since_epoch.load_state_dict(own["since_epoch"])
