"""Why a model with adapters of PEFT may have no dropout. Nothing here imports PEFT."""

from __future__ import annotations

from torch import nn


def adapter_hint(model: nn.Module) -> str | None:
    """What to do about the adapters of a model that has no active dropout; None without adapters."""
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
