"""Every tensor of an export has one owner and one file, shared out evenly; released models on real topologies."""

import dataclasses
import json
from collections import Counter

import pytest
import torch

from megatron_rl.config.model import ParallelConfig
from megatron_rl.model.hf_config import read_shape
from megatron_rl.simulator.degrees import Degrees, degrees_of
from megatron_rl.simulator.model_files import count_model_files, words
from megatron_rl.weights.config_json import read_hf_config
from megatron_rl.weights.file_plan import FilePlan, FileSizes, plan_files
from megatron_rl.weights.model_shape import ModelShape
from megatron_rl.weights.shards import Planned, header_of, index_text
from tests.published.configs import HERE

GB = 10**9
# Of the release's model.safetensors.index.json: metadata.total_size, and the names of its weight_map.
PUBLISHED = {"Qwen3-235B-A22B": (470_187_269_120, 36_945)}
LAYOUTS = {
    "Qwen3-235B-A22B": (dict(tensor=4, pipeline=4, expert=8, expert_tensor=1), 512),
    "Qwen3-8B": (dict(tensor=4, pipeline=2), 16),
    "gpt-oss-20b": (dict(tensor=2, expert=4, expert_tensor=1), 8),
    "Mixtral-8x7B": (dict(tensor=2, pipeline=2, expert=2, expert_tensor=2), 8),
    "Moonlight-16B-A3B": (dict(tensor=2, pipeline=3, expert=8, expert_tensor=1), 24),
}


