"""The model of a diagnosis and its batches, and its loss under any noise, without side effects."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from undrop.errors import DataError, NonFiniteError, OptionError, OutputError
from undrop.generators import Generators
from undrop.intercept import (
    Batch,
    Interception,
    RngSnapshot,
    Rule,
    Site,
    SiteAction,
    Sites,
    call,
    keep_statistics,
    logits_of,
    preserve_model,
    sites,
    tensors_in,
    uncompiled,
)
from undrop.losses import GivenLoss, Loss, as_loss
from undrop.noise import draw_noise, sigma

Pair = tuple[Any, Any]
"""Inputs and targets, as the user passes them."""


def collect(batches: Iterable[Any], limit: int, *, name: str = "batches") -> list[Pair]:
    """Return the first ``limit`` batches, or all if there are fewer.

    Args:
        batches: pairs (inputs, targets).
        limit: the largest number to take.
        name: the argument that holds them, for errors.

    Raises:
        DataError: if there is none, or one is not a pair.
    """
    if isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        raise DataError(
            f"{name} must be an iterable of pairs (inputs, targets), such as a DataLoader, got "
            f"{type(batches).__name__}: put a single batch into a list, [(inputs, targets)]."
        )
    found = []
    for number, pair in enumerate(islice(batches, limit)):
        if isinstance(pair, Mapping) and "labels" in pair:
            pair = (pair, None)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            got = type(pair).__name__
            got = f"a {got} of {len(pair)}" if isinstance(pair, tuple | list) else got
            raise DataError(
                f"each of the {name} must be a pair (inputs, targets), got {got} for batch {number}: "
                "inputs may be a tensor, a tuple (positional) or a dict (keyword arguments)."
            )
        inputs, targets = pair
        found.append((inputs, targets))
    if not found:
        raise DataError(
            f"there are no {name}: pass at least one pair (inputs, targets); a generator that has been "
            "used up is empty."
        )
    return found


def shared_examples(inputs: Any, held: Iterable[Any], batch_dim: int) -> tuple[int, int]:
    """Count the examples of a training batch that the validation data also has, and all its examples.

    ``inputs`` are those of the batch, ``held`` those of the validation batches, and ``batch_dim`` is the
    dimension of the examples. Examples are compared bit for bit.
    """
    own = _fingerprints(inputs, batch_dim)
    others = {f for x in held for f in _fingerprints(x, batch_dim)}
    return sum(f in others for f in own), len(own)


def _fingerprints(inputs: Any, dim: int) -> list[bytes]:
    """Return the bytes of each example of the first tensor."""
    tensors: Sequence[Tensor] = [t for t in tensors_in(inputs) if t.dim() > dim]
    if not tensors:
        return []
    rows = tensors[0].detach().cpu().movedim(dim, 0)
    return [row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows if row.dim()]


SiteNoise = Mapping[str, Tensor]
"""σ·η by the name of its site; other sites carry no noise."""


class FixedNoise:
    """The site action h ⊙ (1 + σ·η) for a given σ·η; other sites carry no noise."""

    def __init__(self, noise: SiteNoise) -> None:
        self.noise = noise

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """h ⊙ (1 + σ·η)."""
        noise = self.noise.get(site.name)
        return h if noise is None else torch.addcmul(h, h, noise)


class MeasuredModel:
    """A model with its loss and batches. Measuring does not change the model.

    Args:
        model: any module with dropout.
        batches: at least one pair (inputs, targets).
        loss: as for an objective.
        generator: seeds the masks.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Pair],
        *,
        loss: GivenLoss | Callable[[Tensor, Any], Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.model = uncompiled(model)
        given = as_loss(loss)
        prepared = (given.prepare(self.model, *pair) for pair in batches)
        self.batches = [batch._replace(number=n) for n, batch in enumerate(prepared)]
        self.loss: Loss = self.batches[-1].loss
        if self.loss.whole_output:
            raise OptionError(
                f"{type(self.loss).__name__} takes all that the model returns, but a diagnosis "
                "measures one output: pass the loss of one output, such as undrop.CrossEntropy()."
            )
        self.generators = Generators(_seeded_from(generator))
        self.sites: Sites = sites(self.model, self.batches[0].inputs)

    @property
    def name(self) -> str:
        """The name of the model's class."""
        return type(self.model).__name__

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Use train mode with gradients; on exit, restore everything, including random generators.

        If two passes without noise disagree, it raises an ``OutputError``.
        """
        with preserve_model(self.model), torch.inference_mode(False), torch.enable_grad():
            if not self.model.training:
                self.model.train()
            self._rng = RngSnapshot.of(self.model, self.generators)
            self._check_repeatable()
            yield

    @torch.no_grad()
    def _check_repeatable(self) -> None:
        """Refuse a model whose own random numbers can't be repeated, and a loss that varies."""
        passes = [self.run(self.batches[0], FixedNoise({})) for _ in range(2)]
        tolerance = 1e-2 if passes[0].dtype in (torch.float16, torch.bfloat16) else 1e-4
        one, two = (output.double().nan_to_num() for output in passes)
        if one.shape != two.shape or float((one - two).norm()) > tolerance * float(one.norm()):
            raise OutputError(
                f"two passes of {self.name} without dropout disagree although every random generator "
                "started from the same state, so nothing can be measured by comparing passes: make the "
                "model draw its random numbers from torch's, NumPy's or Python's global generators, or "
                "switch them off."
            )
        with self.loss.keep_state():
            a, b = (self.loss.value(passes[0], self.batches[0].targets) for _ in range(2))
        if not torch.allclose(a, b, rtol=tolerance, atol=0.0, equal_nan=True):
            raise OutputError(
                "two calls of the loss on the same output disagree, so nothing can be measured by "
                "comparing passes: pass a loss without random numbers and without state."
            )

    def run(
        self,
        batch: Batch,
        action: SiteAction,
        rules: Mapping[Callable[..., Any], Rule] | None = None,
    ) -> Tensor:
        """Return the tensor that the loss receives, with the action at every site.

        Random numbers that the model draws besides dropout are the same in every pass.
        """
        self._rng.restore()
        with keep_statistics(self.model), Interception(self.model, action, rules):
            logits = logits_of(call(self.model, batch.inputs))
        self.loss.check(logits, batch.targets)
        self.loss.check_values(logits, batch.targets)
        return logits

    @torch.no_grad()
    def loss_value(self, batch: Batch, noise: SiteNoise) -> float:
        """Return ℓ(F(x; 1, η)), or ℓ(F(x)) without noise; if it is not finite, raise an error."""
        loss = float(self.loss.value(self.run(batch, FixedNoise(noise)), batch.targets).double())
        if not math.isfinite(loss):
            raise NonFiniteError(self.not_finite(batch, loss, "with" if noise else "without"))
        return loss

    def not_finite(self, batch: Batch, loss: float, how: str) -> str:
        """Return the message for a loss that is not finite; ``how`` is "with" or "without" (dropout)."""
        return (
            f"the loss of batch {batch.number} {how} dropout is {loss}: look for NaN or infinity in "
            f"its inputs and in the weights of {self.name}."
        )

    def draw_masks(
        self, found: Iterable[tuple[Site, Tensor]], factor: float = 1.0
    ) -> dict[str, Tensor]:
        """Draw σ·η of dropout with every site's p times ``factor``, like the tensors of the sites."""
        masks = {}
        for site, like in found:
            q, like, source = site.p * factor, like.detach(), self.generators(like.device)
            masks[site.name] = draw_noise(
                "dropout", site.mask_shape, q, like=like, scale=sigma(q), generator=source
            )
        return masks


def _seeded_from(generator: torch.Generator | None) -> torch.Generator | None:
    """Return a separate generator, because a pass of the model may reset the user's or draw from it."""
    if generator is None:
        return None
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    return torch.Generator(generator.device).manual_seed(int(seed))
