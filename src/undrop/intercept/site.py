"""A site, the table of a model's sites, and the selection of sites by name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, overload

from undrop.errors import OptionError, SiteSelectionError, UnsupportedDropoutError
from undrop.intercept.unaccounted import Unaccounted
from undrop.noise import sigma
from undrop.options import as_float
from undrop.report import Table, terminal_width, wrap
from undrop.report.html import fragment
from undrop.report.plain import as_frame


@dataclass(frozen=True)
class Site:
    """A place where a model multiplies an activation (or a weight) h by 1 + ε·σ·η."""

    name: str
    """The path of the module; later calls of the same module get a suffix such as ``#2``."""
    kind: str
    """Such as dropout, dropout2d, attention, recurrent, locked, weight, embedding, mask or drop-path."""
    p: float
    """The drop probability q."""
    mask: str
    """Which entries share one η, in words."""
    shape: tuple[int, ...]
    """The shape of h."""
    mask_shape: tuple[int, ...]
    """The shape of η; it broadcasts to h."""

    active_in_eval: bool = False
    """Whether the site drops in eval mode too (a common mistake with ``dropout_p``)."""
    acts: bool | None = field(default=None, compare=False)
    """Whether the noise reaches the output, so that u ≠ 0; None if this is not known. Weights of 0 block
    the noise, as in a new LoRA adapter."""

    @property
    def sigma(self) -> float:
        """σ = sqrt(q / (1 - q)).

        Raises:
            UnsupportedDropoutError: if not 0 < p < 1.
        """
        if not 0.0 < self.p < 1.0:
            raise UnsupportedDropoutError(
                f"the dropout at {self.name!r} has p = {self.p:g}: undrop needs 0 < p < 1, since σ = "
                "sqrt(p / (1 - p)) must be finite."
            )
        return sigma(self.p)


class Sites(Sequence[Site]):
    """The noise sites of a model, in the order in which a forward pass uses them.

    Args:
        sites: the sites.
        unaccounted: random numbers of the pass that belong to no site.
    """

    def __init__(self, sites: Iterable[Site], unaccounted: Iterable[Unaccounted] = ()) -> None:
        self._sites = tuple(sites)
        self.unaccounted = tuple(unaccounted)

    @overload
    def __getitem__(self, index: int) -> Site: ...
    @overload
    def __getitem__(self, index: slice) -> Sites: ...
    def __getitem__(self, index: int | slice) -> Site | Sites:
        """The site at a position, or a part of the table."""
        chosen = self._sites[index]
        return chosen if isinstance(chosen, Site) else Sites(chosen, self.unaccounted)

    def __len__(self) -> int:
        return len(self._sites)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sites) and self._sites == other._sites

    def __hash__(self) -> int:
        return hash(self._sites)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple(site.name for site in self)

    def to_json(self) -> list[dict[str, Any]]:
        """One dictionary per site, for programs."""
        return [asdict(site) for site in self]

    def table(self) -> Table:
        """A table with a row for each site."""
        headers = ["name", "kind", "p", "mask", "shape", "in eval"]
        shows_acts = any(site.acts is False for site in self)
        rows = []
        for site in self:
            shape = "×".join(map(str, site.shape))
            in_eval = "ACTIVE" if site.active_in_eval else "off"
            row = [site.name, site.kind, f"{site.p:.3g}", site.mask, shape, in_eval]
            rows.append([*row, _ACTS[site.acts]] if shows_acts else row)
        return Table([*headers, "acts"] if shows_acts else headers, rows, numbers={"p"})

    def unaccounted_table(self) -> Table:
        """A table with a row for each kind of random numbers that belong to no site."""
        draws = self.unaccounted
        rows = [(d.module or "(model)", d.function, str(d.calls), d.where) for d in draws]
        return Table(("module", "draws with", "calls", "where"), rows, numbers={"calls"})

    def __repr__(self) -> str:
        """The table as text, and a second one for the random numbers that belong to no site."""
        text = self.table().text()
        if self.unaccounted:
            title = "\n".join(wrap(UNACCOUNTED, terminal_width()))
            text += f"\n\n{title}\n{self.unaccounted_table().text()}"
        return text

    def _repr_html_(self) -> str:
        """The tables in a notebook."""
        html = self.table().html()
        if self.unaccounted:
            html += f"<p>{UNACCOUNTED}</p>" + self.unaccounted_table().html()
        return fragment(html)

    def to_frame(self) -> Any:
        """The sites as a pandas DataFrame, one row each.

        Raises:
            UndropError: if pandas is not installed.
        """
        return as_frame(self.to_json(), self.names)

    def flagged(self, active: Iterable[str], acts: Mapping[str, bool]) -> Sites:
        """The same sites, each marked as active in eval mode or not, and as acting or not."""
        names = set(active)
        sites = (
            replace(site, active_in_eval=site.name in names, acts=acts.get(site.name))
            for site in self
        )
        return Sites(sites, self.unaccounted)


