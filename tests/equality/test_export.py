"""Weights are exported whole, once each, in one order, a bucket at a time, in no more memory than asked for."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
import transformers

from megatron_rl.model.hf_config import read_shape
from megatron_rl.planning.pipeline_layout import balanced
from megatron_rl.weights import export
from megatron_rl.weights.checksum import Checksum
from megatron_rl.weights.entry import Layout
from megatron_rl.weights.mapping import TIED_HEAD, stage_entries
from tests.allocated import AllocationMeter
from tests.equality.rig import Rig, open_rig
from tests.equality.rows import measured, row
from tests.pairwise import quick
from tests.reference import file_weights

# an entry at a time; several (the largest needs 122,880 bytes by itself: Mixtral at EP 2, ETP 2)
ENTRY_BYTES, SMALL_BYTES = 1, 125_000
LARGEST = dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), 163_840)  # the projection of a delta net by itself
TOPOLOGIES = (*("one qwen2_untied", "DP2 qwen2_untied", "TP2 qwen3", "PP2 qwen2_tied", "PP2-VPP2 qwen2_untied"),
              *("TP2-PP2-bf16 llama", "one phi3", "TP2 olmo2", "TP2 gemma3_text", "EP2 mixtral", "TP2-SP qwen3_moe"),
              *("TP2-SP-EP2 mixtral", "TP2-SP qwen3_next", "TP2-SP qwen3_5_moe_text"))
LONG = (*("TP2 qwen2_untied", "TP2-PP2 qwen2_untied", "TP2-PP2 phi3", "TP2-SP-EP2-ETP1 mixtral"),
        *("PP2-VPP2-EP2 qwen3_moe", "TP2-PP2-SP-EP2-ETP1 qwen3_moe"))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def exported(rig: Rig, bucket_bytes: int, wanted: dict[str, torch.Tensor]) -> dict[str, object]:
    """Hold one export against ``wanted``, tensor by tensor, as a consumer meets them."""
    names, wrong, seen, meter = [], [], Checksum(), AllocationMeter()
    tensors = rig.backend.export(bucket_bytes=bucket_bytes)
    while True:
        with meter:
            item = next(tensors, None)
        if item is None:
            break
        name, tensor = item
        names.append(name)
        seen.update(name, tensor)
        if tensor.shape != wanted[name].shape or not torch.equal(bits(tensor), bits(wanted[name])):
            wrong.append(name)
    return {"names": names, "wrong": wrong, "checksum": seen.value(), "peak_bytes": meter.peak_bytes}


def export_in_buckets(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> dict[str, object]:
    with open_rig(family, *overrides, layers=4) as rig:  # so that there is more than a bucket
        backend = rig.backend
        dtype = next(backend.chunks[0].module.parameters()).dtype
        wanted = {name: x.to(dtype) for name, x in file_weights(rig.model).items()}
        if rig.model.config.tie_word_embeddings:
            del wanted["lm_head.weight"]
        found = {size: exported(rig, size, wanted) for size in (ENTRY_BYTES, SMALL_BYTES, export.BUCKET_BYTES)}
        cuts = [export.cut_buckets(backend.shape, backend.topology, size // dtype.itemsize) for size in found]
        with pytest.raises(ValueError, match="bucket_bytes=0 must be at least 1"):
            next(backend.export(bucket_bytes=0))
        return {"found": found, "num_buckets": [len(x) for x in cuts], "names": sorted(wanted)}


@pytest.mark.parametrize("name", quick((*TOPOLOGIES, *LONG), *TOPOLOGIES))
def test_export_equals_reference_in_buckets_of_any_size(pool, name):
    """To the bit, every name once, in one order on every rank and at every size, within the bucket's memory."""
    results = measured(pool, name, export_in_buckets)
    first = results[0]["found"][export.BUCKET_BYTES]
    for result in results:
        for size, found in result["found"].items():
            assert not found["wrong"], (size, found["wrong"])
            assert sorted(found["names"]) == result["names"], size
            assert (found["names"], found["checksum"]) == (first["names"], first["checksum"]), size
        assert result["found"][SMALL_BYTES]["peak_bytes"] <= LARGEST.get(row(name)[1], SMALL_BYTES)
        num_entries, num_small, num_whole = result["num_buckets"]
        assert num_entries > num_small >= num_whole
        if row(name)[2]:  # the meter would see a bucket_bytes that nobody heeds, or a layer gathered whole
            assert num_small > num_whole and first["peak_bytes"] > SMALL_BYTES


