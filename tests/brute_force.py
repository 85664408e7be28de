"""The small nets once more, as plain functions of their parameters and of z, with noise as 1 + z.

Written without undrop: full Jacobians in z and full Hessians of the loss by ``torch.func``. The
exact engine must give the same results.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, hessian, jacrev

Parameters = dict[str, Tensor]
Noise = tuple[Tensor, ...]


@dataclass(frozen=True)
class Net:
    """A function of (parameters, z, x), and the q and the shape of each z."""

    function: Callable[[Parameters, Noise, Tensor], Tensor]
    q: tuple[float, ...]
    declared: tuple[tuple[int, ...], ...]
    independent: tuple[tuple[int, ...], ...]

    def zeros(self, mask: str) -> Noise:
        shapes = self.declared if mask == "as-declared" else self.independent
        return tuple(torch.zeros(s, dtype=torch.float64) for s in shapes)

    def variances(self, mask: str) -> Tensor:
        """σ² = q/(1-q) of every entry of every z, in order."""
        pairs = zip(self.q, self.zeros(mask), strict=True)
        return torch.cat([torch.full_like(z.flatten(), q / (1 - q)) for q, z in pairs])


def _mlp(w: Parameters, z: Noise, x: Tensor) -> Tensor:
    h = torch.tanh(x @ w["0.weight"].T + w["0.bias"]) * (1 + z[0])
    h = torch.tanh(h @ w["3.weight"].T + w["3.bias"]) * (1 + z[1])
    return h @ w["6.weight"].T + w["6.bias"]


def _cnn(w: Parameters, z: Noise, x: Tensor) -> Tensor:
    h = torch.tanh(F.conv2d(x, w["0.weight"], w["0.bias"])) * (1 + z[0])
    h = torch.tanh(F.conv2d(h, w["3.weight"], w["3.bias"])) * (1 + z[1])
    return h.flatten(1) @ w["7.weight"].T + w["7.bias"]


def _lstm(w: Parameters, z: Noise, x: Tensor) -> Tensor:
    recurrent = w["rnn.module.weight_hh_l0"] * (1 + z[1])
    bias = w["rnn.module.bias_ih_l0"] + w["rnn.module.bias_hh_l0"]
    h = c = x.new_zeros(x.shape[1], 3)
    outputs = []
    for step in x * (1 + z[0]):
        a = step @ w["rnn.module.weight_ih_l0"].T + h @ recurrent.T + bias
        i, f, g, o = a[:, :3], a[:, 3:6], a[:, 6:9], a[:, 9:]
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs) * (1 + z[2]) @ w["decoder.weight"].T + w["decoder.bias"]


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def _transformer(w: Parameters, z: Noise, x: Tensor) -> Tensor:
    b, t, d = x.shape
    qkv = x @ w["0.self_attn.in_proj_weight"].T + w["0.self_attn.in_proj_bias"]
    q, k, v = (y.view(b, t, 2, d // 2).transpose(1, 2) for y in qkv.split(d, -1))
    e = (q @ k.transpose(-2, -1) / math.sqrt(d // 2)).exp()
    p = e / e.sum(-1, keepdim=True) * (1 + z[0])
    a = (p @ v).transpose(1, 2).reshape(b, t, d)
    a = a @ w["0.self_attn.out_proj.weight"].T + w["0.self_attn.out_proj.bias"]
    h = _norm(x + a * (1 + z[1]), w["0.norm1.weight"], w["0.norm1.bias"])
    f = torch.relu(h @ w["0.linear1.weight"].T + w["0.linear1.bias"]) * (1 + z[2])
    f = (f @ w["0.linear2.weight"].T + w["0.linear2.bias"]) * (1 + z[3])
    return _norm(h + f, w["0.norm2.weight"], w["0.norm2.bias"]) @ w["1.weight"].T + w["1.bias"]


NETS = {
    "mlp": Net(_mlp, (0.3, 0.2), ((3, 4), (3, 3)), ((3, 4), (3, 3))),
    "cnn": Net(_cnn, (0.4, 0.25), ((2, 2, 1, 1), (2, 3, 1, 1)), ((2, 2, 3, 3), (2, 3, 2, 2))),
    "lstm": Net(
        _lstm,
        (0.3, 0.4, 0.2),
        ((1, 2, 2), (12, 3), (1, 2, 3)),
        ((3, 2, 2), (12, 3), (3, 2, 3)),
    ),
    "transformer": Net(
        _transformer,
        (0.2,) * 4,
        ((2, 2, 3, 3), (2, 3, 4), (2, 3, 5), (2, 3, 4)),
        ((2, 2, 3, 3), (2, 3, 4), (2, 3, 5), (2, 3, 4)),
    ),
}


def _cross_entropy(output: Tensor, target: Tensor, ignored: int, smoothing: float) -> Tensor:
    rows, target = output.reshape(-1, output.shape[-1]), target.reshape(-1)
    kept = target != ignored
    logp = rows - rows.exp().sum(-1, keepdim=True).log()
    picked = logp.gather(1, (target * kept).unsqueeze(1)).squeeze(1)
    each = -(1 - smoothing) * picked - smoothing * logp.mean(-1)
    return (each * kept).sum() / kept.sum()


def _bce(output: Tensor, target: Tensor) -> Tensor:
    return -(target * F.logsigmoid(output) + (1 - target) * F.logsigmoid(-output)).mean()


def _softened(output: Tensor, target: Tensor) -> Tensor:
    return torch.log1p(((output - target) ** 2).sum(-1)).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": lambda f, y: _cross_entropy(f, y, -100, 0.0),
    "smoothed": lambda f, y: _cross_entropy(f, y, 1, 0.2),
    "bce": _bce,
    "mse": lambda f, y: ((f - y) ** 2).sum() / f.numel(),
    "generic": _softened,
}
"""The means over terms."""


def terms(loss: str, output: Tensor, target: Tensor) -> Tensor:
    """Which entries of the output belong to a term of the mean, and N: the number of terms."""
    rows = torch.ones(output.shape[:-1], dtype=torch.bool)
    if loss in ("cross-entropy", "smoothed"):
        rows = target != (-100 if loss == "cross-entropy" else 1)
    count = output.numel() if loss in ("bce", "mse") else int(rows.sum())
    return rows.unsqueeze(-1).expand_as(output), count


def explicit(
    net: Net, w: Parameters, x: Tensor, y: Tensor, *, loss: str, form: str, mask: str
) -> Tensor:
    """Σ_j σ_j² J_jᵀ M J_j / N, with M the loss's Hessian, the identity, or its gradient's square."""
    z = net.zeros(mask)
    variances = net.variances(mask)
    output = net.function(w, z, x)
    jacobians = jacrev(lambda z: net.function(w, z, x))(z)
    j = torch.cat([part.reshape(output.numel(), -1) for part in jacobians], 1)
    kept, n = terms(loss, output, y)
    if form == "identity":
        return (j * kept.reshape(-1, 1)).square().sum(0) @ variances / n
    mean = LOSSES[loss]
    if form == "loss-jacobian":
        g = grad(lambda f: mean(f, y))(output).reshape(-1)
        return n * (g @ j).square() @ variances
    h = hessian(lambda f: mean(f.view_as(output), y))(output.reshape(-1))
    return torch.einsum("oj,op,pj->j", j, h, j) @ variances


def noise_directions(net: Net, w: Parameters, x: Tensor, y: Tensor, loss: str, mask: str) -> Tensor:
    """σ_j·∂²ℓ/∂W∂z_j, one row for each entry of every z: ξ_approx is Σ_j η_j times them."""

    def value(w: Parameters, z: Noise) -> Tensor:
        return LOSSES[loss](net.function(w, z, x), y)

    mixed = jacrev(grad(value, argnums=1), argnums=0)(w, net.zeros(mask))
    z = net.zeros(mask)
    rows = [
        torch.cat([m.reshape(zi.numel(), -1) for m in of_site.values()], 1)
        for of_site, zi in zip(mixed, z, strict=True)
    ]
    return torch.cat(rows) * net.variances(mask).sqrt().unsqueeze(1)


def curvature(net: Net, w: Parameters, x: Tensor, y: Tensor, loss: str, mask: str) -> Tensor:
    """Σ_j σ_j² ∂²ℓ/∂z_j²: the whole second derivative of the loss in ε, in expectation."""
    z = net.zeros(mask)

    def value(flat: Tensor) -> Tensor:
        parts = flat.split([p.numel() for p in z])
        shaped = tuple(p.view_as(zi) for p, zi in zip(parts, z, strict=True))
        return LOSSES[loss](net.function(w, shaped, x), y)

    return hessian(value)(torch.cat([zi.flatten() for zi in z])).diagonal() @ net.variances(mask)
