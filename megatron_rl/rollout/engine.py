"""What every inference engine offers the loop, and where a sample's random numbers come from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from megatron_rl.types import Prompt, Rollout

NO_WEIGHTS = -1  # an engine's weight_version before its first complete load_weights


class Engine(Protocol):
    """Samples completions from the trainer's weights. One owner, one call at a time."""

    weight_version: int

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Take over every weight, as full tensors under their Hugging Face names, from any device and dtype.

        Every parameter arrives exactly once; a tied alias (``lm_head.weight`` under tied embeddings) may be absent.
        Missing, doubled or unknown names and wrong shapes raise ValueError naming them; the engine then holds no
        usable weights until a later call succeeds.
        """
        ...

    def generate(self, prompts: Sequence[Prompt], samples_per_prompt: int, *, greedy: bool = False, attempt: int = 0) -> list[Rollout]:
        """[len(prompts) * samples_per_prompt] rollouts, prompt by prompt, sample_index 0, 1, ... within each.

        ``attempt`` distinguishes repeated draws for the same prompt at the same weights. Raises ConfigError for a
        prompt that cannot be run, RuntimeError where no weights were loaded.
        """
        ...

    def close(self) -> None:
        """Give the memory back; the engine cannot be used afterwards. Closing twice is harmless."""
        ...


def sample_seed(run_seed: int, prompt_id: str, sample_index: int, weight_version: int, attempt: int) -> int:
    """A 64-bit seed for one sample, equal on every machine and in every Python process.

    It holds no rank and no batch position, so another layout, or a resumed run, draws the same rollouts.
    """
    # The id comes last: it is the one free-form field, so no two different identities share a text.
    identity = f"{run_seed}/{sample_index}/{weight_version}/{attempt}/{prompt_id}"
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little")