def large(class_name: str, sizes: dict[str, object], *, tensor=1, pipeline=1, virtual=1, expert=1, expert_tensor=1):
    """Return (shape, place) of a released model on paper; the classes' defaults are gpt-oss-120b and GLM-4.5-Air."""
    config = getattr(transformers, f"{class_name}Config")(**sizes)
    place = SimpleNamespace(tensor_size=tensor, pipeline_size=pipeline, virtual_size=virtual)
    place.expert_size, place.expert_tensor_size = expert, expert_tensor
    shape = read_shape(config, layer_spec="transformer_engine", vocab_multiple=tensor)
    costs = [shape.passed_parameters(x) for x in range(shape.num_layers)]
    layers = balanced(costs, shape.hidden_size * shape.vocab_size, pipeline, virtual)
    return dataclasses.replace(shape, stage_layers=layers), place


QWEN = dict(num_attention_heads=32, head_dim=128, vocab_size=151_936, tie_word_embeddings=False)
QWEN_8B = QWEN | dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8)
QWEN_30B = QWEN | dict(hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_key_value_heads=4)
LARGE = {"8B TP1": large("Qwen3", QWEN_8B),
         "8B TP8": large("Qwen3", QWEN_8B, tensor=8),
         "8B TP2 PP2 VPP3": large("Qwen3", QWEN_8B, tensor=2, pipeline=2, virtual=3),
         "GLM-4.5-Air TP2 PP2 EP8": large("Glm4Moe", dict(head_dim=128), tensor=2, pipeline=2, expert=8),
         "gpt-oss-120b TP2 PP2 EP8": large("GptOss", {}, tensor=2, pipeline=2, expert=8),
         "30B TP4 PP4 EP8": large("Qwen3Moe", QWEN_30B, tensor=4, pipeline=4, expert=8),
         "30B TP2 PP2 EP4 ETP2": large("Qwen3Moe", QWEN_30B, tensor=2, pipeline=2, expert=4, expert_tensor=2)}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("bucket_bytes", [2, 64 * 2**20, export.BUCKET_BYTES])
def test_buckets_hold_every_entry_in_order_within_the_bound(name, bucket_bytes):
    """No bucket is above the bound but of one entry, and none has room for its neighbour's first."""
    shape, place = LARGE[name]
    buckets = export.cut_buckets(shape, place, bucket_bytes // 2)
    entries = [(stage, entry) for stage in range(shape.num_stages)
               for entry in stage_entries(shape, stage, place.expert_size)]
    assert [(x.stage, entry) for x in buckets for entry in x.entries] == [x for x in entries if x[1] != TIED_HEAD]
    for bucket in buckets:
        assert bucket.elements * 2 <= bucket_bytes or len(bucket.entries) == 1
        assert len({(entry.expert is None, entry.frozen) for entry in bucket.entries}) == 1
    for last, following in itertools.pairwise(buckets):
        first = export._bucket_of(following.stage, following.entries[0], shape, place)
        assert not last.takes(first) or last.joined(first).elements * 2 > bucket_bytes
    if bucket_bytes == export.BUCKET_BYTES:
        above = {entry.layout for x in buckets if x.elements * 2 > bucket_bytes for entry in x.entries}
        assert above <= {Layout.ROWS}, "only the vocabulary's tables (1.2 GB, 0.6 GB) need more by themselves"
