"""A penalty on the Jacobian ∂F/∂h of the output with respect to one activation h."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from undrop.engines import Evaluation, WeightedParts
from undrop.engines.antithetic import midpoint
from undrop.errors import OptionError
from undrop.intercept import (
    Batch,
    Interception,
    RngSnapshot,
    Site,
    copied_buffers,
    keep_buffers,
    logits_of,
    map_tensors,
)
from undrop.losses import Coefficients
from undrop.noise import draw_noise
from undrop.objectives.base import OBJECTIVES, LossLike, Objective
from undrop.options import check_not_negative


@OBJECTIVES.register(
    "jacobian",
    about="The loss plus ½·weight·‖∂F/∂h‖² at one activation h, without dropout (Hoffman et al. 2019)",
)
class Jacobian(Objective):
    """ℓ + ½·weight·‖J‖², J = ∂F/∂h at one activation h, without dropout (Hoffman, Roberts & Yaida 2019).

    E‖J η‖² = ‖J‖² for η of random signs, and J η ≈ [F(h + δη) - F(h - δη)]/2δ: two plain passes.
    h is the activation at a dropout site. It is not the input, because token indices have no derivative;
    in a language model the first site is usually at the token embeddings.

    Args:
        weight: λ ≥ 0.
        site: the name of the site; None uses the first site.
        step: δ, relative to the root mean square of h.
        loss: as for every objective.
        generator: as for every objective.
    """

    def __init__(
        self,
        weight: float = 1e-4,
        *,
        site: str | None = None,
        step: float = 0.05,
        loss: LossLike = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(loss=loss, generator=generator)
        self.weight = check_not_negative("weight", weight)
        if not 0.0 < step <= 1.0:
            raise OptionError(f"step must lie in (0, 1], got {step}.")
        self.site = site
        self.step = step

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield one evaluation of two passes."""
        names = self.sites(batch.model, batch.inputs).names
        if not names:
            yield self.plain_loss(batch)
            return
        if self.site is not None and self.site not in names:
            raise OptionError(f"there is no site {self.site!r}: the sites are {', '.join(names)}.")
        shift = _Shift(self.site or names[0], self.step, self.generators)
        rng = RngSnapshot.after_seeding(batch.model, self.generators)
        buffers = copied_buffers(batch.model)
        with Interception(batch.model, partial(shift, 1.0)):
            output = batch.forward()
        if rng.changed_generators():  # both passes draw the same random numbers
            rng.restore()
        with keep_buffers(batch.model, buffers), Interception(batch.model, partial(shift, -1.0)):
            other = batch.forward()
        plus, minus = logits_of(output), logits_of(other)
        batch.loss.check(plus, batch.targets)
        u = (plus - minus) / (2.0 * shift.distance)
        c = Coefficients(loss=1.0, quadratic=0.5 * self.weight, directional=0.0)
        total, parts = batch.loss.combined(0.5 * (plus + minus), u, batch.targets, "identity", c)
        middle = partial(map_tensors, midpoint, output, other)
        yield Evaluation(total, WeightedParts(c, parts), middle)


class _Shift:
    """Turns h into h + sign·δη at one site; with a fixed sign it is a site action.

    The sign is an argument, because a checkpointed pass runs again after the other pass has run.
    """

    def __init__(
        self, name: str, step: float, generator: Callable[[torch.device], torch.Generator]
    ) -> None:
        self.name = name
        self.step = step
        self.generator = generator
        self.distance = 0.0
        self._eta: Tensor | None = None

    def __call__(self, sign: float, site: Site, h: Tensor) -> Tensor:
        if site.name != self.name:
            return h
        if self._eta is None:
            like = h.detach()
            self.distance = self.step * float(like.square().mean().sqrt()) or self.step
            self._eta = draw_noise(
                "sign", tuple(h.shape), site.p, like=like, generator=self.generator(h.device)
            )
        return torch.add(h, self._eta, alpha=sign * self.distance)
