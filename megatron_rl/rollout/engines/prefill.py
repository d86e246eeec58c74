"""The forward pass over prompts by a Hugging Face model: prompts are padded on the left, and fill the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from megatron_rl.weights.families.register import family_of

T = TypeVar("T")


def run_prompts(
    model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], cache: DynamicCache | None = None
) -> tuple[DynamicCache, torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """Run the model on P prompts as one batch, padded on the left.

    cache: an empty cache to fill. None: one of the kinds that the model's config names.

    Returns the cache, the last position's logits [P, V], the next position [P, 1], the mask [P,
    longest prompt], and whether any prompt is padded.

    Without padding the model is passed no mask. So scaled_dot_product_attention can use its fast
    kernels, and the model does not build a mask at every step.
    """
    input_ids, mask = _left_pad(prompts, next(model.parameters()).device)
    positions = mask.long().cumsum(1).sub_(1).clamp_(min=0)
    padded = not all(len(prompt) == input_ids.shape[1] for prompt in prompts)
    cache = DynamicCache(config=model.config) if cache is None else cache
    output = model(
        input_ids=input_ids,
        attention_mask=mask if padded else None,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return cache, output.logits[:, -1], positions[:, -1:] + 1, mask, padded


def counts_pads(model: PreTrainedModel) -> bool:
    """Return whether a model counts padding before a prompt as positions. Then its prompts may not be padded."""
    config = model.config.get_text_config()
    family = family_of(config.model_type)
    return family is not None and family.counts_pads(config)


def cut_batches(
    prompts: Sequence[T], length_of: Callable[[T], int], most: int, *, alike: bool
) -> Iterator[Sequence[T]]:
    """Yield batches of at most ``most`` prompts, in their order.

    length_of: a callable that returns a prompt's number of tokens.
    alike: whether a batch has prompts of one length only.

    Example: prompts a, b, c, d of lengths 2, 2, 2, 5, and ``most`` 2: [a, b], [c, d]. With
    ``alike``: [a, b], [c], [d].
    """
    start = 0
    while start < len(prompts):
        stop = min(start + most, len(prompts))
        if alike:
            first = length_of(prompts[start])
            stop = next((i for i in range(start, stop) if length_of(prompts[i]) != first), stop)
        yield prompts[start:stop]
        start = stop


def _left_pad(prompts: Sequence[tuple[int, ...]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prompts as int64 ids and a bool mask, both [P, longest]. All prompts end in the last column."""
    longest = max(len(prompt) for prompt in prompts)
    token_ids = np.zeros((len(prompts), longest), dtype=np.int64)
    mask = np.zeros((len(prompts), longest), dtype=bool)
    for row, prompt in enumerate(prompts):
        token_ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = True
    return torch.from_numpy(token_ids).to(device), torch.from_numpy(mask).to(device)
