"""The entry: one Megatron-Core parameter and the Hugging Face tensors that it is made of.

A layout says how the tensors lie in the parameter, and how the parameter is split over ranks:

- ``REPLICATED``: the same on every tensor rank (norms).
- ``ROWS``:       split by rows over tensor ranks (embeddings, LM head); rows past the vocabulary
                  are zeros.
- ``COLUMNS``:    split by columns (o_proj, down_proj).
- ``QKV``:        q, k and v interleaved by query group: [group, (heads per group + 2) · head_dim,
                  …], groups split over ranks (read, megatron-core 0.16.1
                  ``transformer/attention.py`` SelfAttention.get_query_key_value_tensors).
- ``GATE_UP``: each rank's rows of gate, then its rows of up (0.16.1 ``transformer/mlp.py``); of a
               single tensor, each rank's rows of it.
- ``SPLIT``:      one vector, each rank's share of it (a norm over all heads of q or k, sinks).
- ``INTERLEAVED``: as ``GATE_UP`` in Megatron-Core. The one Hugging Face tensor is the transpose,
                   and its columns alternate: 0, 2, … are gate's, 1, 3, … up's. A bias alternates
                   likewise, and has no transpose.
- ``TRANSPOSED``: as ``COLUMNS`` in Megatron-Core; the Hugging Face tensor is the transpose.

A family may hold q, k and v, or gate and up, in one Hugging Face tensor, one part after the other
(``joined``).

Hugging Face names are those of the checkpoint's **files**: transformers 5 keeps a layer's experts
fused in memory (weights/fused.py). If a file stacks all experts in one tensor (gpt_oss), each
expert has a name here, with its number before the last part: ``…experts.3.down_proj`` is
``…experts.down_proj[3]`` (weights/stacked.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum

from megatron_rl.weights.model_shape import ModelShape

# a buffer of Megatron-Core's router, added to the scores for the choice of experts only
ROUTER_BIAS = "mlp.router.expert_bias"


class Layout(Enum):
    REPLICATED = "replicated"
    ROWS = "rows"
    COLUMNS = "columns"
    QKV = "qkv"
    GATE_UP = "gate_up"
    SPLIT = "split"
    INTERLEAVED = "interleaved"
    TRANSPOSED = "transposed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Describes one Megatron parameter and its Hugging Face tensors, in the order of the layout.

    joined: True if one Hugging Face tensor holds the parts of ``QKV`` ([q; k; v]) or ``GATE_UP``
        ([gate; up]).
    expert: for an expert's parameter, the expert's number among this rank's experts. ``{expert}``
        in its Hugging Face names stands for the number among all experts, which ``held_by`` fills
        in. Such a parameter is split over expert tensor ranks, any other over tensor ranks.
    frozen: True for a buffer, float32 whatever the dtype of the parameters. It is loaded, kept as
        it is and exported, and has no gradient.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    expert: int | None = None
    frozen: bool = False
    joined: bool = False

    def held_by(self, expert_rank: int, shape: ModelShape, expert_size: int) -> Entry:
        """Return the entry as one expert-parallel rank holds it.

        Rank e has experts e·E/size to (e + 1)·E/size (``moe/moe_layer.py``).
        """
        if self.expert is None:
            return self
        number = expert_rank * (shape.num_experts // expert_size) + self.expert
        return dataclasses.replace(self, hf=tuple(name.replace("{expert}", str(number)) for name in self.hf))
