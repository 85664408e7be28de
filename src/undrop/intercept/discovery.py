"""Find every dropout of a model by running it, and leave the model unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from undrop.errors import NoDropoutError, OutputError, UndropError
from undrop.intercept.hand_masks import known_draws
from undrop.intercept.interception import Interception, SiteAction, no_noise
from undrop.intercept.mask_proof import disproven
from undrop.intercept.model_call import (
    NeedsGraph,
    call,
    call_noting_needs,
    logits_of,
    map_tensors,
    tensors_in,
)
from undrop.intercept.random_values import NotAMask
from undrop.intercept.running_statistics import keep_buffers
from undrop.intercept.site import Site, Sites
from undrop.intercept.unaccounted import Unaccounted, unaccounted
from undrop.intercept.wrappers import bare, is_sharded, module_paths, uncompiled
from undrop.rng_snapshot import RngSnapshot, seed_current
from undrop.torch_compat import force_eager

_MOST_PASSES = 48  # to look for sites behind random branches
_SEARCHING = RLock()  # held while a search changes the mode of a model


def sites(model: nn.Module, inputs: Any) -> Sites:
    """List every dropout that a forward pass of the model uses.

    The model runs in train mode with its dropout switched off, once more with gradients to see which
    noise reaches the output, and in eval mode to see which sites are active there. A model that makes
    masks by hand runs a few more times, to prove that they are masks. A model that draws other random
    numbers runs 4 to 50 more times, to find where it draws them and which sites it sometimes skips. Its
    mode, its buffers and the random state are restored. Dropouts with p = 0 are not sites.

    Args:
        model: any module.
        inputs: a tensor, a tuple (positional) or a dict (keyword arguments).

    Returns:
        A sequence of records with ``name``, ``kind``, ``p``, ``mask``, ``shape``, ``active_in_eval`` and
        ``acts``; it prints as a table. ``unaccounted`` lists the random numbers that belong to no site.

    Raises:
        NoDropoutError: if the pass uses no active dropout.
    """
    return find_sites(model, inputs, acts=True)


def find_sites(model: nn.Module, inputs: Any, *, acts: bool = False) -> Sites:
    """List the sites as ``sites`` does; with ``acts``, also find out which noise reaches the output."""
    model = uncompiled(model)
    with force_eager(), _SEARCHING, preserve_model(model):
        if not model.training:
            model.train()
        mode, others = _search(model, inputs)
        reached = sites_that_act(model, inputs) if acts else {}
        _put_into_eval_mode(model)
        active = {site.name for site in _run(model, inputs).sites}
    if not mode.sites:
        raise NoDropoutError(_nothing_found(model, others))
    return Sites(mode.sites, others).flagged(active, reached)


def _put_into_eval_mode(model: nn.Module) -> None:
    """Put a model into eval mode, but not its quantized layers: some pack their weights there."""
    with suppress(NotImplementedError):  # an exported program has one mode only
        model.eval()
    for module in model.modules():
        if not all(p.is_floating_point() for p in module.parameters(recurse=False)):
            module.training = True


def follow_masks(model: nn.Module, inputs: Any) -> None:
    """Find out which random draws of a model are masks, for later passes."""
    with _SEARCHING, preserve_model(model):
        _proven_pass(model, inputs)


def _search(model: nn.Module, inputs: Any) -> tuple[Interception, list[Unaccounted]]:
    """Run the model without noise, and list the random numbers that belong to no site."""
    first = _proven_pass(model, inputs)
    seed_current(0)
    before = RngSnapshot(model)
    mode = _run(model, inputs)
    if first.sites and not mode.sites:
        raise NoDropoutError(
            f"{type(model).__name__} reaches {first.sites[0].name!r} in its first pass only, so it "
            "keeps a result from one call to the next: compute it in every call of forward."
        )
    moved = before.changed_generators()
    if not moved:
        return mode, []
    before.restore()
    others = unaccounted(module_paths(model), lambda: _run(model, inputs), moved)
    _add_hidden_sites(model, inputs, mode)
    return mode, others


def _add_hidden_sites(model: nn.Module, inputs: Any, mode: Interception) -> None:
    """Run passes with noise, and add the sites that random branches had skipped, such as experts.

    The search ends after some passes in a row without a new site; each site found makes it longer.
    """
    names = {site.name for site in mode.sites}
    hidden = quiet = 0
    for number in range(1, _MOST_PASSES):
        found = _proven_pass(model, inputs, number, _dropped).sites
        new = [site for site in found if site.name not in names]
        mode.sites += new
        names |= {site.name for site in new}
        hidden, quiet = hidden + len(new), 0 if new else quiet + 1
        if quiet >= 3 + 3 * hidden:
            break


def _dropped(site: Site, h: Tensor) -> Tensor:
    """Drop entries of h at random, so that a pass takes other branches."""
    return h * (torch.rand_like(h) >= site.p) / (1.0 - min(site.p, 0.9))


def _proven_pass(
    model: nn.Module, inputs: Any, number: int = 0, action: SiteAction = no_noise
) -> Interception:
    """Run the model until every random draw is either proven to be a mask or known not to be one."""
    seed_current(number)  # so the branches do not depend on the user's seed
    known = known_draws(model)
    while True:
        mode = _run(model, inputs, action)
        if known.learn(mode.uses or {}, mode.mask_origins):
            continue  # run again, with the p that the uses imply
        try:
            bad = disproven(model, inputs, mode.mask_origins)
        except NotAMask:
            continue
        if not bad:
            return mode
        for key in bad:
            known.rule_out(key, mode.mask_origins[key])


def _run(model: nn.Module, inputs: Any, action: SiteAction = no_noise) -> Interception:
    """Run the model, by default without noise, until no draw is mistaken for a mask."""
    while True:
        mode = Interception(model, action)
        mode.uses = {}
        mode.batch = next((len(x) for x in tensors_in(inputs) if x.dim()), None)
        try:
            with mode:
                call_noting_needs(model, inputs)
            return mode
        except (NotAMask, NeedsGraph):
            continue
        except Exception as error:
            followed = [key for key, mask in mode.mask_draws.items() if mask is not None]
            if isinstance(error, UndropError) or not followed:
                raise
            # Perhaps code that needs a real tensor got a mask: draw real numbers there.
            known_draws(model).not_masks.add(followed[-1])


def has_idle_dropout(model: nn.Module, inputs: Any) -> bool:
    """Return whether a pass uses dropout with p = 0, and none with p > 0."""
    with preserve_model(model):
        mode = _run(model, inputs)
    return mode.has_idle_dropout and not mode.sites


def in_training(model: nn.Module) -> bool:
    """Return whether the model is in train mode, after waiting for a search in another thread."""
    if model.training:
        return True
    with _SEARCHING:
        return model.training


def _nothing_found(model: nn.Module, others: list[Unaccounted]) -> str:
    idle = [
        f"{name or type(module).__name__!r} (p = {module.p:g})"
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd)
    ]
    if others:
        named = "; ".join(str(each) for each in others[:3])
        hint = (
            f"its random numbers are not multiplicative noise that undrop can follow ({named}): add "
            "nn.Dropout, or pass the function that drops to undrop.register_site"
        )
    elif not idle:
        hint = adapter_hint(model) or "add one, e.g. nn.Dropout(0.1)"
    else:
        hint = (
            f"it has {', '.join(idle[:3])}, but none was active in the pass: check p and its mode, and "
            "that forward keeps no result of an earlier call"
        )
    return f"no active dropout runs in a forward pass of {type(model).__name__}: {hint}."


@contextmanager
def preserve_model(model: nn.Module, *, draws: bool = True) -> Iterator[None]:
    """Restore the mode of every module, all buffers and, if the model ``draws``, the random state."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with keep_buffers(model), RngSnapshot(model) if draws else nullcontext():
            yield
    finally:
        for module, training in modes:
            module.training = training


