"""Packs samples as the tests do."""

from types import SimpleNamespace

import numpy as np
import torch

from megatron_rl.backend.batch import Batch
from megatron_rl.backend.packing import PackedMicroBatch, Packer
from megatron_rl.planning.plan import PlanRules
from megatron_rl.types import BatchFacts, LossInputs, MicroBatch, Sample

CPU = torch.device("cpu")


def attention_config(*windows: int) -> SimpleNamespace:
    """Return the fields that a core attention reads; windows: of each layer, 0 for none."""
    if not any(windows):
        return SimpleNamespace(window_size=None, window_attn_skip_freq=None)
    return SimpleNamespace(window_size=(max(windows) - 1, 0), window_attn_skip_freq=[int(x > 0) for x in windows])


def facts_of(samples: list[Sample]) -> BatchFacts:
    count = len(samples)
    return BatchFacts(sample_ids=tuple(s.sample_id for s in samples), groups=np.zeros(count, dtype=np.int64),
                      owners=np.zeros(count, dtype=np.int64), owner_rows=np.arange(count),
                      prompt_tokens=np.array([s.prompt_tokens for s in samples]),
                      response_tokens=np.array([len(s.loss_mask) for s in samples]),
                      loss_tokens=np.array([int(s.loss_mask.sum()) for s in samples]))


def inputs_of(samples: list[Sample]) -> LossInputs:
    """Return loss inputs whose numbers name their place: a response token's in the batch, or a sample's."""
    total = sum(len(s.loss_mask) for s in samples)
    return LossInputs(advantages=np.arange(len(samples)) + 0.5, weights=np.arange(len(samples)) + 1.0,
                      old_logprobs=-np.arange(total, dtype=np.float32),
                      reference_logprobs=-1000 - np.arange(total, dtype=np.float32))


def run_pack(samples: list[Sample], chosen: list[int], *, inputs: LossInputs | None | str = "named",
             pad_multiple: int = 1, row_multiple: int = 1, filler: bool = False, with_rows: bool = True,
             **fields: object) -> PackedMicroBatch:
    """Pack the samples ``chosen`` with a Packer of these fields; inputs: "named" takes ``inputs_of``."""
    packer = Packer(**dict(pad_token=0, needs_tokens=True, needs_loss=True, device=CPU) | fields)
    rows = {i: samples[i] for i in chosen if with_rows}  # no others: nothing of them may be asked for
    return packer.pack(MicroBatch(samples=np.array(chosen, dtype=np.int64), filler=filler),
                       batch=Batch(facts=facts_of(samples), local=(), rows=rows),
                       inputs=inputs_of(samples) if inputs == "named" else inputs,
                       rules=PlanRules(pad_multiple=pad_multiple, row_multiple=row_multiple))
