"""Find every dropout of a model by running it, and leave the model unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from undrop.errors import NoDropoutError, OutputError, UndropError
from undrop.intercept.hand_masks import draw_findings
from undrop.intercept.interception import Interception, SiteAction, no_noise
from undrop.intercept.mask_proof import disproven_masks
from undrop.intercept.model_call import (
    GradRequired,
    call,
    call_and_record_requirements,
    logits_of,
    map_tensors,
    tensors_in,
)
from undrop.intercept.random_values import NotAMask
from undrop.intercept.running_statistics import keep_buffers
from undrop.intercept.site import Site, Sites
from undrop.intercept.unaccounted import Unaccounted, find_unaccounted
from undrop.intercept.wrappers import bare, is_sharded, module_paths, uncompiled
from undrop.rng_snapshot import RngSnapshot, seed_current
from undrop.torch_compat import force_eager

_MAX_PASSES = 48  # of the search for sites behind random branches
_SEARCH_LOCK = RLock()  # a search holds it while it changes the mode of a model


def sites(model: nn.Module, inputs: Any) -> Sites:
    """List every dropout that a forward pass of the model uses.

    The model runs in train mode with its dropout switched off, then with gradients to find out which
    noise reaches the output, and in eval mode to find out which sites are active there. A model that
    makes masks by hand runs a few more times, to prove that they are masks. A model that draws other
    random numbers runs 4 to 50 more times, to find out where it draws them and which sites it sometimes
    skips. The mode of the model, its buffers and the random state are restored. Dropouts with p = 0 are
    not sites.

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
    """List the sites like ``sites``; with ``acts``, find out which noise reaches the output."""
    model = uncompiled(model)
    with force_eager(), _SEARCH_LOCK, preserve_model(model):
        if not model.training:
            model.train()
        found, unaccounted = _search(model, inputs)
        acting = sites_that_act(model, inputs) if acts else {}
        _put_into_eval_mode(model)
        active_in_eval = {site.name for site in _run(model, inputs).sites}
    if not found:
        raise NoDropoutError(_no_dropout_message(model, unaccounted))
    return Sites(found, unaccounted).flagged(active_in_eval, acting)


def _put_into_eval_mode(model: nn.Module) -> None:
    """Put a model into eval mode, but not its quantized layers: some pack their weights in eval mode."""
    with suppress(NotImplementedError):  # an exported program has a single mode
        model.eval()
    for module in model.modules():
        if not all(p.is_floating_point() for p in module.parameters(recurse=False)):
            module.training = True


def follow_masks(model: nn.Module, inputs: Any) -> None:
    """Find out which random draws of a model are masks, for later passes."""
    with _SEARCH_LOCK, preserve_model(model):
        _proven_pass(model, inputs)


def _search(model: nn.Module, inputs: Any) -> tuple[list[Site], list[Unaccounted]]:
    """Return the sites of a model, and the random numbers that belong to no site."""
    first_found = _proven_pass(model, inputs).sites
    seed_current(0)
    before = RngSnapshot(model)
    found = _run(model, inputs).sites
    if first_found and not found:
        raise NoDropoutError(
            f"{type(model).__name__} reaches {first_found[0].name!r} in its first pass only, so it "
            "keeps a result from one call to the next: compute it in every call of forward."
        )
    changed = before.changed_generators()
    if not changed:
        return found, []
    before.restore()
    unaccounted = find_unaccounted(module_paths(model), lambda: _run(model, inputs), changed)
    return [*found, *_hidden_sites(model, inputs, found)], unaccounted


def _hidden_sites(model: nn.Module, inputs: Any, found: list[Site]) -> list[Site]:
    """Run passes with noise, and return the sites that random branches skip at times, such as experts.

    The search ends after several passes in a row without a new site. Each new site raises this number.
    """
    names = {site.name for site in found}
    hidden: list[Site] = []
    passes_without = 0
    for number in range(1, _MAX_PASSES):
        reached = _proven_pass(model, inputs, number, _drop_at_random).sites
        new = [site for site in reached if site.name not in names]
        hidden += new
        names.update(site.name for site in new)
        passes_without = 0 if new else passes_without + 1
        if passes_without >= 3 + 3 * len(hidden):
            break
    return hidden