def sites_that_act(model: nn.Module, inputs: Any) -> dict[str, bool]:
    """Return for each site, by name, whether its u is not 0: whether vᵀF depends on its noise.

    v is random. If the model can't be differentiated here, the result is empty: nothing is known.
    """
    if is_sharded(model):
        return {}
    model = bare(model)  # a pass without its backward would confuse DistributedDataParallel
    leaves: dict[str, Tensor] = {}

    def action(site: Site, h: Tensor) -> Tensor:
        z = torch.zeros(site.mask_shape, dtype=h.dtype, device=h.device, requires_grad=True)
        leaves[site.name] = z
        return h * (1.0 + z)

    seed_current(0)
    try:
        with torch.enable_grad(), Interception(model, action):
            output = call(model, map_tensors(_copied, inputs))
        if not leaves:
            return {}
        outputs = _outputs(output)
        gradients = torch.autograd.grad(
            outputs,
            list(leaves.values()),
            [torch.randn_like(f) for f in outputs],
            allow_unused=True,
        )
    except (RuntimeError, UndropError):  # no memory, no derivative, reentrant checkpointing
        return {}
    found = zip(leaves, gradients, strict=True)
    return {name: g is not None and bool(g.any()) for name, g in found}


def _copied(x: Tensor) -> Tensor:
    """Return a copy: in-place dropout would make the caller's tensor a part of the graph."""
    return x.detach().clone().requires_grad_(x.requires_grad)


def _outputs(output: Any) -> list[Tensor]:
    """Return the tensor that a loss receives, or all tensors if there is none."""
    try:
        found = [logits_of(output)]
    except OutputError:
        found = list(tensors_in(output))
    return [f for f in found if f.is_floating_point() and f.requires_grad]


def adapter_hint(model: nn.Module) -> str | None:
    """Return what to do about adapters without active dropout; None for a model without adapters."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not configs:
        return None
    config = next(iter(configs.values()))
    kind = getattr(getattr(config, "peft_type", None), "value", type(config).__name__)
    fields = {name: p for name, p in vars(config).items() if name.endswith("dropout")}
    if not fields:
        return f"adapters of the kind {kind} have no dropout; train with undrop.NoRegularization()"
    settings = ", ".join(f"{name} = {p:g}" for name, p in fields.items())
    return f"its adapters have {settings}; set it in {type(config).__name__}"
