"""Models and data sets named as on Hugging Face's hub: fetched once, pinned, and local folders from then on."""

from megatron_rl.hub.fetch import lacks_weights
from megatron_rl.hub.names import repo_of
from megatron_rl.hub.resolve import fetched, fetched_folder
from megatron_rl.hub.settings import with_names

__all__ = ["fetched", "fetched_folder", "lacks_weights", "repo_of", "with_names"]
