"""Dropout as an objective: averaged over k masks, with or without its noise added back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch

from undrop.engines import Engine, Evaluation, as_engine, dropout_masks
from undrop.errors import OptionError
from undrop.intercept import Batch, Selection
from undrop.losses import Coefficients
from undrop.objectives.base import OBJECTIVES, LossLike, Objective
from undrop.objectives.site_p import SiteMasks, find_p_attributes, set_p
from undrop.options import check_int

NOISES = (None, "resampled", "analytic")


@OBJECTIVES.register(
    "dropout",
    about="Plain dropout; with the option k, the mean loss over k masks (Algorithm 1)",
)
class Dropout(Objective):
    """Drop_k (Algorithm 1): the mean loss over k dropout masks; k = 1 is plain dropout.

    The covariance of the gradient noise falls as 1/k. ``noise`` adds back what averaging removes:

    - "resampled" (Section 3.1): adds sqrt((1 - 1/k)/2)·[ℓ(η₁) - ℓ(η₂)] for two fresh masks;
    - "analytic" (Algorithm 4): adds sqrt(1 - 1/k)·∂ℓ/∂ε, the paper's ξ_approx, for ±1 noise.

    Torch draws the masks from its global generator, so a step with k = 1 is bit for bit a plain dropout
    step. With a ``generator``, undrop draws them. ``step.output`` is the output for the first mask, so a
    recurrent model continues from the hidden state of that pass. (The paper does not say which one; its
    code continues from the last.)

    Args:
        k: the number of masks.
        noise: None, "resampled" or "analytic".
        engine: the engine for analytic noise.
        mask: the mask structure of analytic noise, "as-declared" or "independent".
        sites: the sites of analytic noise; see :class:`~undrop.intercept.Selection`.
        loss: as for every objective.
        generator: as for every objective.
    """

    def __init__(
        self,
        k: int = 1,
        *,
        noise: str | None = None,
        engine: str | Engine = "auto",
        mask: str = "as-declared",
        sites: str | Iterable[str] | Mapping[str, float] | None = None,
        loss: LossLike = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(loss=loss, generator=generator)
        if noise not in NOISES:
            raise OptionError(f"noise must be None, 'resampled' or 'analytic', got {noise!r}.")
        if engine == "exact":
            raise OptionError(
                "engine='exact' computes expectations, which have no noise: use another engine."
            )
        self.k = check_int("k", k)
        self.noise = noise
        self.mask = mask
        self.engine = as_engine(engine)
        self.selection = Selection(sites)
        self.draws_masks = generator is not None
        """Whether undrop draws the masks, instead of torch."""
        self.site_p: dict[str, float] = {}
        """p by site name; it replaces the model's p. A tuner sets it."""
        self._sign_draw()  # raises an error for an unknown mask, before the first step

    @property
    def implicit_factor(self) -> float | None:
        """sqrt(1 - 1/k) with analytic noise."""
        return math.sqrt(1.0 - 1.0 / self.k) if self.noise == "analytic" else None

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield the losses for k masks, then the noise that is added back."""
        for _ in range(self.k):
            yield self._with_new_mask(batch, "loss", 1.0 / self.k)
        removed = 1.0 - 1.0 / self.k  # the share of the variance that averaging removes
        if removed and self.noise == "resampled":
            factor = math.sqrt(removed / 2.0)
            yield self._with_new_mask(batch, "implicit", factor)
            yield self._with_new_mask(batch, "implicit", -factor)
        if removed and self.noise == "analytic":
            coefficients = Coefficients(loss=0.0, quadratic=0.0, directional=math.sqrt(removed))
            yield self.run_engine(self.request(batch, coefficients))

    def _with_new_mask(self, batch: Batch, part: str, factor: float) -> Evaluation:
        """Return an evaluation of ``factor`` times the loss for a new mask."""
        noise = dropout_masks(self.generators) if self.draws_masks else None
        in_attributes = self.site_p and noise is None and batch.backend is None
        attributes = find_p_attributes(batch, list(self.site_p)) if in_attributes else {}
        if attributes:
            with set_p(batch.model, attributes, self.site_p):
                output, loss = self.forward_and_loss(batch, None)
        else:
            action = SiteMasks(self.site_p, noise) if self.site_p else noise
            output, loss = self.forward_and_loss(batch, action)
        total = loss if factor == 1.0 else factor * loss
        last = self.k == 1  # with one mask there is no noise to add back
        return Evaluation(total, {part: total.detach()}, lambda: output, last=last)


OBJECTIVES.register("drop-k", about="Dropout with the mean loss over k = 8 masks")(
    partial(Dropout, k=8)
)
OBJECTIVES.register(
    "drop-k-resampled",
    about="drop-k plus the noise that averaging removes, from fresh masks (Sec. 3.1)",
)(partial(Dropout, k=8, noise="resampled"))
OBJECTIVES.register(
    "drop-k-analytic",
    about="drop-k plus the noise that averaging removes, as ξ_approx (Algorithm 4)",
)(partial(Dropout, k=8, noise="analytic"))


@OBJECTIVES.register(
    "early-dropout",
    about="Dropout for the first `until` steps, and none after (Liu et al. 2023)",
)
class EarlyDropout(Dropout):
    """Dropout for the first ``until`` steps, and none after that (Liu et al. 2023).

    Args:
        until: the number of steps with dropout.
        loss: as for every objective.
        generator: as for every objective.
    """

    def __init__(
        self, until: int = 1000, *, loss: LossLike = None, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(loss=loss, generator=generator)
        self.until = check_int("until", until, least=0)

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield dropout, or the plain loss."""
        if self.steps < self.until:
            yield from super().evaluations(batch)
        else:
            yield self.plain_loss(batch)
