"""The model under study: its batches, and its loss under any noise that one cares to put in."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undrop.errors import DataError, NonFiniteError
from undrop.generators import Generators
from undrop.intercept import (
    Field,
    Handler,
    Interception,
    RngSnapshot,
    Site,
    Sites,
    call,
    keep_statistics,
    logits_of,
    preserve_model,
    sites,
    unwrapped,
)
from undrop.losses import Loss, as_loss
from undrop.noise import draw as draw_noise
from undrop.noise import sigma

__all__ = ["Batch", "Given", "Noise", "Subject", "collect"]

Noise = Mapping[str, Tensor]
"""σ·η by the name of its site; sites that are not in it are silent."""


class Batch(NamedTuple):
    """One batch, as the user gave it."""

    number: int
    inputs: Any
    targets: Any


def collect(batches: Iterable[Any], limit: int) -> list[Batch]:
    """The first ``limit`` batches; fewer if there are no more.

    Raises:
        DataError: if there is none, or one is not a pair (inputs, targets).
    """
    if isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        raise DataError(
            "batches must be an iterable of pairs (inputs, targets), such as a DataLoader, got "
            f"{type(batches).__name__}: put a single batch into a list, [(inputs, targets)]."
        )
    found = []
    for number, pair in enumerate(islice(batches, limit)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            got = f"{len(pair)} things" if isinstance(pair, tuple | list) else type(pair).__name__
            raise DataError(
                f"each batch must be a pair (inputs, targets), got {got} for batch {number}: inputs "
                "may be a tensor, a tuple (positional) or a dict (keyword arguments)."
            )
        found.append(Batch(number, *pair))
    if not found:
        raise DataError(
            "there are no batches: pass at least one pair (inputs, targets); a generator that was "
            "run through once is empty."
        )
    return found


class Given:
    """The field h ⊙ (1 + σ·η) for a given σ·η by site; every other site is silent."""

    def __init__(self, noise: Noise) -> None:
        self.noise = noise

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """H ⊙ (1 + σ·η)."""
        noise = self.noise.get(site.name)
        return h if noise is None else torch.addcmul(h, h, noise)


class Subject:
    """A model, a loss and batches, measured without leaving a trace in the model.

    Args:
        model: any module with dropout.
        batches: at least one.
        loss: what a user passes as a loss.
        generator: where masks come from.
        batch_dim: the dimension of targets and outputs that counts examples.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: list[Batch],
        *,
        loss: Loss | Callable[[Tensor, Any], Tensor] | None = None,
        generator: torch.Generator | None = None,
        batch_dim: int = 0,
    ) -> None:
        self.model = unwrapped(model)
        self.batches = batches
        self.loss = as_loss(loss)
        self.randomness = Generators(generator)
        self.batch_dim = batch_dim
        self._stacks = True
        self._drew = False
        self.sites: Sites = sites(self.model, batches[0].inputs)

    @property
    def name(self) -> str:
        """What the model is called."""
        return type(self.model).__name__

    @contextlib.contextmanager
    def studied(self) -> Iterator[None]:
        """In train mode, with gradients; after it all is as it was, torch's random state included."""
        with preserve_model(self.model), torch.inference_mode(False), torch.enable_grad():
            if not self.model.training:
                self.model.train()
            self._replay = RngSnapshot.of(self.model, self.randomness)
            yield

    def run(
        self,
        batch: Batch,
        field: Field,
        rules: Mapping[Callable[..., Any], Handler] | None = None,
    ) -> Tensor:
        """The tensor that the loss sees, with the field's say at every site.

        What the model draws on its own account is the same in every pass: it is no dropout.
        """
        if self._drew:
            self._replay.restart()
        with keep_statistics(self.model), Interception(self.model, field, rules) as mode:
            logits = logits_of(call(self.model, batch.inputs))
        self._drew |= mode.drew
        self.loss.check(logits, batch.targets)
        self.loss.check_values(logits, batch.targets)
        return logits

    @torch.no_grad()
    def value(self, batch: Batch, noise: Noise) -> float:
        """ℓ(F(x; 1, η)), or ℓ(F(x)) for no noise.

        Raises:
            NonFiniteError: naming the batch, if it is not finite.
        """
        loss = float(self._value(batch, noise).double())
        if not math.isfinite(loss):
            raise NonFiniteError(self.not_finite(batch, loss, "with" if noise else "without"))
        return loss

    def _value(self, batch: Batch, noise: Noise) -> Tensor:
        return self.loss.value(self.run(batch, Given(noise)), batch.targets)

    def not_finite(self, batch: Batch, loss: float, how: str) -> str:
        """What to say of a loss that is not finite, with or without dropout."""
        return (
            f"the loss of batch {batch.number} {how} dropout is {loss}: look for NaN or infinity in "
            f"its inputs and in the weights of {self.name}."
        )

    @torch.no_grad()
    def values(self, batch: Batch, stack: Noise) -> Tensor:
        """ℓ(F(x; 1, η)) of each of a stack of noises (k, …), at once where the model's ops allow it."""
        if self._stacks:
            try:
                run = torch.vmap(lambda noise: self._value(batch, noise))
                return run(stack).double()
            except (RuntimeError, ValueError):  # an op without a rule for stacks
                self._stacks = False
        size = len(next(iter(stack.values())))
        each = ({name: value[k] for name, value in stack.items()} for k in range(size))
        return torch.tensor([self.value(batch, noise) for noise in each], dtype=torch.float64)

    def masks(self, found: Iterable[tuple[Site, Tensor]], factor: float = 1.0) -> dict[str, Tensor]:
        """σ·η of dropout with every site's p times ``factor``, as a tensor like the one given."""
        noise = {}
        for site, like in found:
            q = site.p * factor
            noise[site.name] = draw_noise(
                "dropout",
                site.mask_shape,
                q,
                like=like.detach(),
                scale=sigma(q),
                generator=self.randomness(like.device),
            )
        return noise
