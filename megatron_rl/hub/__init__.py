"""The models and data sets on Hugging Face's hub: fetched once, pinned to a commit, and read as local folders."""

from megatron_rl.hub.names import repo_of
from megatron_rl.hub.settings import fetched, with_names

__all__ = ["fetched", "repo_of", "with_names"]
