"""Facts of a batch made by hand."""

import numpy as np

from megatron_rl.types import BatchFacts


def make_facts(groups, loss_tokens, response_tokens=None) -> BatchFacts:
    loss_tokens = np.asarray(loss_tokens, dtype=np.int64)
    zeros = np.zeros(len(loss_tokens), dtype=np.int64)
    return BatchFacts(
        sample_ids=tuple(f"s{i}" for i in range(len(loss_tokens))),
        groups=np.asarray(groups, dtype=np.int64),
        prompt_tokens=zeros + 3,
        response_tokens=loss_tokens + 1 if response_tokens is None else np.asarray(response_tokens, dtype=np.int64),
        loss_tokens=loss_tokens,
        owners=zeros,
        owner_rows=np.arange(len(loss_tokens)),
    )
