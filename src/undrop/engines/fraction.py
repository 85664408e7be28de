"""Carrying the tangent for a part of the batch only: cost 1 + ρ instead of 2."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from undrop.engines.base import Request
from undrop.errors import EngineError
from undrop.intercept import map_tensors, tensors_in
from undrop.losses import Derivatives, Generic, Loss

__all__ = ["Carried"]


class Carried:
    """The examples of a batch, those that carry the tangent first.

    A random share ρ of the examples is moved to the front; ``inputs`` and ``targets`` are the batch in
    that order, and ``restore`` undoes it on the output. A tensor has the batch where its size is the
    batch's: in dimension ``batch_dim``, or else in the only dimension of that size (as the state of a
    recurrent network that otherwise takes the batch first).
    """

    def __init__(self, request: Request) -> None:
        self.dim = request.batch_dim
        self.inputs, self.targets = request.inputs, request.targets
        self._back: Tensor | None = None
        self.batch = self.rows = self._spare = 0
        if request.fraction < 1.0:
            target = _batched_target(request)
            self.batch = target.shape[self.dim]
            self.rows = max(1, round(request.fraction * self.batch))
            if self.rows < self.batch:
                self._shuffle(request, target.device)

    def _shuffle(self, request: Request, device: torch.device) -> None:
        _refuse_batch_norm(request.model)
        _refuse_sums(request.loss)
        self._check_inputs()
        order = torch.randperm(self.batch, generator=request.draw.generator(device), device=device)
        self._back = torch.argsort(order)
        self.inputs = self._permuted(request.inputs, order)
        self.targets = self._permuted(request.targets, order)
        self._spare = int(2 * self.rows == self.batch)

    @property
    def whole(self) -> bool:
        """Whether every example carries the tangent."""
        return self._back is None

    def first(self, tree: Any) -> Any:
        """The carrying examples of every tensor that has the batch."""
        return self._narrowed(tree, 0, self.rows)

    def beside(self, tree: Any) -> Any:
        """The other examples of every tensor that has the batch, for a pass of their own.

        Where they are as many as the carrying ones, one of these is before them: the shapes of two
        passes of different size tell for certain where an output has its batch.
        """
        start = self.rows - self._spare
        return self._narrowed(tree, start, self.batch - start)

    def restore(self, output: Any) -> Any:
        """The model's output with its examples in the batch's own order."""
        return output if self._back is None else self._permuted(output, self._back)

    def joined(self, first: Any, beside: Any) -> Any:
        """One output, in the batch's own order, from those of the ``first`` examples and ``beside``."""
        sizes = self._sizes

        def join(a: Tensor, b: Tensor) -> Tensor:
            pairs = list(zip(a.shape, b.shape, strict=True))
            apart = [d for d, (n, m) in enumerate(pairs) if n != m]
            if self._back is None or [pairs[d] for d in apart] != [sizes]:
                return a
            (where,) = apart
            return torch.cat((a, self._others(b, where)), where).index_select(where, self._back)

        return map_tensors(join, first, beside)

    @property
    def _sizes(self) -> tuple[int, int]:
        """How many examples are ``first`` and how many ``beside``: never as many."""
        return self.rows, self.batch - self.rows + self._spare

    def _others(self, x: Tensor, where: int) -> Tensor:
        """Of the examples ``beside`` those that carry no tangent."""
        return x.narrow(where, self._spare, self.batch - self.rows)

    def combined(
        self, request: Request, logits: Tensor, u: Tensor, beside: Tensor
    ) -> tuple[Tensor, Derivatives]:
        """The weighted total: ℓ over the whole batch, the regularizers over the carrying examples.

        With n of the batch's N terms among the r carrying examples of B and ρ = r/B, the explicit part
        is n/(ρN) times the mean over those terms, the implicit one n/(sqrt(ρ)N) times (so where every
        example has as many terms: the mean, and sqrt(ρ) times it). The explicit part keeps its mean.
        The implicit one keeps its covariance where noise is independent between examples. Of noise
        that they share (DropConnect) it keeps the terms of each example with itself and shrinks those
        between two examples by (r-1)/(B-1); so does the explicit part in the form "loss-jacobian".

        Args:
            request: what was asked.
            logits: the output for the carrying examples.
            u: its tangent.
            beside: the output for the examples ``beside`` them.

        Raises:
            EngineError: if the output has no batch.
        """
        self._check_output(logits, beside)
        others = self._others(beside, self.dim)
        mine = self.first(self.targets)
        theirs = self._narrowed(self.targets, self.rows, self.batch - self.rows)
        n, m = (self._share(request, *part) for part in ((logits, mine), (others, theirs)))
        rho = self.rows / self.batch
        c = request.weights
        scale = (n, n / rho, n / math.sqrt(rho))
        weights = (c.loss * scale[0], c.explicit * scale[1], c.implicit * scale[2])
        total, parts = request.loss.combined(logits, u, mine, request.form, weights)
        loss = request.loss.value(others, theirs)
        total = total + c.loss * m * loss
        scaled = Derivatives(*(k * part for k, part in zip(scale, parts, strict=True)))
        return total, scaled._replace(loss=scaled.loss + m * loss.detach())

    def _share(self, request: Request, logits: Tensor, targets: Tensor) -> float:
        """The share of the loss's terms that are among the given ones."""
        shape = list(logits.shape)
        shape[self.dim] = self.batch
        whole = logits.new_empty(()).expand(shape)  # its shape is all that a count looks at
        count = request.loss.count
        return float(count(logits, targets) / count(whole, self.targets))

    def _check_inputs(self) -> None:
        """Were the targets alone put in another order, they would belong to other inputs."""
        tensors = list(tensors_in(self.inputs))
        if all(self._where(x) is None for x in tensors):
            raise EngineError(
                f"fraction < 1 needs inputs with the batch of the targets, {self.batch} in dimension "
                f"{self.dim}, got {', '.join(str(tuple(x.shape)) for x in tensors)}: set batch_dim, or "
                "use fraction=1."
            )

    def _check_output(self, logits: Tensor, beside: Tensor) -> None:
        sizes = tuple(x.shape[self.dim] if x.dim() > self.dim else None for x in (logits, beside))
        if sizes != self._sizes:
            raise EngineError(
                f"fraction < 1 needs an output with the batch of {self.batch} in dimension {self.dim}, "
                f"got shape {tuple(logits.shape)} for {self.rows} of it: set batch_dim, or use "
                "fraction=1."
            )

    def _where(self, x: Tensor) -> int | None:
        """The dimension in which a tensor has the batch; None where it has none."""
        if x.dim() > self.dim and x.shape[self.dim] == self.batch:
            return self.dim
        found = [d for d, n in enumerate(x.shape) if n == self.batch]
        return found[0] if len(found) == 1 else None

    def _permuted(self, tree: Any, order: Tensor) -> Any:
        def permute(x: Tensor) -> Tensor:
            where = self._where(x)
            return x if where is None else x.index_select(where, order)

        return map_tensors(permute, tree)

    def _narrowed(self, tree: Any, start: int, length: int) -> Any:
        def narrow(x: Tensor) -> Tensor:
            where = self._where(x)
            return x if where is None else x.narrow(where, start, length)

        return map_tensors(narrow, tree)


def _batched_target(request: Request) -> Tensor:
    """The first tensor of the targets, whose batch is that of them all."""
    target = next(tensors_in(request.targets), None)
    if target is None or target.dim() <= request.batch_dim:
        raise EngineError(
            f"fraction < 1 needs targets with a batch in dimension {request.batch_dim}: set "
            "batch_dim to the dimension that holds it."
        )
    return target


def _refuse_batch_norm(model: nn.Module) -> None:
    """Batch norm mixes the examples: those that carry no tangent would take part of it away."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise EngineError(
                f"fraction < 1 is not for models with batch norm in train mode, such as {name!r}: its "
                "statistics are those of the whole batch, so use fraction=1."
            )


def _refuse_sums(loss: Loss) -> None:
    """Parts of a batch are put together as parts of a mean."""
    function = loss.function if isinstance(loss, Generic) else None
    if getattr(function, "reduction", "mean") != "mean":
        raise EngineError(
            f"fraction < 1 needs a loss that is a mean: give {type(function).__name__} "
            "reduction='mean', or use fraction=1."
        )
