"""Models and data sets named as on Hugging Face's hub: fetched once, pinned, and local folders from then on."""

from megatron_rl.hub.names import repo_of
from megatron_rl.hub.settings import fetched, with_names

__all__ = ["fetched", "repo_of", "with_names"]
