"""How tests ask an engine: for noise of their own, over a design of signs, and for flat gradients."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import undrop
from problems import Problem
from undrop.engines import Draw, Engine, Evaluation, Request, Weights
from undrop.intercept import Selection, Site

BOTH = Weights(1.0, 1.0, 1.0)
LOSS, EXPLICIT, IMPLICIT = (Weights(*row) for row in torch.eye(3).tolist())


class Fixed(Draw):
    """A draw whose η is given: each site takes its entries off a row, in the order they are met."""

    def __init__(self, row: Tensor, mask: str = "as-declared") -> None:
        super().__init__("sign", mask, Selection(), lambda device: torch.Generator(device))
        self.row = row
        self.taken = 0
        self.eta: dict[str, Tensor] = {}

    def scaled(self, site: Site, h: Tensor) -> Tensor:
        if site.name not in self.eta:
            shape = torch.Size(self.shape(site))
            self.eta[site.name] = self.row[self.taken :][: shape.numel()].view(shape)
            self.taken += shape.numel()
        return self.eta[site.name].to(h) * self.scale(site)


def seeded(seed: int, mask: str = "as-declared", noise: str = "sign") -> Draw:
    """A random draw that is the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
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
    weights: Weights = BOTH,
    form: str = "hessian",
    **options: float,
) -> Evaluation:
    """One evaluation of a problem by an engine."""
    return engine.evaluate(
        Request(
            problem.model,
            problem.inputs,
            problem.targets,
            problem.loss,
            form,
            weights,
            draw,
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
    """The mean over the first dimension is the expected one, within so many standard errors.

    For vectors the deviation is measured along each coordinate; entries that do not vary must agree.
    """
    standard_error = draws.std(0) / len(draws) ** 0.5
    off = (draws.mean(0) - expected).abs()
    assert bool((off <= errors * standard_error + 1e-12).all()), (off / standard_error).max()