def _drop_at_random(site: Site, h: Tensor) -> Tensor:
    """The site action that drops entries of h, so that a pass takes other branches."""
    return h * (torch.rand_like(h) >= site.p) / (1.0 - min(site.p, 0.9))


def _proven_pass(
    model: nn.Module, inputs: Any, seed: int = 0, action: SiteAction = no_noise
) -> Interception:
    """Run the model until every random draw is either proven to be a mask or known not to be one."""
    seed_current(seed)  # so the branches do not depend on the user's seed
    findings = draw_findings(model)
    while True:
        mode = _run(model, inputs, action)
        if findings.learn(mode.mask_uses or {}, mode.mask_origins):
            continue  # run again, with the p that the uses imply
        try:
            disproven = disproven_masks(model, inputs, mode.mask_origins)
        except NotAMask:
            continue
        if not disproven:
            return mode
        for key in disproven:
            findings.rule_out(key, mode.mask_origins[key])


def _run(model: nn.Module, inputs: Any, action: SiteAction = no_noise) -> Interception:
    """Run the model, by default without noise; again if a draw is not a mask or gradients are needed."""
    while True:
        mode = Interception(model, action)
        mode.mask_uses = {}
        mode.batch_size = next((len(x) for x in tensors_in(inputs) if x.dim()), None)
        try:
            with mode:
                call_and_record_requirements(model, inputs)
            return mode
        except (NotAMask, GradRequired):
            continue
        except Exception as error:
            keys = [key for key, drops in mode.mask_draws.items() if drops is not None]
            if isinstance(error, UndropError) or not keys:
                raise
            # The code that failed probably needs ordinary numbers where it got the latest mask.
            draw_findings(model).rule_out(keys[-1])


def has_idle_dropout(model: nn.Module, inputs: Any) -> bool:
    """Return whether a pass uses dropout with p = 0, and none with p > 0."""
    with preserve_model(model):
        mode = _run(model, inputs)
    return mode.has_idle_dropout and not mode.sites


def in_training(model: nn.Module) -> bool:
    """Return whether the model is in train mode, after waiting for a search in another thread."""
    if model.training:
        return True
    with _SEARCH_LOCK:
        return model.training


def _no_dropout_message(model: nn.Module, unaccounted: list[Unaccounted]) -> str:
    idle = [
        f"{name or type(module).__name__!r} (p = {module.p:g})"
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd)
    ]
    if unaccounted:
        named = "; ".join(str(draw) for draw in unaccounted[:3])
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
    """Restore the mode of every module, all buffers and, with ``draws``, the random state."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with keep_buffers(model), RngSnapshot(model) if draws else nullcontext():
            yield
    finally:
        for module, training in modes:
            module.training = training


def sites_that_act(model: nn.Module, inputs: Any) -> dict[str, bool]:
    """Return for each site, by name, whether its u is not 0: whether vᵀF depends on its noise.

    v is random. If the model can't be differentiated, the result is empty.
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
            output = call(model, map_tensors(_copy, inputs))
        if not leaves:
            return {}
        outputs = _differentiable_outputs(output)
        v = [torch.randn_like(f) for f in outputs]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), v, allow_unused=True)
    except (RuntimeError, UndropError):  # no memory, no derivative, reentrant checkpointing
        return {}
    acts = (g is not None and bool(g.any()) for g in gradients)
    return dict(zip(leaves, acts, strict=True))


def _copy(x: Tensor) -> Tensor:
    """Return a copy: in-place dropout would make the caller's tensor a part of the graph."""
    return x.detach().clone().requires_grad_(x.requires_grad)


def _differentiable_outputs(output: Any) -> list[Tensor]:
    """Return the logits if the output has any, else all tensors in it that require gradients."""
    try:
        tensors = [logits_of(output)]
    except OutputError:
        tensors = list(tensors_in(output))
    return [x for x in tensors if x.is_floating_point() and x.requires_grad]


def adapter_hint(model: nn.Module) -> str | None:
    """Return advice on adapters without active dropout; None for a model without adapters."""
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
