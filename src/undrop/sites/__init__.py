"""Where noise enters: every dropout of any ``nn.Module``, found, named and driven unchanged."""

from undrop.sites import attention, functional, recurrent  # they register what they stand in for
from undrop.sites.calling import call, logits_of
from undrop.sites.discovery import as_it_was, in_training, silent, sites
from undrop.sites.holding import map_tensors, tensors_in
from undrop.sites.interception import Field, Handler, Interception, apart, intercepts
from undrop.sites.replay import Replay
from undrop.sites.site import Selection, Site, Sites
from undrop.sites.statistics import Statistics, keep_statistics
from undrop.sites.wrappers import is_sharded, unwrapped

__all__ = [
    "Field",
    "Handler",
    "Interception",
    "Replay",
    "Selection",
    "Site",
    "Sites",
    "Statistics",
    "apart",
    "as_it_was",
    "attention",
    "call",
    "functional",
    "in_training",
    "intercepts",
    "is_sharded",
    "keep_statistics",
    "logits_of",
    "map_tensors",
    "recurrent",
    "silent",
    "sites",
    "tensors_in",
    "unwrapped",
]
