"""The paper's generalization bound for a linear layer under cross-entropy, term by term.

Let W have c rows (classes) and one column for each feature. On n training examples x_i, let
μ(W) = E‖Dℓ‖₂, ν(W) = E tr D²ℓ, κ = max‖x_i‖₂ and θ = log³(n·c)·κ². Let A ≥ ‖Wᵀ‖₂,₁ = Σ_classes ‖row of
W‖₂, and let the loss be cut off at B. Theorem 4.1 says that with probability 1 - δ

    E_P[ℓ] - 1.01 E_n[ℓ] ≲ (Aμ)^⅔(θB)^⅓/n^⅓ + A·sqrt(Bνθ)/√n + BA²θ/(n(log²(BA²θ/(νn)) + 1)) + ζ

with ζ = B(log(1/δ) + log log n)/n. Theorem B.1 says the same for any loss whose tail is exponential with
the constant τ (√2 for cross-entropy): the third term then has a factor τ², and τ⁴ in the logarithm. Both
theorems follow from

    min over β of G(β) = (1+1/α)(βμκ + ν(e^{τβκ} - τβκ - 1)/τ²) + (1+α)·B·A²·log³(n·c)/(β²n),  α = 100.

(Lemma B.2 prints βκ for the second τβκ, but its proof and the Taylor formula that it uses have τβκ.) The
constants in front of the terms are universal and unknown. So compare terms with each other and between
models, but not with a measured gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrop.diagnosis.measure.estimates import Estimate
from undrop.errors import OptionError, TargetError
from undrop.report import Table, as_json

TAU = math.sqrt(2.0)
"""τ of cross-entropy."""
_CHUNK_SIZE = 1 << 22  # the number of logits that are computed together
_MAX_EXPONENT = 700.0  # exp of a larger number overflows


class ExampleStatistics(NamedTuple):
    """The statistics of the loss over examples that the bound needs."""

    mu: float
    """The mean norm of the loss gradient p - 1_y."""
    nu: float
    """The mean trace of the loss Hessian, Σ p(1-p)."""
    loss: Estimate
    """The mean of min(ℓ, B), with its error over examples."""
    tail: float
    """The largest ‖D tr D²ℓ‖ / tr D²ℓ of all examples."""
    above: float
    """The share of examples with ℓ > B."""


@torch.no_grad()
def statistics(
    weight: Tensor, features: Tensor, labels: Tensor, *, truncation: float
) -> ExampleStatistics:
    """Compute μ(W), ν(W), the truncated loss and the largest tail, in chunks of rows."""
    sums = torch.zeros(5, dtype=torch.float64, device=features.device)
    tail = 0.0
    rows = max(1, _CHUNK_SIZE // len(weight))
    for x, y in zip(features.split(rows), labels.split(rows), strict=True):
        log_p = torch.log_softmax(x.double() @ weight.double().T, -1)
        p = log_p.exp()
        q = -torch.expm1(log_p)  # 1 - p, to full precision where p is near 1
        trace = (p * q).sum(-1)
        steep = p * (q - p)  # p(1 - 2p)
        slope = (steep - p * steep.sum(-1, keepdim=True)).norm(dim=-1)  # ‖D tr D²ℓ‖
        tail = max(tail, float((slope / trace.clamp_min(1e-300)).max()))
        target = y.unsqueeze(-1)
        loss = -log_p.gather(-1, target).squeeze(-1)
        gradient = p.scatter(-1, target, -q.gather(-1, target)).norm(dim=-1)
        cut = loss.clamp(max=truncation)
        parts = (gradient, trace, cut, cut.square(), (loss > truncation).double())
        sums += torch.stack([part.sum() for part in parts])
    n = len(labels)
    mu, nu, loss_mean, square, above = (sums / n).tolist()
    variance = max(square - loss_mean**2, 0.0)
    truncated = Estimate.of(loss_mean, math.sqrt(variance / max(n - 1, 1)), n - 1.0)
    return ExampleStatistics(mu, nu, truncated, tail, above)


class BoundCurve(NamedTuple):
    """The coefficients of G(β) = a·β + b·(e^{sβ} - sβ - 1) + c/β²."""

    a: float
    b: float
    c: float
    s: float

    def terms(self, beta: float) -> tuple[float, float, float]:
        """Return the three terms at a β."""
        t = self.s * beta
        # e^t - t - 1 loses its digits to cancellation if t is small; then use its series.
        grown = t * t * (0.5 + t * (1 / 6 + t / 24)) if t < 1e-3 else math.expm1(t) - t
        return self.a * beta, self.b * grown, self.c / beta**2

    def slope(self, beta: float) -> float:
        """Return G'(β), which increases with β."""
        return self.a + self.b * self.s * math.expm1(self.s * beta) - 2.0 * self.c / beta**3


