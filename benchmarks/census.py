"""Count the random draws of a training pass in every model family of four libraries.

    python benchmarks/census.py run                 # resumes; results/census.jsonl
    python benchmarks/census.py run --only pyg peft
    python benchmarks/census.py page                # writes docs/census.md

A family is a model file of timm, a model type of Transformers, a method of PEFT, or a layer, model or
dropping function of PyG. Each is built at a tiny size without a download and runs in train mode with
all its drop probabilities at 0.1. Every draw of the pass must belong to a site, or be named in the
second table of ``undrop.sites``. Two checks look for missed draws:

- by place: each module that draws in the plain pass has as many sites and named draws;
- by effect: two passes with different seeds of torch, NumPy and Python return the same numbers, if the
  noise is off and the named draws are the same in both passes. Constant parameters are made random
  first, because a factor of 0 would hide a draw.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from census_families import LIBRARIES, Built, NotBuilt, run
from census_page import write_page
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import undrop
from undrop.errors import NoDropoutError, UndropError
from undrop.intercept import (
    Interception,
    Sites,
    call,
    no_noise,
    preserve_model,
    tensors_in,
)
from undrop.intercept.random_values import Uniform
from undrop.intercept.unaccounted import RandomOps, Unaccounted, record_python_draws
from undrop.intercept.wrappers import module_paths

RESULTS = Path(__file__).parents[1] / "results" / "census.jsonl"
SECONDS = 20
MEMORY = 8 << 30


def seed(number: int) -> None:
    """Seed torch, NumPy and Python."""
    torch.manual_seed(number)
    np.random.seed(number)  # models draw from it
    random.seed(number)


def randomize_constants(model: nn.Module) -> None:
    """Make constant parameters random, because a factor of 0 hides the effect of a draw."""
    with torch.no_grad():
        for value in model.parameters():
            if value.is_floating_point() and value.numel() > 1:
                low, high = value.aminmax()
                if not bool((high - low).abs() > 1e-4):
                    value.nan_to_num_().add_(0.1 * torch.randn_like(value))


def plain_draws(built: Built) -> list[Unaccounted]:
    """Return the random draws of a plain training pass, by module."""
    names = module_paths(built.model)
    seed(0)
    with (
        preserve_model(built.model),
        record_python_draws(names) as python_draws,
        RandomOps(names) as ops,
    ):
        run(built)
    return [*ops.unaccounted, *python_draws]


class WithDropout(nn.Module):
    """A model with a further dropout that has no effect: ``undrop.sites`` needs at least one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.extra = model, nn.Dropout(0.5)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        self.extra(torch.ones(1))
        return self.model(*args, **kwargs)


def find_sites(built: Built) -> Sites:
    """Return the sites of a model, and its draws that belong to no site; a model may have no sites."""
    try:
        return undrop.sites(built.model, built.inputs)
    except NoDropoutError:
        found = undrop.sites(WithDropout(built.model), built.inputs)
        named = [
            u._replace(module=u.module.removeprefix("model").lstrip(".")) for u in found.unaccounted
        ]
        return Sites([], named)


def unread_draws(built: Built) -> Counter[str]:
    """Return the number of draws that no code reads, by the path of the module."""
    read: set[str] = set()
    draw = Uniform.materialize

    def materialize(value: Uniform) -> Tensor:
        read.add(value.key)
        return draw(value)

    with preserve_model(built.model), patch.object(Uniform, "materialize", materialize):
        seed(0)
        with torch.no_grad(), Interception(built.model, no_noise) as mode:
            run(built)
    keys = [
        k
        for k, drops in mode.mask_draws.items()
        if drops is not None and k not in mode.mask_origins
    ]
    return Counter(key.rpartition("random")[0].rstrip(".") for key in keys if key not in read)


def missed_draws(
    draws: list[Unaccounted], found: Sites, model: nn.Module, unread: Counter[str]
) -> dict[str, int]:
    """Return the number of draws that are neither sites nor named, by the path of the module."""
    modules = set(module_paths(model).values())
    known = Counter(unread)
    for site in found:
        path = site.name.partition("#")[0]
        while path not in modules:
            path = path.rpartition(".")[0]
        known[path] += 1
    for other in found.unaccounted:
        known[other.module] += other.calls
    drawn: Counter[str] = Counter()
    for draw in draws:
        drawn[draw.module] += draw.calls
    return {path: n - known[path] for path, n in drawn.items() if n > known[path]}


class RepeatedDraws(TorchDispatchMode):
    """Gives the named operations the same random numbers in every pass; other operations stay random."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation."""
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in func.tags or name not in self._names:
            return func(*args, **(kwargs or {}))
        state = torch.get_rng_state()
        torch.manual_seed(1)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.set_rng_state(state)


