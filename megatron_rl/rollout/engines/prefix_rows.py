"""The rows of an embedded model's cache, which prompts fill: samples share a row while their tokens are equal.

Each distribution depends on the tokens before it alone. Samples whose tokens are equal so far have
the same one, so a single row gives it to all of them. Each draws from it by its own random number.
Where their tokens part, the row's keys and values are copied, and each has a row of its own. So the
rows are the leaves of a tree of prefixes, and a forward pass computes every distinct prefix once.
The samples are those of one row per sample, up to the float rounding of a batch of another size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

# Dropping rows copies the cache of the others, which costs about one decode step's torch.cat. With less than a
# quarter to drop, the saved rows do not pay for that copy within a few steps.
COMPACT_FRACTION = 0.25


class PrefixRows:
    """Holds the cache of a batch, its C rows, and the row that each running sample reads.

    logits: [C, vocab], of the next token after each row's prefix.
    place: int64 [R], the row of each of the R running samples; None: C is R, and sample r has row r.

    model: a model of transformers, in eval mode.
    prompts: the prompts' token ids.
    prompt_of_sample: for each sample the index of its prompt.
    max_steps: the maximum of tokens to generate.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[tuple[int, ...]],
        prompt_of_sample: Sequence[int],
        max_steps: int,
    ) -> None:
        self._model = model
        self._cache, self.logits, self._position, mask, self._padded = run_prompts(model, prompts)
        self._mask = torch.cat([mask, mask.new_ones(len(prompts), max_steps)], dim=1)
        self._width = mask.shape[1]  # of the prefixes with their pads
        self._shares = len(set(prompt_of_sample)) < len(prompt_of_sample)  # whether a row has several samples
        self.place: torch.Tensor | None = torch.tensor(prompt_of_sample, device=mask.device)

    def advance(self, tokens: torch.Tensor, stays: torch.Tensor | None = None) -> None:
        """Append a token to each sample, and run the model on the tokens. ``logits`` and ``place`` follow.

        tokens: int64 [R], of the samples that go on.
        stays: bool, which of the samples so far go on; None: all.
        """
        num_rows, shared = len(self._position), self._shares
        place = torch.arange(num_rows, device=tokens.device) if self.place is None else self.place
        parents, inputs, child = self._children(place if stays is None else place[stays], tokens)
        if num_rows - len(parents) >= COMPACT_FRACTION * num_rows or (shared and _has_twins(parents)):
            # Copy each row once per child. Rows without a child leave.
            self._cache.reorder_cache(parents)  # batch_select_indices (transformers 5.19) knows no delta nets' states
            self._position, self._mask = self._position[parents], self._mask[parents]
            self.place = child
        elif self.place is not None or stays is not None:
            # Each child takes its parent's row. Rows without a child stay, and go on with any token.
            inputs = inputs.new_zeros(num_rows).index_copy_(0, parents, inputs)
            self.place = parents if child is None else parents[child]
        self._run(inputs)

    def _children(
        self, place: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return each child's parent row and token, both [children], and the child of each sample, [R] or None.

        A child is a row's prefix with one token more. None: sample r has child r.
        """
        if not self._shares:  # rows part and never join, so none will have several samples again
            return place, tokens, None
        size = self.logits.shape[-1]
        children, child = torch.unique(place * size + tokens, return_inverse=True)
        self._shares = len(children) < len(tokens)
        return children // size, children % size, child

    def _run(self, inputs: torch.Tensor) -> None:
        """Run the model on one token of each row."""
        self._width += 1
        output = self._model(
            input_ids=inputs[:, None],
            attention_mask=self._mask[:, : self._width] if self._padded else None,
            position_ids=self._position,
            past_key_values=self._cache,
            use_cache=True,
        )
        self.logits, self._position = output.logits[:, -1], self._position + 1


def _has_twins(parents: torch.Tensor) -> bool:
    """Return whether two children have one parent. ``parents``: int64, equal ones are neighbours."""
    return bool((parents[1:] == parents[:-1]).any())


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


def _left_pad(prompts: Sequence[tuple[int, ...]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prompts as int64 ids and a bool mask, both [P, longest]. All prompts end in the last column."""
    longest = max(len(prompt) for prompt in prompts)
    token_ids = np.zeros((len(prompts), longest), dtype=np.int64)
    mask = np.zeros((len(prompts), longest), dtype=bool)
    for row, prompt in enumerate(prompts):
        token_ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = True
    return torch.from_numpy(token_ids).to(device), torch.from_numpy(mask).to(device)