def minimum_over_beta(curve: BoundCurve) -> tuple[float, float]:
    """Return the β that minimizes G, and G there, by bisection of G' in log β.

    If the loss has no gradient and no curvature, or every feature is 0 (s = a = 0), G approaches its
    infimum 0 as β → ∞; the result is then (∞, 0).
    """
    if curve.a == 0.0 and (curve.b == 0.0 or curve.s == 0.0):
        return math.inf, 0.0
    low, high = math.log(1e-80), math.log(_MAX_EXPONENT / curve.s)
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if curve.slope(math.exp(middle)) > 0.0 else (middle, high)
    beta = math.exp(0.5 * (low + high))
    return beta, sum(curve.terms(beta))


class Assumption(NamedTuple):
    """An assumption of the theorem."""

    what: str
    holds: bool | None
    """None if the data can't show whether it holds."""
    why: str


@dataclass(frozen=True)
class _BoundInputs:
    """The quantities in the theorems, other than statistics of the loss."""

    examples: int
    classes: int
    truncation: float
    delta: float
    alpha: float
    tau: float
    norm: float
    """A: ‖Wᵀ‖₂,₁, or ``norm_bound``."""
    kappa: float

    @property
    def _cubed_log(self) -> float:
        return math.log(self.examples * self.classes) ** 3

    @property
    def theta(self) -> float:
        """log³(n·c)·κ²."""
        return self._cubed_log * self.kappa**2

    @property
    def zeta(self) -> float:
        """B(log(1/δ) + log log n)/n."""
        n = self.examples
        return self.truncation * (math.log(1.0 / self.delta) + math.log(math.log(n))) / n

    def terms_of(self, mu: float, nu: float, tau2: float) -> dict[str, float]:
        """Return the terms of Theorem B.1 for τ² = ``tau2``; with 1, they are those of Theorem 4.1."""
        scale = self.truncation * self.norm**2 * self.theta / self.examples
        tail = 0.0
        if nu > 0.0 and scale > 0.0:
            tail = scale * tau2 / (math.log(scale * tau2**2 / nu) ** 2 + 1.0)
        return {
            "gradient": (scale * mu**2) ** (1.0 / 3.0),
            "hessian": math.sqrt(scale * nu),
            "tail": tail,
            "zeta": self.zeta,
        }

    def curve(self, mu: float, nu: float) -> BoundCurve:
        """Return G as a function of β."""
        factor = 1.0 + 1.0 / self.alpha
        return BoundCurve(
            a=factor * mu * self.kappa,
            b=factor * nu / self.tau**2,
            c=(1.0 + self.alpha) * self.truncation * self.norm**2 * self._cubed_log / self.examples,
            s=self.tau * self.kappa,
        )


