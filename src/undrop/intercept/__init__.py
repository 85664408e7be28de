"""Find, name and control every dropout of any ``nn.Module``, without changes to the model."""

# The first three register their rules.
from undrop.intercept import attention as attention
from undrop.intercept import functional as functional
from undrop.intercept import recurrent as recurrent
from undrop.intercept.discovery import find_sites as find_sites
from undrop.intercept.discovery import follow_masks as follow_masks
from undrop.intercept.discovery import has_idle_dropout as has_idle_dropout
from undrop.intercept.discovery import in_training as in_training
from undrop.intercept.discovery import preserve_model as preserve_model
from undrop.intercept.discovery import sites as sites
from undrop.intercept.functional import register_site as register_site
from undrop.intercept.interception import SITE_RULES as SITE_RULES
from undrop.intercept.interception import Interception as Interception
from undrop.intercept.interception import Rule as Rule
from undrop.intercept.interception import SiteAction as SiteAction
from undrop.intercept.interception import no_noise as no_noise
from undrop.intercept.interception import outside_interception as outside_interception
from undrop.intercept.model_call import Batch as Batch
from undrop.intercept.model_call import call as call
from undrop.intercept.model_call import logits_of as logits_of
from undrop.intercept.model_call import map_tensors as map_tensors
from undrop.intercept.model_call import tensors_in as tensors_in
from undrop.intercept.running_statistics import Statistics as Statistics
from undrop.intercept.running_statistics import copied_buffers as copied_buffers
from undrop.intercept.running_statistics import keep_buffers as keep_buffers
from undrop.intercept.running_statistics import keep_statistics as keep_statistics
from undrop.intercept.site import Selection as Selection
from undrop.intercept.site import Site as Site
from undrop.intercept.site import Sites as Sites
from undrop.intercept.unaccounted import Unaccounted as Unaccounted
from undrop.intercept.wrappers import bare as bare
from undrop.intercept.wrappers import is_compiled as is_compiled
from undrop.intercept.wrappers import is_sharded as is_sharded
from undrop.intercept.wrappers import unwrapped as unwrapped
from undrop.rng_snapshot import RngSnapshot as RngSnapshot
