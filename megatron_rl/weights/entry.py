"""``Entry``: one Megatron-Core parameter and the Hugging Face tensors that it is made of.

A ``Layout`` says how the tensors lie in the parameter, and how the parameter is split over
tensor-parallel ranks:

- ``REPLICATED``: the whole tensor on every rank (norms).
- ``ROWS``:       split by rows (embeddings, LM head), after rows of zeros are added at the end to
                  make their number a multiple of the ranks.
- ``COLUMNS``:    split by columns (o_proj, down_proj).
- ``QKV``:        q, k and v interleaved by query group: [group, (heads per group + 2) · head_dim,
                  …], groups split over ranks (source: megatron-core 0.16.1
                  ``transformer/attention.py`` SelfAttention.get_query_key_value_tensors).
- ``GROUPS``:     the rows of several sections interleaved by group of heads: [group, rows of section
                  1, rows of section 2, …], groups split over ranks. A Hugging Face tensor holds one
                  or more sections, one below the other (``Entry.sections``).
- ``GATE_UP``: a rank holds its rows of gate, then its rows of up (0.16.1
               ``transformer/mlp.py``). A parameter of one Hugging Face tensor that is not
               gate and up together (LoRA's B, say) is split by rows.
- ``SPLIT``:      one vector, split in equal slices (a norm over all heads of q or k, the logits
                  of attention sinks).
- ``INTERLEAVED``: as ``GATE_UP`` in Megatron-Core. The one Hugging Face tensor is the transpose,
                   and its columns alternate: 0, 2, … are gate's, 1, 3, … up's. A bias alternates
                   likewise, and is not transposed.
- ``TRANSPOSED``: as ``COLUMNS`` in Megatron-Core; the Hugging Face tensor is the transpose.

In some families one Hugging Face tensor holds q, k and v, or gate and up, one below the other
(``Entry.joined``).

Hugging Face names are those of the checkpoint's **files**, which differ from the names in memory:
transformers 5 fuses a layer's experts in memory (weights/fused.py).

If a file stacks all experts in one tensor (gpt_oss), each expert gets a name here, with the
expert's number before the last component. ``…experts.3.down_proj`` stands for slice 3 of the file's
tensor ``…experts.down_proj`` (weights/stacked.py).
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
    GROUPS = "groups"
    GATE_UP = "gate_up"
    SPLIT = "split"
    INTERLEAVED = "interleaved"
    TRANSPOSED = "transposed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Describes one Megatron-Core parameter and the Hugging Face tensors that it is made of.

    megatron: the parameter's name in Megatron-Core.
    hf: the names of the Hugging Face tensors, in the order of the layout (q, k, v; gate, up).
    layout: how the tensors lie in the parameter, and how the parameter is split over ranks.
    groups, sections: of ``GROUPS``, the number of groups, and for each Hugging Face tensor the number
        of rows of each of its sections.
    joined: True if one Hugging Face tensor holds q, k and v of ``QKV`` ([q; k; v]), or gate and up
        of ``GATE_UP`` ([gate; up]).
    expert: for an expert's parameter, the expert's number among this rank's experts; None for any
        other parameter. ``{expert}`` in the Hugging Face names stands for the number among all
        experts, which ``held_by`` fills in. An expert's parameter is split over expert tensor ranks
        (the ranks that share an expert's matrices), any other parameter over tensor ranks.
    frozen: True for a buffer that is loaded, kept unchanged and exported. It is float32 whatever
        the parameters' dtype, and has no gradient.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    expert: int | None = None
    frozen: bool = False
    joined: bool = False
    groups: int = 0
    sections: tuple[tuple[int, ...], ...] = ()

    def held_by(self, expert_rank: int, shape: ModelShape, expert_size: int) -> Entry:
        """Return the entry of an expert of rank ``expert_rank``, with ``{expert}`` in Hugging Face names filled in.

        ``self.expert`` is the expert's number among the rank's experts; ``{expert}`` is replaced by its
        number among all experts. Of E experts, rank e of n holds experts e·E/n to (e + 1)·E/n - 1
        (``moe/moe_layer.py``). An entry outside the experts is returned unchanged.

        expert_rank: the expert-parallel rank e.
        shape: the model's shape, which has E.
        expert_size: the number n of expert-parallel ranks.
        """
        if self.expert is None:
            return self
        number = expert_rank * (shape.num_experts // expert_size) + self.expert
        return dataclasses.replace(self, hf=tuple(name.replace("{expert}", str(number)) for name in self.hf))