@dataclass(frozen=True, repr=False)
class Bound(_BoundInputs):
    """Theorem 4.1 and Theorem B.1 for one linear layer; every unknown constant is taken as 1."""

    mu: float
    nu: float
    terms: dict[str, float]
    """The terms of Theorem 4.1: gradient (with μ), hessian (with ν), tail, zeta."""
    general_terms: dict[str, float]
    """The terms of Theorem B.1, with τ."""
    beta: float
    """The β that minimizes G."""
    g_minimum: float
    g_terms: dict[str, float]
    """The three terms of G at this β."""
    train_loss: Estimate
    test_loss: Estimate | None
    gap: Estimate | None
    """The measured E_test[ℓ] - 1.01·E_train[ℓ], of the truncated loss."""
    assumptions: list[Assumption]

    @property
    def total(self) -> float:
        """The sum of Theorem 4.1's terms."""
        return math.fsum(self.terms.values())

    def to_json(self) -> dict[str, Any]:
        """Return values for JSON."""
        values = {field.name: as_json(getattr(self, field.name)) for field in fields(self)}
        return {**values, "theta": self.theta, "zeta": self.zeta, "total": self.total}

    def rows(self) -> list[tuple[str, str]]:
        """Return every figure with its label."""
        numbers = {
            "loss cut off at B": self.truncation,
            "A = ‖Wᵀ‖₂,₁": self.norm,
            "θ = log³(nc)·max‖x‖²": self.theta,
            "μ(W), mean ‖Dℓ‖": self.mu,
            "ν(W), mean tr D²ℓ": self.nu,
            **{f"term: {name}": value for name, value in self.terms.items()},
            "sum of the terms (Theorem 4.1)": self.total,
            "sum with τ (Theorem B.1)": math.fsum(self.general_terms.values()),
            "β that minimizes G(β)": self.beta,
            "min over β of G(β)": self.g_minimum,
        }
        rows = [("examples n, classes c", f"{self.examples:,}, {self.classes:,}")]
        rows += [(label, f"{value:.4g}") for label, value in numbers.items()]
        rows.append(("training loss, cut off", str(self.train_loss)))
        if self.test_loss is not None:
            rows.append(("test loss, cut off", str(self.test_loss)))
            rows.append(("measured test - 1.01 · training", str(self.gap)))
        return rows

    def remarks(self) -> list[str]:
        """Return whether each assumption holds, and a sentence about the constants."""
        verdict = {True: "holds", False: "FAILS", None: "can't be checked"}
        return [*(f"{a.what}: {verdict[a.holds]}; {a.why}" for a in self.assumptions), CONSTANTS]

    def __repr__(self) -> str:
        table = Table(("figure", "value"), self.rows()).text()
        return "\n".join([table, *(f"- {remark}" for remark in self.remarks())])


CONSTANTS = (
    "The theorem's constants are universal and unknown, and taken as 1 here: compare terms and models, "
    "not the sum with a measured gap."
)


def bound(
    weight: Tensor,
    features: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    test: tuple[Tensor, Tensor] | None = None,
    truncation: float | None = None,
    delta: float = 0.05,
    alpha: float = 100.0,
    tau: float = TAU,
    norm_bound: float | None = None,
) -> Bound:
    """Evaluate the paper's bound for a linear layer: Theorem 4.1, Theorem B.1 and min G(β).

    Args:
        weight: W (classes, features), such as the last layer of a network.
        features: its inputs on the training examples (n, features).
        labels: the classes of these examples (n,).
        bias: the bias of the layer; it becomes one more column of W, with a feature of 1.
        test: features and labels of other examples, to measure the gap.
        truncation: B, at which the loss is cut off; by default log(classes), the loss of a uniform
            guess. It must not be chosen from the data.
        delta: δ.
        alpha: α of Lemma B.2; 100 gives the theorems' factor 1.01.
        tau: τ of Theorem B.1.
        norm_bound: A, chosen in advance; by default the norm itself.

    Raises:
        OptionError: if shapes do not match, or an option is out of range.
        TargetError: if labels are not class indices.
    """
    if bias is not None:
        weight, features, test = _with_bias(weight, bias, features, test)
    _check_data(weight, features, labels)
    cut = math.log(len(weight)) if truncation is None else truncation
    _check_options(cut, alpha, tau, delta)
    norm = float(weight.double().norm(dim=1).sum())
    if norm_bound is not None and norm_bound < norm * (1.0 - 1e-12):
        raise OptionError(f"norm_bound must be at least ‖Wᵀ‖₂,₁ = {norm:.6g}, got {norm_bound}.")
    bounded_norm = norm if norm_bound is None else float(norm_bound)
    kappa = float(features.double().norm(dim=1).max())
    test_loss = None
    if test is not None:
        _check_data(weight, *test)
        test_loss = statistics(weight, *test, truncation=cut).loss
    stats = statistics(weight, features, labels, truncation=cut)
    inputs = _BoundInputs(len(labels), len(weight), cut, delta, alpha, tau, bounded_norm, kappa)
    curve = inputs.curve(stats.mu, stats.nu)
    beta, g_minimum = minimum_over_beta(curve)
    g_terms = curve.terms(beta) if math.isfinite(beta) else (0.0, 0.0, 0.0)
    return Bound(
        **vars(inputs),
        mu=stats.mu,
        nu=stats.nu,
        terms=inputs.terms_of(stats.mu, stats.nu, 1.0),
        general_terms=inputs.terms_of(stats.mu, stats.nu, tau**2),
        beta=beta,
        g_minimum=g_minimum,
        g_terms=dict(zip(("gradient", "hessian", "complexity"), g_terms, strict=True)),
        train_loss=stats.loss,
        test_loss=test_loss,
        gap=None if test_loss is None else _gap(stats.loss, test_loss),
        assumptions=list(_assumptions(stats, inputs, norm_bound is not None)),
    )