UNACCOUNTED = "Random numbers that belong to no site; undrop does not change them:"
_ACTS = {True: "yes", False: "NO, u = 0", None: "?"}


class Selection:
    """Which sites carry noise, and how much: a weight on the variance σ² for each pattern of names.

    Args:
        patterns: None for every site; a pattern or a list of patterns (``"encoder.*"``) for only the
            sites that match; a mapping from pattern to weight. The last pattern that matches decides.
    """

    def __init__(self, patterns: str | Iterable[str] | Mapping[str, float] | None = None) -> None:
        if patterns is None:
            patterns = {"*": 1.0}
        elif isinstance(patterns, str):
            patterns = {patterns: 1.0}
        elif not isinstance(patterns, Mapping):
            patterns = dict.fromkeys(_as_strings(patterns), 1.0)
        self.patterns: dict[str, float] = {p: as_float(patterns[p]) for p in _as_strings(patterns)}
        self._weights: dict[str, float] = {}
        self._sigmas: dict[str, float] = {}
        bad = [p for p, w in self.patterns.items() if not 0.0 <= w < float("inf")]
        if bad:
            weights = {p: patterns[p] for p in bad}
            raise OptionError(f"site weights must be finite and not negative, got {weights}.")

    @classmethod
    def with_sigma(cls, sigmas: Mapping[str, float]) -> Selection:
        """The sites of these names, with these σ instead of the model's.

        Names are taken literally, not as patterns.
        """
        selection = cls({_literal_pattern(name): 1.0 for name in sigmas})
        selection._sigmas = dict(sigmas)
        return selection

    def sigma(self, site: Site) -> float:
        """σ of the noise at a site; 0 if the site is not chosen."""
        if site.name in self._sigmas:
            return self._sigmas[site.name]
        return site.sigma * math.sqrt(self.weight(site.name))

    def weight(self, name: str) -> float:
        """The factor of σ² at the site of that name; 0 if the site is not chosen."""
        if name not in self._weights:  # cached: every step needs it for every site
            matching = (w for p, w in reversed(self.patterns.items()) if fnmatchcase(name, p))
            self._weights[name] = next(matching, 0.0)
        return self._weights[name]

    def check(self, names: Sequence[str]) -> None:
        """Raise an error if a pattern matches no name, or every site has weight 0.

        Raises:
            SiteSelectionError: naming the pattern and the nearest site.
        """
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise SiteSelectionError(
                    f"no dropout site matches {pattern!r}{hint}: the sites are {', '.join(names)}."
                )
        if not any(self.weight(name) > 0.0 for name in names):
            raise SiteSelectionError("every dropout site has weight 0: choose at least one.")


def _literal_pattern(name: str) -> str:
    """Return a pattern that matches only this name, even if the name contains ``*``, ``?`` or ``[``."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _as_strings(patterns: Iterable[str]) -> list[str]:
    """Return the patterns as a list; raise an error if they are not strings."""
    words = list(patterns) if isinstance(patterns, Iterable) else None
    if words is None or not all(isinstance(word, str) for word in words):
        got = type(patterns).__name__ if words is None else repr(patterns)
        raise OptionError(
            "sites must be a name pattern, a list of them, or a mapping from patterns to weights, got "
            f"{got}."
        )
    return words
