"""Measure what dropout does while a model trains, at little cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from undrop.autodiff import gradients
from undrop.diagnosis.measure.gradients import inner_product
from undrop.engines import Draw, Request, ZeroLeaves, as_engine
from undrop.errors import EngineError, NoDropoutError
from undrop.intercept import Batch, Interception, Selection, keep_statistics, logits_of, uncompiled
from undrop.losses import Coefficients, GivenLoss, Loss, as_loss
from undrop.options import check_int


class Watcher:
    """Computes ½E[uᵀHu], each site's share of it, and the norm of ξ_approx, every ``interval`` steps.

    ½E[uᵀHu] and the shares are computed by Algorithm 3 of the paper: one pass and one gradient, with
    labels drawn from the model, give the expectation over masks for all sites. The norm is that of one
    draw of ξ_approx = ∇(∂ℓ/∂ε). An observation costs three to five plain steps, so at the default
    interval training takes 1 to 3 % longer (``benchmarks/watch.py`` measures it). The watcher does not
    change training: it leaves no gradients, and draws nothing from the generators of training. Its
    random numbers depend only on the seed and the step, so a resumed run observes the same figures.

    Args:
        loss: as for an objective.
        interval: steps between observations.
        implicit: whether to observe the norm of ξ_approx, which is the larger part of the cost.
        seed: seeds the labels and the noise.
    """

    def __init__(
        self,
        *,
        loss: Loss | Callable[[Tensor, Any], Tensor] | None = None,
        interval: int = 200,
        implicit: bool = True,
        seed: int = 0,
    ) -> None:
        self.loss = as_loss(loss)
        self.interval = check_int("interval", interval)
        self.implicit = implicit
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._engine = as_engine("auto")

    def observe(
        self,
        step: int,
        model: nn.Module,
        inputs: Any,
        targets: Any,
        *,
        loss: GivenLoss | None = None,
    ) -> dict[str, float] | None:
        """Return the figures if ``step`` is a multiple of the interval, else None.

        Args:
            step: the number of the step.
            model: the model, in train mode.
            inputs: as for an objective.
            targets: as for an objective.
            loss: the loss of this observation; None uses the watcher's.

        Returns:
            ``half_quadratic`` (½E[uᵀHu]), ``xi_norm`` (‖ξ_approx‖) and ``share/SITE`` of each site.
        """
        if step % self.interval:
            return None
        model, loss = uncompiled(model), self.loss if loss is None else loss
        batch = loss.prepare(model, inputs, targets)
        self._generators, self._step = {}, step
        with keep_statistics(model), torch.enable_grad():
            figures = self._explicit(batch)
            if self.implicit:
                figures["xi_norm"] = self._noise_norm(batch)
        return figures

    def _explicit(self, batch: Batch) -> dict[str, float]:
        loss, targets = batch.loss, batch.targets
        zeros = ZeroLeaves(self._draw("dropout"))
        with Interception(batch.model, zeros):
            logits = logits_of(batch.forward())
        if not zeros.leaves:
            raise NoDropoutError(
                f"{type(batch.model).__name__} has no active dropout to watch: add one, or call "
                "model.train()."
            )
        try:
            sampled = loss.sampled(logits, targets, "hessian", self._generator(logits.device))
        except EngineError:  # the loss defines no distribution of labels: use one draw of u
            return {"half_quadratic": float(self._term(batch, quadratic=0.5).detach())}
        leaf_gradients = gradients(sampled, zeros.leaves)
        count = float(loss.count(logits, targets))
        by_site = {
            site.name: 0.5 * site.sigma**2 * float(gradient.double().square().sum()) / count
            for site, gradient in zip(zeros.sites, leaf_gradients, strict=True)
        }
        total = math.fsum(by_site.values())
        shares = {f"share/{name}": value / total for name, value in by_site.items() if total}
        return {"half_quadratic": total, **shares}

    def _noise_norm(self, batch: Batch) -> float:
        parameters = [p for p in batch.model.parameters() if p.requires_grad]
        noise = gradients(self._term(batch, directional=1.0), parameters)
        return math.sqrt(inner_product(noise, noise))

    def _term(self, batch: Batch, quadratic: float = 0.0, directional: float = 0.0) -> Tensor:
        """Return quadratic · uᵀHu + directional · ∂ℓ/∂ε for one draw of u."""
        coefficients = Coefficients(0.0, quadratic, directional)
        request = Request(batch=batch, draw=self._draw("sign"), coefficients=coefficients)
        return self._engine.evaluate(request).total

    def _draw(self, noise: str) -> Draw:
        return Draw(noise, "as-declared", Selection(), self._generator)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            generator = torch.Generator(device).manual_seed(self._seed + self._step)
            self._generators[device] = generator
        return self._generators[device]
