"""The model and the batches of a diagnosis, and passes of the model that do not change it."""

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
        limit: the largest number of batches to take.
        name: what the batches are called in error messages.

    Raises:
        DataError: if there are no batches, or a batch is not a pair.
    """
    if isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        raise DataError(
            f"{name} must be an iterable of pairs (inputs, targets), such as a DataLoader, got "
            f"{type(batches).__name__}: put a single batch into a list, [(inputs, targets)]."
        )
    pairs = []
    for number, pair in enumerate(islice(batches, limit)):
        if isinstance(pair, Mapping) and "labels" in pair:
            pair = (pair, None)
        is_sequence = isinstance(pair, tuple | list)
        if not is_sequence or len(pair) != 2:
            kind = type(pair).__name__
            got = f"a {kind} of {len(pair)}" if is_sequence else kind
            raise DataError(
                f"each of the {name} must be a pair (inputs, targets), got {got} for batch {number}: "
                "inputs may be a tensor, a tuple (positional) or a dict (keyword arguments)."
            )
        inputs, targets = pair
        pairs.append((inputs, targets))
    if not pairs:
        raise DataError(
            f"there are no {name}: pass at least one pair (inputs, targets); a generator that has been "
            "used up is empty."
        )
    return pairs


def shared_examples(
    inputs: Any, validation_inputs: Iterable[Any], batch_dim: int
) -> tuple[int, int]:
    """Return how many examples of a training batch are also in the validation data, and how many it has.

    Examples are compared bit for bit.

    Args:
        inputs: the inputs of the training batch.
        validation_inputs: the inputs of each validation batch.
        batch_dim: the dimension of the examples.
    """
    examples = _example_bytes(inputs, batch_dim)
    validation = {example for x in validation_inputs for example in _example_bytes(x, batch_dim)}
    return sum(example in validation for example in examples), len(examples)


def _example_bytes(inputs: Any, dim: int) -> list[bytes]:
    """Return the bytes of each example in the first tensor that has the dimension ``dim``."""
    tensors: Sequence[Tensor] = [t for t in tensors_in(inputs) if t.dim() > dim]
    if not tensors:
        return []
    rows = tensors[0].detach().cpu().movedim(dim, 0)
    return [row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows if row.dim()]


SiteNoise = Mapping[str, Tensor]
"""σ·η by the name of its site. Sites without an entry carry no noise."""


class FixedNoise:
    """The site action h ⊙ (1 + ε·σ·η) for a given σ·η."""

    def __init__(self, noise: SiteNoise, epsilon: float = 1.0) -> None:
        self.noise, self.epsilon = noise, epsilon

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """Return h ⊙ (1 + ε·σ·η); h itself at a site without noise."""
        noise = self.noise.get(site.name)
        return h if noise is None else torch.addcmul(h, h, noise, value=self.epsilon)


class MeasuredModel:
    """A model with its loss and batches; measurements do not change the model.

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
        user_loss = as_loss(loss)
        prepared = (user_loss.prepare(self.model, *pair) for pair in batches)
        self.batches = [batch._replace(number=n) for n, batch in enumerate(prepared)]
        self.loss: Loss = self.batches[-1].loss
        if self.loss.whole_output:
            raise OptionError(
                f"{type(self.loss).__name__} takes all that the model returns, but a diagnosis "
                "measures one output: pass the loss of one output, such as undrop.CrossEntropy()."
            )
        self.generators = Generators(_separate_generator(generator))
        self.sites: Sites = sites(self.model, self.batches[0].inputs)

    @property
    def name(self) -> str:
        """The name of the model's class."""
        return type(self.model).__name__

    @contextlib.contextmanager
    def preserve(self) -> Iterator[None]:
        """Run a block in train mode with gradients; then restore the model and all random generators.

        Raises:
            OutputError: if two passes without noise disagree, or two calls of the loss.
        """
        with preserve_model(self.model), torch.inference_mode(False), torch.enable_grad():
            if not self.model.training:
                self.model.train()
            self._rng = RngSnapshot.after_seeding(self.model, self.generators)
            self._check_repeatable()
            yield

    @torch.no_grad()
    def _check_repeatable(self) -> None:
        """Refuse a model or a loss whose result differs between two equal calls."""
        outputs = [self.run(self.batches[0], FixedNoise({})) for _ in range(2)]
        tolerance = 1e-2 if outputs[0].dtype in (torch.float16, torch.bfloat16) else 1e-4
        one, two = (output.double().nan_to_num() for output in outputs)
        if one.shape != two.shape or float((one - two).norm()) > tolerance * float(one.norm()):
            raise OutputError(
                f"two passes of {self.name} without dropout disagree although every random generator "
                "started from the same state, so nothing can be measured by comparing passes: make the "
                "model draw its random numbers from torch's, NumPy's or Python's global generators, or "
                "switch them off."
            )
        with self.loss.keep_state():
            a, b = (self.loss.value(outputs[0], self.batches[0].targets) for _ in range(2))
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
        """Return the output tensor of a pass with the action at every site.

        Random numbers of the model other than dropout's are the same in every pass.
        """
        self._rng.restore()
        with keep_statistics(self.model), Interception(self.model, action, rules):
            logits = logits_of(call(self.model, batch.inputs))
        self.loss.check(logits, batch.targets)
        self.loss.check_values(logits, batch.targets)
        return logits

    @torch.no_grad()
    def loss_value(self, batch: Batch, noise: SiteNoise, epsilon: float = 1.0) -> float:
        """Return ℓ(F(x; ε, η)), or ℓ(F(x)) if ``noise`` is empty; raise an error if it is not finite."""
        output = self.run(batch, FixedNoise(noise, epsilon))
        return self.check_finite(batch, self.loss.value(output, batch.targets), bool(noise))

    def check_finite(self, batch: Batch, loss: Tensor, noisy: bool) -> float:
        """Return the loss of a pass with or without noise; raise an error if it is not finite."""
        value = float(loss.detach().double())
        if not math.isfinite(value):
            raise NonFiniteError(
                f"the loss of batch {batch.number} {'with' if noisy else 'without'} dropout is {value}: "
                f"look for NaN or infinity in its inputs and in the weights of {self.name}."
            )
        return value

    def draw_masks(
        self, sites_and_tensors: Iterable[tuple[Site, Tensor]], factor: float = 1.0
    ) -> dict[str, Tensor]:
        """Draw dropout's σ·η at every site, with every p times ``factor``.

        The noise at a site has the dtype and device of the tensor that comes with the site.
        """
        masks = {}
        for site, tensor in sites_and_tensors:
            q, generator = site.p * factor, self.generators(tensor.device)
            masks[site.name] = draw_noise(
                "dropout", site.mask_shape, q, like=tensor, scale=sigma(q), generator=generator
            )
        return masks


def _separate_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """Return a new generator: a pass of the model may draw from the user's generator, or reset it."""
    if generator is None:
        return None
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    return torch.Generator(generator.device).manual_seed(int(seed))
