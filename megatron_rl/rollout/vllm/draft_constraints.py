"""The mend of vLLM's verification of drafted tokens on a CPU, which reads memory that nobody wrote.

Rejection sampling computes each drafted position's distribution with the temperature, top_k and top_p
of its request. ``expand_batch_to_tokens`` (v1/sample/rejection_sampler.py) repeats a request's value for
each of its drafts. In the build for CPUs (0.32.0, utils/cpu_triton_utils.py, ``_expand_kernel_impl``) it
fills an int64 copy of the output, and the output itself keeps whatever the memory held. So logits are
divided by garbage: the samples are of another distribution, and their log-probs often not finite. Only
int64 values come out right, and neither temperatures nor top_k are int64.
"""

from __future__ import annotations

import torch

RELEASE = "0.32.0"  # the release whose code was read, and is mended


def expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return each request's value repeated for each of its drafted tokens, [num_tokens].

    It is what vLLM's kernel for GPUs computes (``expand_kernel``).

    x: one value for each request, [requests].
    cu_num_tokens: the cumulative numbers of drafted tokens, [requests].
    replace_from, replace_to: each value ``replace_from`` becomes ``replace_to``.

    Example: x = [0.7, 0.0], cu_num_tokens = [2, 3], replace_to = 1 → [0.7, 0.7, 1.0].
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)


def mend(version: str) -> None:
    """Let vLLM's rejection sampling in this process use ``expand``. ``version``: vLLM's version.

    Raises RuntimeError for another release, whose code nobody read.
    """
    if version.partition("+")[0] != RELEASE:
        raise RuntimeError(
            f"vLLM {version} with speculative decoding on a CPU: release {RELEASE} verifies drafts with temperatures "
            "that it never wrote, and only that release is mended here; leave speculation out, or install "
            f"vllm=={RELEASE}"
        )
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand
