"""The verification of drafted tokens on a CPU, in place of vLLM's, which reads memory that holds something else.

Rejection sampling keeps or replaces each drafted token (Leviathan et al. 2023, arXiv:2211.17192). On a CPU
vLLM calls C++ functions in place of its kernels for GPUs (0.32.0, utils/cpu_triton_utils.py). The first
two of these faults are theirs:

- ``_expand_kernel_impl``, which repeats a request's temperature or top_k for each of its drafts, fills an
  int64 copy and drops it. So logits are divided by whatever the memory held: samples are of another
  distribution, and their log-probs often not finite.
- ``_rejection_random_sample_kernel_impl`` and ``_sample_recovered_tokens_kernel_impl`` take a draft of −1
  for an index. The scheduler pads a request with such drafts if one token of its prompt is left to compute
  (v1/core/sched/scheduler.py, ``pad_spec_decode``). So the probability before the row's first decides.
- ``apply_top_k_only`` takes the maximum of the drafts' top_k. In a step without drafts, as a prompt's, that
  raises an error, which ends the engine. It needs a batch with top_k and without top_p.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

RELEASE = "0.32.0"  # the release whose code was read, and is mended


def expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return each request's value repeated for each of its drafted tokens, [num_tokens].

    x: one value for each request, [requests].
    cu_num_tokens: the cumulative numbers of drafted tokens, [requests].
    replace_from, replace_to: each value ``replace_from`` becomes ``replace_to``.

    Example: x = [0.7, 0.0], cu_num_tokens = [2, 3], replace_to = 1 → [0.7, 0.7, 1.0].
    """
    values = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return values.repeat_interleave(_counts(cu_num_tokens), output_size=num_tokens)


def replacements(
    output: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    inverse_noise: torch.Tensor,
    *,
    max_spec_len: int,
) -> None:
    """Draw for each drafted token the token that replaces it if it is rejected, into ``output`` [drafts].

    drafts: the drafted token ids, those of each request after the previous request's; −1 is a padding.
    draft_probs: the drafter's distributions [drafts, vocabulary]; None if it drafts without any.
    target_probs: the policy's distributions [drafts, vocabulary].
    inverse_noise: 1 / exponential noise of each request, [requests, vocabulary].
    """
    if draft_probs is None:
        left = target_probs.clone()
        rows = torch.arange(len(drafts))[drafts >= 0]
        left[rows, drafts[rows].long()] = 0.0
    else:
        left = torch.where(drafts[:, None] < 0, target_probs, (target_probs - draft_probs).clamp_(min=0.0))
    counts = _counts(cu_num_draft_tokens)
    output.copy_((left * inverse_noise.repeat_interleave(counts, dim=0)).argmax(dim=-1))


def verify(
    output: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus: torch.Tensor,
    replacing: torch.Tensor,
    uniforms: torch.Tensor,
    is_greedy: torch.Tensor,
    max_spec_len: int,
    synthetic_rates: torch.Tensor | None,
) -> None:
    """Write the tokens of each sampled request into ``output`` [requests, max_spec_len + 1]; −1 follows the last.

    They are the drafts up to the first rejected one and its replacement, or all drafts and the bonus
    token. A draft x is kept if p(x) / q(x) is at least its uniform, where q is 1 without ``draft_probs``.

    bonus: the token after all drafts, [requests, 1].
    replacing: what ``replacements`` drew, [drafts].
    is_greedy: which requests are greedy; they are left as they are.
    """
    if synthetic_rates is not None:
        raise RuntimeError("rejection_sample_method=synthetic samples from another distribution; leave it out")
    counts = _counts(cu_num_draft_tokens)
    request = torch.arange(len(counts)).repeat_interleave(counts)
    place = torch.arange(len(drafts)) - (cu_num_draft_tokens - counts)[request]
    known = drafts.clamp(min=0).long()[:, None]
    p = target_probs.gather(1, known)[:, 0].double()
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(1, known)[:, 0].double()
    kept = torch.zeros(len(counts), max_spec_len, dtype=torch.int64)
    kept[request, place] = ((drafts >= 0) & (q > 0) & (p >= uniforms * q)).long()
    num_kept = kept.cumprod(dim=1).sum(dim=1)

    tokens = torch.full_like(output, -1)
    before, at = place < num_kept[request], place == num_kept[request]
    tokens[request[before], place[before]] = drafts[before].to(tokens.dtype)
    tokens[request[at], place[at]] = replacing[at].to(tokens.dtype)
    whole = torch.nonzero(num_kept == counts)[:, 0]
    tokens[whole, counts[whole].long()] = bonus.view(-1)[whole].to(tokens.dtype)
    output[~is_greedy] = tokens[~is_greedy]


def unless_empty(constrain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that calls ``constrain``, vLLM's for top_k and top_p, only for logits of one draft or more."""

    def constrained(logits: torch.Tensor, *rest: object) -> torch.Tensor:
        return constrain(logits, *rest) if len(logits) else logits

    return constrained


def mend(version: str) -> None:
    """Let vLLM's rejection sampling in this process use the functions above. ``version``: vLLM's version.

    Raises RuntimeError for another release, whose code nobody read.
    """
    if version.partition("+")[0] != RELEASE:
        raise RuntimeError(
            f"vLLM {version} with speculative decoding on a CPU: release {RELEASE} verifies drafts wrongly, and only "
            f"that release is mended here; set rollout.speculation=off, or install vllm=={RELEASE}"
        )
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand
    rejection_sampler._sample_recovered_tokens = replacements
    rejection_sampler._rejection_random_sample = verify
    rejection_sampler.apply_sampling_constraints = unless_empty(rejection_sampler.apply_sampling_constraints)


def _counts(cumulative: torch.Tensor) -> torch.Tensor:
    return torch.diff(cumulative, prepend=cumulative.new_zeros(1))