def placed(name: str) -> tuple[ModelShape, Degrees]:
    parallel, world = LAYOUTS[name]
    degrees = degrees_of(ParallelConfig(**parallel), world)
    shape = read_shape(read_hf_config(str(HERE / name)), layer_spec="torch")
    multiple = 128 * degrees.tensor_size
    padded = -(-shape.vocab_size // multiple) * multiple
    each, more = divmod(shape.num_layers, degrees.pipeline_size)
    stages = tuple(each + (stage < more) for stage in range(degrees.pipeline_size))
    return dataclasses.replace(shape, stage_layers=stages, padded_vocab_size=padded), degrees


def tensors_of(plan: FilePlan) -> list[Planned]:
    return [tensor for file in plan.files for tensor in file.tensors]


@pytest.fixture(scope="module")
def qwen235() -> tuple[ModelShape, Degrees, FilePlan]:
    shape, degrees = placed("Qwen3-235B-A22B")
    return shape, degrees, plan_files(shape, degrees, torch.bfloat16, FileSizes())


def test_an_export_of_qwen3_235b_has_the_bytes_and_tensors_of_its_release(qwen235):
    """512 ranks write 470 GB, the bytes that the release's own index names, none more than the largest table."""
    _, _, plan = qwen235
    names = Counter(tensor.name for tensor in tensors_of(plan))
    assert (sum(file.num_bytes for file in plan.files), len(names)) == PUBLISHED["Qwen3-235B-A22B"]
    assert set(names.values()) == {1}
    index = json.loads(index_text([(file.name, file.tensors) for file in plan.files]))
    assert index["metadata"]["total_size"] == PUBLISHED["Qwen3-235B-A22B"][0]
    assert set(index["weight_map"]) == set(names) and len(set(index["weight_map"].values())) == len(plan.files)
    assert {file.owner for file in plan.files} == set(range(512))


def test_a_stages_ranks_write_equal_bytes_to_within_its_largest_tensor(qwen235):
    _, degrees, plan = qwen235
    loads = [sum(file.num_bytes for file in plan.files if file.owner == rank) for rank in range(512)]
    on_stage = degrees.world_size // degrees.pipeline_size
    for first in range(0, 512, on_stage):
        stage = range(first, first + on_stage)
        largest = max(x.num_bytes for file in plan.files if file.owner in stage for x in file.tensors)
        assert max(loads[r] for r in stage) - min(loads[r] for r in stage) <= largest


@pytest.mark.parametrize("name", [x for x in LAYOUTS if x not in PUBLISHED])
def test_files_hold_each_tensor_once_within_the_limit(name):
    most = GB // 4
    shape, degrees = placed(name)
    alone = dataclasses.replace(shape, stage_layers=(), padded_vocab_size=shape.vocab_size)
    whole = plan_files(alone, degrees_of(ParallelConfig(), 1), torch.bfloat16, FileSizes())
    plan = plan_files(shape, degrees, torch.bfloat16, FileSizes(most_bytes=most))
    assert sorted(tensors_of(plan), key=str) == sorted(tensors_of(whole), key=str)
    for file in plan.files:
        assert file.num_bytes <= most or len(file.tensors) == 1
    assert len({file.name for file in plan.files}) == len(plan.files)


@pytest.mark.parametrize("name", [x for x in LAYOUTS if x not in PUBLISHED])
def test_shards_travel_within_the_stage_alone(name):
    """From tensor ranks of one replica; from another expert-parallel rank to a stack of experts alone."""
    shape, degrees = placed(name)
    plan = plan_files(shape, degrees, torch.bfloat16, FileSizes())
    on_stage = degrees.world_size // degrees.pipeline_size
    for owner, pieces in plan.pieces.items():
        for piece in pieces:
            sources = piece.sources(owner, degrees)
            assert {source // on_stage for source in sources} == {owner // on_stage} == {piece.pipeline_rank}
            if piece.expert_rank is None:
                assert piece.num_shards in (1, degrees.tensor_size)
                assert owner in sources
            elif name != "gpt-oss-20b":
                assert owner in sources and piece.num_shards in (1, degrees.expert_tensor_size)
            held = {source // degrees.expert_tensor_size % degrees.expert_size for source in sources}
            assert piece.expert_rank is None or held == {piece.expert_rank}


def test_a_small_model_is_one_file_however_many_ranks_hold_it():
    shape = read_shape(read_hf_config(str(HERE / "Qwen3-8B")), layer_spec="torch")
    small = dataclasses.replace(shape, num_layers=1, vocab_size=1024, padded_vocab_size=1024, hidden_size=256)
    plan = plan_files(small, degrees_of(ParallelConfig(tensor=2), 8), torch.bfloat16, FileSizes())
    assert [(file.name, file.owner) for file in plan.files] == [("model.safetensors", 0)]


@pytest.mark.parametrize("limits", [FileSizes(most_bytes=0), FileSizes(least_bytes=0)])
def test_limits_below_a_byte_are_refused(limits):
    shape, degrees = placed("Qwen3-8B")
    with pytest.raises(ValueError, match="at least 1 byte"):
        plan_files(shape, degrees, torch.bfloat16, limits)


def test_what_is_read_and_written_on_paper_adds_up(qwen235):
    """All replicas read their own shards: the model, times the replicas, and the copies of what is not split."""
    shape, degrees, plan = qwen235
    counted = count_model_files(shape, degrees, plan, 8)
    assert sum(rank.written_bytes for rank in counted.ranks) == counted.model_bytes == PUBLISHED["Qwen3-235B-A22B"][0]
    assert sum(counted.written_by_host) == counted.model_bytes and len(counted.read_by_host) == 64
    layer = 4096 + 4096 + 128 + 128 + 128 * 4096  # norms and the router, read by each tensor rank
    norms = 2 * (94 * layer + 4096)
    experts = 2 * 94 * 128 * 3 * 4096 * 1536
    dense = counted.model_bytes - norms - experts
    replicas, of_experts = degrees.data_size, degrees.expert_data_size
    assert sum(r.read_bytes for r in counted.ranks) == replicas * (dense + 4 * norms) + of_experts * experts
    load, export = words(counted.figures(2 * GB))
    assert load.startswith("load: 470.2 GB in 36,945 tensors; a rank reads at most") and "at 2 GB/s a host" in load
    assert export.startswith("export: 512 files of at most 1.245 GB; a rank writes") and "235 s)" in export


def test_a_header_is_read_by_safetensors(tmp_path):
    from safetensors import safe_open

    facts = (("a", (2, 3), torch.bfloat16), ("b", (5,), torch.float32))
    tensors = [Planned(name=name, shape=shape, dtype=dtype) for name, shape, dtype in facts]
    (tmp_path / "x.safetensors").write_bytes(header_of(tensors) + bytes(12 + 20))
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == {"a": (2, 3), "b": (5,)}  # noqa: SIM118