def pass_without_noise(built: Built, number: int, named: set[str]) -> list[Tensor]:
    """Return the output of a pass without noise for a seed; the named draws are equal for every seed."""
    mode = Interception(built.model, no_noise)
    mode.batch = next((len(x) for x in tensors_in(built.inputs) if x.dim()), None)
    seed(number)
    if "Python's random" in named:
        random.seed(1)
    if "NumPy's random" in named:
        np.random.seed(1)
    with preserve_model(built.model), torch.no_grad(), RepeatedDraws(named), mode:
        output = call(built.model, built.inputs)
    return [x.detach().clone() for x in tensors_in(output) if isinstance(x, Tensor)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether two outputs are equal up to rounding; NaN equals NaN."""
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=1e-5, atol=1e-6, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def examine(library: str, family: str) -> dict[str, Any]:
    """Build a family, count its draws, and return its row of the census."""
    seed(0)
    try:
        built = LIBRARIES[library][1](family)
    except Exception as error:
        known = str(error) if isinstance(error, NotBuilt) else f"{type(error).__name__}: {error}"
        return {"status": "not built", "why": " ".join(known.split())[:90]}
    randomize_constants(built.model)
    row: dict[str, Any] = {"status": "built", "model": type(built.model).__name__}
    draws = plain_draws(built)
    row["draws"] = sum(d.calls for d in draws)
    try:
        found = find_sites(built)
    except UndropError as error:
        return {**row, "status": "refused", "why": str(error)[:200]}
    row |= {"sites": len(found), "kinds": dict(Counter(s.kind for s in found))}
    row["named"] = sum(u.calls for u in found.unaccounted)
    row["who"] = sorted({f"{u.function} at {file_of_call(u.where)}" for u in found.unaccounted})
    unread = unread_draws(built)
    row["missed"] = missed_draws(draws, found, built.model, unread)
    row["draws"] -= unread.total()
    seeds = {1: pass_without_noise(built, 1, set())}
    named = {u.function for u in found.unaccounted}
    seeds[2], again = pass_without_noise(built, 2, named), pass_without_noise(built, 3, named)
    row["finite"] = all(bool(x.isfinite().all()) for x in again if x.is_floating_point())
    row["silent"] = not equal(seeds[2], again) or (not named and not equal(seeds[1], again))
    return row


def file_of_call(where: str) -> str:
    """Return the file of a call, without the folders above its package."""
    file = where.rpartition(":")[0]
    return file.rpartition("site-packages/")[2] if "site-packages/" in file else Path(file).name


def examine_in_child(library: str, family: str) -> dict[str, Any]:
    """Examine a family in a separate process, with limits on processor time and memory."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        try:
            row = examine(library, family)
        except BaseException as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
            row = {"status": "failed", "why": " ".join(why.split())[:240]}
        os.write(write, json.dumps(row).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        return dict(json.loads(text))
    slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    return {"status": "not built", "why": "time limit" if slow else "out of memory or killed"}


def read_rows() -> dict[tuple[str, str], dict[str, Any]]:
    """Read the results so far; if a family has several lines, the last one counts."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    found = [json.loads(line) for line in lines]
    return {(row["library"], row["family"]): row for row in found}


def run_census(
    libraries: list[str], again: list[str], part: tuple[int, int], minutes: float
) -> None:
    """Examine the families that have no result yet."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    end = time.monotonic() + 60 * minutes
    todo = [(lib, family) for lib in libraries for family in LIBRARIES[lib][0]()]
    done = {key for key, row in read_rows().items() if row["status"] not in again}
    todo = [key for i, key in enumerate(todo) if key not in done and i % part[1] == part[0]]
    for i, (library, family) in enumerate(todo):
        if time.monotonic() > end:
            break
        row = {"library": library, "family": family, **examine_in_child(library, family)}
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = {k: v for k, v in row.items() if k not in ("library", "family", "kinds")}
        print(f"{i + 1}/{len(todo)} {library} {family}: {shown}", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--only", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--again", nargs="+", default=[], help="statuses to examine again")
    parser.add_argument("--part", nargs=2, type=int, default=(0, 1), help="k n: every n-th, from k")
    parser.add_argument("--minutes", type=float, default=600.0)
    options = parser.parse_args()
    if options.what == "run":
        run_census(options.only, options.again, tuple(options.part), options.minutes)
    else:
        write_page(list(read_rows().values()), {lib: len(LIBRARIES[lib][0]()) for lib in LIBRARIES})


if __name__ == "__main__":
    main()
