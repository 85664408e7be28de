"""The noise η of a dropout, and its shape: the entries of an activation that share one η.

Every dropout turns an activation (or a weight) ``h`` into ``h ⊙ (1 + ε·σ·η)`` with
``σ = sqrt(q / (1 - q))`` and η of zero mean and unit variance. Dropout itself is ε = 1, with η = -1/σ
with probability q and η = σ otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from undrop.errors import OptionError


def sigma(q: float) -> float:
    """Return the noise scale of dropout with probability q, σ = sqrt(q / (1 - q))."""
    return float((q / (1.0 - q)) ** 0.5)


def mask_shape(shape: Sequence[int], shared: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of η: that of the activation, with size 1 along the dimensions in ``shared``."""
    dims = {d % len(shape) for d in shared} if shape else set()
    return tuple(1 if d in dims else n for d, n in enumerate(shape))


def _draw_dropout(out: Tensor, q: float, scale: float, generator: torch.Generator | None) -> Tensor:
    """Fill ``out`` with scale·η of dropout.

    At scale σ, a dropped entry is exactly -1, so 1 + σ·η is exactly 0 in every precision.
    """
    s = sigma(q)
    drops = torch.rand(out.shape, device=out.device, generator=generator) < q
    wide = torch.promote_types(out.dtype, torch.float32)  # half precision is rounded at the end
    scaled_sigma = float(torch.tensor(s, dtype=wide).mul_(scale))
    return out.fill_(scaled_sigma).masked_fill_(drops, -scale / s)


_MANY_ENTRIES = 1 << 14  # the number of entries from which drawing 32 signs at a time is faster
_SIGN_BIT, _ONE = -(2**31), 0x3F80_0000  # the sign bit of a float32, and the bits of 1.0


def _draw_signs(out: Tensor, q: float, scale: float, generator: torch.Generator | None) -> Tensor:
    """Draw ±scale from the bits of random words, 20 times as fast as a Bernoulli draw per entry."""
    n = out.numel()
    if n < _MANY_ENTRIES:
        return out.random_(0, 2, generator=generator).mul_(2.0 * scale).sub_(scale)
    words = out.new_empty((-(-n // 32), 1), dtype=torch.int32)
    words.random_(-(2**31), 2**31, generator=generator)
    shifts = torch.arange(32, dtype=torch.int32, device=out.device)
    signs = (words << shifts).bitwise_and_(_SIGN_BIT).bitwise_or_(_ONE).view(torch.float32)
    return signs.flatten()[:n].view(out.shape).to(out.dtype).mul_(scale)


NOISES: dict[str, Callable[[Tensor, float, float, torch.Generator | None], Tensor]] = {
    "dropout": _draw_dropout,
    "sign": _draw_signs,
}
"""The distributions of η by name. Each function returns scale·η, where η has mean 0 and variance 1.

Its first argument is a tensor that it may overwrite, with the shape, dtype and device of the result.
"""


def draw_noise(
    noise: str,
    shape: Sequence[int],
    q: float,
    *,
    like: Tensor,
    scale: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw ``scale``·η of a shape, with the dtype and device of ``like``."""
    if noise not in NOISES:
        raise OptionError(f"there is no noise {noise!r}: use one of {', '.join(NOISES)}.")
    return NOISES[noise](like.new_empty(tuple(shape)), q, scale, generator)


def structured_dropout(
    h: Tensor,
    p: float,
    *,
    shared: Sequence[int] = (),
    training: bool = True,
    kind: str = "dropout",
    mask: str = "independent",
    label: str | None = None,
) -> Tensor:
    """Dropout whose mask is broadcast along the dimensions in ``shared``.

    All of undrop's own dropout modules call this function, and undrop intercepts it: a call is a site
    of that ``kind`` and ``mask``.

    Args:
        h: the activation or weight.
        p: the drop probability.
        shared: dimensions along which entries share one mask entry, e.g. time for a locked mask.
        training: whether to drop at all, as in ``F.dropout``.
        kind: the site's kind in ``undrop.sites``.
        mask: the name of the site's mask structure in ``undrop.sites``.
        label: the last part of the site's name, after the path of the calling module.
    """
    if has_torch_function_unary(h):
        options: Any = {"kind": kind, "mask": mask, "label": label}
        result: Tensor = handle_torch_function(
            structured_dropout, (h,), h, p, shared=shared, training=training, **options
        )
        return result
    if not training or p == 0.0:
        return h
    return h * F.dropout(h.new_ones(mask_shape(h.shape, shared)), p)