def _check_options(truncation: float, alpha: float, tau: float, delta: float) -> None:
    for name, value in (("truncation", truncation), ("alpha", alpha), ("tau", tau)):
        if not 0.0 < value < math.inf:
            raise OptionError(f"{name} must be positive and finite, got {value}.")
    if not 0.0 < delta < 1.0:
        raise OptionError(f"delta must lie in (0, 1), got {delta}.")


def _assumptions(
    stats: ExampleStatistics, inputs: _BoundInputs, chosen_in_advance: bool
) -> Iterator[Assumption]:
    yield Assumption(
        "the loss is convex with an exponential tail",
        stats.tail <= inputs.tau * (1.0 + 1e-9),
        f"‖D tr D²ℓ‖ is at most {stats.tail:.4g} times tr D²ℓ on these examples, τ = {inputs.tau:.4g}",
    )
    yield Assumption(
        "A is chosen before W",
        True if chosen_in_advance else None,
        f"A = {inputs.norm:.4g} {'was given' if chosen_in_advance else 'is the norm of W itself'}",
    )
    yield Assumption(
        "the examples are independent draws, and the features do not depend on their labels",
        None,
        "features that a network learned on these very examples, or tokens of one text, are not",
    )
    yield Assumption(
        "the bound says more than ℓ ≤ B, with constants of 1",
        math.fsum(inputs.terms_of(stats.mu, stats.nu, 1.0).values()) < inputs.truncation,
        f"B = {inputs.truncation:.4g}; {stats.above:.1%} of the losses are above it and count as B",
    )


def _gap(train: Estimate, test: Estimate) -> Estimate:
    error = math.hypot(1.01 * (train.stderr or 0.0), test.stderr or 0.0)
    return Estimate.of(test.value - 1.01 * train.value, error)


def _with_bias(
    weight: Tensor, bias: Tensor, features: Tensor, test: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    def extended(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_ones(len(x), 1)], 1)

    if bias.shape != weight.shape[:1]:
        shape = tuple(bias.shape)
        raise OptionError(f"bias must have one number per class, {len(weight)}, got shape {shape}.")
    joined = torch.cat([weight, bias.unsqueeze(1).to(weight)], 1)
    return joined, extended(features), None if test is None else (extended(test[0]), test[1])


def _check_data(weight: Tensor, features: Tensor, labels: Tensor) -> None:
    if weight.dim() != 2 or features.dim() != 2 or weight.shape[1] != features.shape[1]:
        raise OptionError(
            "weight must be (classes, features) and features (n, features), got "
            f"{tuple(weight.shape)} and {tuple(features.shape)}."
        )
    if labels.shape != features.shape[:1] or labels.is_floating_point():
        raise TargetError(
            f"labels must be {len(features)} class indices of an integer type, got {labels.dtype} of "
            f"shape {tuple(labels.shape)}."
        )
    if len(labels) < 3 or len(weight) < 2:
        raise OptionError(
            f"the bound needs at least 3 examples and 2 classes, got {len(labels)} and {len(weight)}."
        )
    if bool((labels < 0).any() | (labels >= len(weight)).any()):
        raise TargetError(f"labels must lie in 0 … {len(weight) - 1}.")
    if not bool(torch.isfinite(weight).all() & torch.isfinite(features).all()):
        raise OptionError("weight and features must be finite, but contain NaN or infinity.")
