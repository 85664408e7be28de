"""Find, name and control every dropout of any ``nn.Module``, without changes to the model."""

from undrop.intercept import attention, functional, recurrent  # these register rules
from undrop.intercept.discovery import (
    find_sites,
    follow_masks,
    has_idle_dropout,
    in_training,
    preserve_model,
    sites,
)
from undrop.intercept.functional import register_site
from undrop.intercept.interception import (
    SITE_RULES,
    Interception,
    Rule,
    SiteAction,
    no_noise,
    outside_interception,
)
from undrop.intercept.model_call import Batch, call, logits_of, map_tensors, tensors_in
from undrop.intercept.running_statistics import (
    Statistics,
    copied_buffers,
    keep_buffers,
    keep_statistics,
)
from undrop.intercept.site import Selection, Site, Sites
from undrop.intercept.unaccounted import Unaccounted
from undrop.intercept.wrappers import bare, chosen_backend, is_sharded, uncompiled
from undrop.rng_snapshot import RngSnapshot

__all__ = [
    "SITE_RULES",
    "Batch",
    "Interception",
    "RngSnapshot",
    "Rule",
    "Selection",
    "Site",
    "SiteAction",
    "Sites",
    "Statistics",
    "Unaccounted",
    "no_noise",
    "outside_interception",
    "preserve_model",
    "attention",
    "bare",
    "call",
    "chosen_backend",
    "copied_buffers",
    "find_sites",
    "follow_masks",
    "functional",
    "has_idle_dropout",
    "in_training",
    "is_sharded",
    "keep_buffers",
    "keep_statistics",
    "logits_of",
    "map_tensors",
    "recurrent",
    "register_site",
    "sites",
    "tensors_in",
    "uncompiled",
]
