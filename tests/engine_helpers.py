"""How tests evaluate an engine: with given noise, over a design of signs, and with flat gradients."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import undrop
from device import new_generator
from problems import Problem
from undrop.engines import Draw, Engine, Evaluation, Request
from undrop.intercept import Batch, Selection, Site
from undrop.losses import Coefficients

BOTH = Coefficients(1.0, 1.0, 1.0)
LOSS, EXPLICIT, IMPLICIT = (Coefficients(*row) for row in torch.eye(3).tolist())


class Fixed(Draw):
    """A draw with a given η: each site takes its entries from a row, in the order of the sites."""

    def __init__(self, row: Tensor, mask: str = "as-declared") -> None:
        super().__init__("sign", mask, Selection(), lambda device: torch.Generator(device))
        self.row = row
        self.taken = 0
        self.known: dict[str, Tensor] = {}

    def given(self, site: Site) -> Tensor:
        if site.name not in self.known:
            shape = torch.Size(self.shape(site))
            self.known[site.name] = self.row[self.taken :][: shape.numel()].view(shape)
            self.taken += shape.numel()
        return self.known[site.name]

    def sigma_eta(self, site: Site, h: Tensor) -> Tensor:
        return self.given(site).to(h) * self.scale(site)

    def eta(self, place, scale):
        return self.given(place.site).to(place.dtype) * scale

    def eta_of_rows(self, sites, widths, rows, scale):
        parts = []
        for s in sites:
            eta = self.given(s.site).to(s.dtype)
            if eta.shape[s.dim] == 1 < rows.layout.batch:
                eta = eta.expand(
                    *s.site.mask_shape[: s.dim], rows.layout.batch, *eta.shape[s.dim + 1 :]
                )
            eta = eta.movedim(s.dim, 0)
            if s.repeats > 1:
                sizes = (s.repeats, -1) if s.time_major else (-1, s.repeats)
                eta = eta.unflatten(0, sizes)
                eta = eta.transpose(0, 1) if s.time_major else eta
            parts.append(rows.noisy(eta, 0).flatten(1))
        return torch.cat(parts, 1) * scale


def seeded(seed: int, mask: str = "as-declared", noise: str = "sign") -> Draw:
    """A random draw that is the same for the same seed."""
    generator = new_generator(seed)
    return Draw(noise, mask, Selection(), lambda device: generator)


def design(problem: Problem, mask: str = "as-declared") -> Iterator[Fixed]:
    """Signs over which the mean of anything quadratic in η is its expectation, exactly.

    They are the rows of a Hadamard matrix: any two of its columns are orthogonal, so over the rows
    η has zero mean and unit covariance.
    """
    shape = seeded(0, mask).shape
    sites = undrop.sites(problem.model, problem.inputs)
    columns = sum(torch.Size(shape(site)).numel() for site in sites)
    return (Fixed(row, mask) for row in hadamard(columns))


def random_signs(problem: Problem, seed: int, mask: str = "as-declared") -> Fixed:
    """A draw of random signs, the same for every engine."""
    columns = next(design(problem, mask)).row.numel()
    generator = new_generator(seed)
    return Fixed(torch.randn(columns, generator=generator, dtype=torch.float64).sign(), mask)


def hadamard(columns: int) -> Tensor:
    """±1 in that many columns, pairwise orthogonal and of zero sum."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] <= columns:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h[:, 1 : columns + 1]


def evaluate(
    engine: Engine,
    problem: Problem,
    draw: Draw,
    coefficients: Coefficients = BOTH,
    form: str = "hessian",
    **options: float,
) -> Evaluation:
    """One evaluation of a problem by an engine."""
    return engine.evaluate(
        Request(
            batch=Batch(problem.model, problem.inputs, problem.targets, loss=problem.loss),
            draw=draw,
            coefficients=coefficients,
            form=form,
            **options,
        )
    )


def gradient(total: Tensor, model: nn.Module) -> Tensor:
    """∂total/∂W as one flat vector, zero where a parameter has no part in it."""
    parameters = list(model.parameters())
    grads = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in grads])


def relative(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖."""
    return float((a - b).norm() / b.norm())


def assert_mean(draws: Tensor, expected: Tensor, errors: float = 4.0) -> None:
    """Check that the mean over the first dimension is the expected one, within some standard errors.

    For vectors the deviation is measured along each coordinate; entries that do not vary must agree.
    """
    standard_error = draws.std(0) / len(draws) ** 0.5
    off = (draws.mean(0) - expected).abs()
    assert bool((off <= errors * standard_error + 1e-12).all()), (off / standard_error).max()
