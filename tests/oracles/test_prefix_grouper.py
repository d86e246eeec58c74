"""Shared prompts against PrefixGrouper (Liu et al. 2025, arXiv:2506.05433), which verl calls: its gradient, and ours.

It lays a group as one padded row, [prompt, answer, answer, ...], and attends twice: prompts, then answers after a copy
of their prompt's keys; a dense kernel stands for FlashAttention. verl hands it the loss mask for the suffix mask
(verl/trainer/ppo/prefix_grouper_utils.py): an environment's messages within an answer are not among the inputs then.
"""

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from megatron_rl.types import Sample
from tests.equality.rig import open_rig
from tests.equality.shared_samples import SHARED, advantages_of, group_samples
from tests.pairwise import quick
from tests.reference import near_policy, reference_gradient, relative_error, tiny_model
from tests.workers.pool import Pool

prefix_grouper = pytest.importorskip("prefix_grouper")
AttentionForward = pytest.importorskip("prefix_grouper.forward").AttentionForward

FAMILIES = ("qwen2_tied", "llama3_rope")


def padded(rows: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of different lengths as one tensor [rows, longest], and the mask of what is not padding."""
    longest = max(map(len, rows))
    values = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        values[i, : len(row)], mask[i, : len(row)] = torch.from_numpy(row.astype(np.int64)), True
    return values, mask


def attend(query, key, value, mask: torch.Tensor, module, *_, scaling: float, **__) -> torch.Tensor:
    """Attend with q [B, h, Q, d] to k, v [B, g, K, d], aligned at their ends; mask: [B, K], what is not padding."""
    queries, keys = query.shape[2], key.shape[2]
    seen = torch.arange(keys)[None, :] <= torch.arange(queries)[:, None] + keys - queries
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, (seen & mask.bool()[:, None])[:, None], scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2)


def attend_grouped(module, query, key, value, mask, *_, prefix_grouper, scaling: float, **__):
    """Hand transformers' attention call to PrefixGrouper, which ignores the mask for its own."""
    return AttentionForward(attend)(prefix_grouper, query, key, value, module, scaling=scaling), None


def grouped_logprobs(model, samples: list[Sample], groups: list[int], *, by_loss_mask: bool) -> list[torch.Tensor]:
    """Return the log-probs of each sample's tokens in the suffix mask, by one forward of PrefixGrouper's rows."""
    AttentionInterface.register("grouped", attend_grouped)
    model.set_attn_implementation("grouped")
    sizes = np.bincount(groups).tolist()
    first = [samples[groups.index(g)] for g in range(len(sizes))]
    prompts, prompt_mask = padded([s.token_ids[: s.prompt_tokens] for s in first])
    answers, answer_mask = padded([s.token_ids[s.prompt_tokens :] for s in samples])
    if by_loss_mask:
        answer_mask &= padded([s.loss_mask for s in samples])[0].bool()
    rows = prefix_grouper.PrefixGrouper.from_ungrouped_masks(prefix_mask=prompt_mask, suffix_mask=answer_mask,
                                                             group_sizes=sizes, padding_mode="right", device="cpu")
    positions = torch.zeros_like(rows.padding_mask, dtype=torch.int64)
    for i, group in enumerate(rows.group_info):
        parts = [torch.arange(group.prefix_len)]
        parts += [torch.arange(group.prefix_len, group.prefix_len + n) for n in group.suffix_lens]
        line = torch.cat(parts)
        positions[i, : len(line)] = line
    logits = model(
        input_ids=rows.concat_input(prompts, prompt_mask, answers, answer_mask), attention_mask=rows.padding_mask,
        position_ids=positions, use_cache=False, prefix_grouper=rows,
    ).logits  # fmt: skip
    _, _, suffix, suffix_mask = rows.split_output(logits, include_prefix_last=1)
    targets = rows.convert_padding(answers, answer_mask, padding_mode="right")
    logprobs = suffix[:, :-1].float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return [row[mask] for row, mask in zip(logprobs, suffix_mask[:, 1:].bool(), strict=True)]


def their_gradient(family: str, *, by_loss_mask: bool) -> dict[str, torch.Tensor]:
    """Return PrefixGrouper's gradient of the clipped surrogate's token mean, over all samples."""
    _, model = tiny_model(family)
    samples, groups = group_samples()
    samples = near_policy(tiny_model(family)[1], samples)
    tokens = sum(int(s.loss_mask.sum()) for s in samples)
    found = grouped_logprobs(model, samples, groups, by_loss_mask=by_loss_mask)
    total = torch.zeros(())
    for sample, advantage, logprobs in zip(samples, advantages_of(len(samples)).tolist(), found, strict=True):
        chosen = torch.from_numpy(sample.loss_mask)
        now = logprobs if by_loss_mask else logprobs[chosen]
        ratio = (now - torch.from_numpy(sample.logprobs)[chosen]).exp()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / tokens
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loop_gradient(family: str) -> dict[str, torch.Tensor]:
    _, model = tiny_model(family)
    samples, groups = group_samples()
    samples = near_policy(model, samples)
    gradient, _ = reference_gradient(model, samples, groups, list(advantages_of(len(samples))), reduction="token_mean")
    return gradient


def our_gradient(rank: int, world: int, family: str) -> dict[str, torch.Tensor]:
    samples, groups = group_samples()
    values = advantages_of(len(samples))
    with open_rig(family, SHARED) as rig:
        rig.take(near_policy(rig.model, samples), groups)
        return {name: x.clone() for name, x in rig.gradient(values, rig.plan(values, drops=True)).items()}


@pytest.mark.parametrize("family", quick(FAMILIES, "llama3_rope"))
def test_gradients_over_shared_prompts_are_prefix_groupers(pool: Pool, family: str) -> None:
    wanted, theirs = loop_gradient(family), their_gradient(family, by_loss_mask=False)
    ours = pool.run(1, our_gradient, family, timeout_s=60)[0]
    errors = relative_error(theirs, wanted), relative_error(ours, wanted), relative_error(ours, theirs)
    print(f"{family}: PrefixGrouper to the loop {errors[0]:.1e}, ours {errors[1]:.1e}, to one another {errors[2]:.1e}")
    assert max(errors) < 1e-5


@pytest.mark.parametrize("family", quick(FAMILIES, "llama3_rope"))
def test_without_the_masked_tokens_the_gradient_is_another(family: str) -> None:
    """By verl's call, masked tokens within an answer are not among the inputs: a finding, held as it was seen."""
    error = relative_error(their_gradient(family, by_loss_mask=True), loop_gradient(family))
    print(f"{family}: PrefixGrouper by the loss mask, to the loop {error:.1e}")
    assert error > 1e-2
