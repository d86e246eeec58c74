"""The engine of each rank, the arguments and environment of its process, and the settings that are refused."""

from __future__ import annotations

import json
import os

import pytest
import torch

from megatron_rl import validate
from megatron_rl.config import Config, load_config
from megatron_rl.distributed.child_process import LAUNCHER_VARIABLES
from megatron_rl.errors import ConfigError
from megatron_rl.rollout import build
from megatron_rl.rollout.build import (
    EngineRole,
    RankLocation,
    engine_arguments,
    family_arguments,
    latent_arguments,
    refuse_delta,
    role_of,
    shares_device,
)
from megatron_rl.rollout.vllm.process_replica import engine_environment

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def config_of(*overrides: str) -> Config:
    return load_config(None, ["rollout.engine=vllm", *overrides])


def places(config: Config, world_size: int, node_size: int | None = None) -> list[EngineRole]:
    node_size = node_size or world_size
    return [
        role_of(
            config,
            RankLocation(rank=rank, world_size=world_size, local_rank=rank % node_size, local_world_size=node_size),
        )
        for rank in range(world_size)
    ]


def own(number: int, engines: int) -> EngineRole:
    return EngineRole(share=(number, engines), starts=True, drives=True)


NONE = EngineRole(share=None, starts=False, drives=False)


@pytest.mark.parametrize(
    "overrides, world_size, wanted",
    [
        ([], 1, [own(0, 1)]),
        ([], 3, [own(0, 3), own(1, 3), own(2, 3)]),
        (["rollout.tensor_parallel=2"], 4, [own(0, 2), NONE, own(1, 2), NONE]),
        (["rollout.tensor_parallel=2"], 5, [own(0, 2), NONE, own(1, 2), NONE, NONE]),
        (["rollout.num_engines=1"], 4, [own(0, 1), NONE, NONE, NONE]),
        (["rollout.num_engines=2"], 4, [own(0, 2), NONE, own(1, 2), NONE]),
        (["rollout.num_engines=2", "rollout.tensor_parallel=2"], 4, [own(0, 2), NONE, own(1, 2), NONE]),
        (["rollout.num_engines=3"], 5, [own(0, 3), own(1, 3), own(2, 3), NONE, NONE]),
        (["rollout.num_engines=1", "rollout.tensor_parallel=4"], 4, [own(0, 1), NONE, NONE, NONE]),
    ],
)
def test_engines_of_the_runs_own(overrides, world_size, wanted):
    assert places(config_of(*overrides), world_size) == wanted


@pytest.mark.parametrize("world_size", [1, 4])
def test_with_servers_every_rank_asks_and_the_first_sends_weights(world_size):
    found = places(config_of("rollout.servers=[http://127.0.0.1:8000]"), world_size)
    assert [place.share for place in found] == [(rank, world_size) for rank in range(world_size)]
    assert [place.drives for place in found] == [True] + [False] * (world_size - 1)
    assert not any(place.starts for place in found)


def test_with_transformers_every_rank_has_its_model():
    assert places(load_config(), 2) == [EngineRole(share=(rank, 2), starts=False, drives=True) for rank in range(2)]


@pytest.mark.parametrize(
    "overrides, world_size, node_size, words",
    [
        (["rollout.num_engines=3"], 2, None, ["rollout.num_engines=3", "need 3 ranks", "there are 2"]),
        (["rollout.tensor_parallel=4"], 2, None, ["rollout.tensor_parallel=4", "need 4 ranks", "there are 2"]),
        (
            ["rollout.num_engines=2", "rollout.tensor_parallel=2"],
            3,
            None,
            ["num_engines=2", "tensor_parallel=2", "need 4", "there are 3"],
        ),
        (["rollout.tensor_parallel=4"], 4, 2, ["rollout.tensor_parallel=4", "the 2 ranks of a node"]),
        (["rollout.tensor_parallel=2"], 6, 3, ["engine 1", "rollout.tensor_parallel=2", "rank 2 of a node's 3"]),
    ],
)
def test_engines_that_do_not_fit_are_refused_with_both_numbers(overrides, world_size, node_size, words):
    """Every rank refuses engines that do not fit, naming both numbers, so that none waits for another."""
    for rank in range(world_size):
        seat = RankLocation(rank=rank, world_size=world_size, local_rank=0, local_world_size=node_size or world_size)
        with pytest.raises(ConfigError) as refused:
            role_of(config_of(*overrides), seat)
        assert all(word in str(refused.value) for word in words), refused.value


def test_every_prompt_has_one_engine():
    """The shares of the ranks that have an engine are 0 … n−1 of n, whatever the world."""
    for world_size in range(1, 13):
        for width in range(1, world_size + 1):
            for engines in [None, *range(1, world_size // width + 1)]:
                chosen = [
                    f"rollout.tensor_parallel={width}",
                    *([] if engines is None else [f"rollout.num_engines={engines}"]),
                ]
                found = places(config_of(*chosen), world_size)
                shares = [place.share for place in found if place.share is not None]
                wanted = engines or world_size // width
                assert shares == [(number, wanted) for number in range(wanted)], (world_size, width, engines)
                starts = [rank for rank, place in enumerate(found) if place.starts]
                assert all(right - left >= width for left, right in zip(starts, [*starts[1:], world_size], strict=True))


def test_an_engines_environment_is_not_a_ranks():
    given = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_PROCID", "TORCH_NCCL_X"), "1") | {
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "PATH": "/bin",
        "HOME": "/root",
        "PYTHONPATH": "/of/the/user",
        "VLLM_CPU_KVCACHE_SPACE": "4",
    }
    before = dict(given)
    found = engine_environment(given, None, 3)
    assert given == before
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in found
    assert not any(LAUNCHER_VARIABLES.fullmatch(name) or name in ("RANK", "SLURM_PROCID") for name in found)
    assert found["PATH"] == "/bin" and found["HOME"] == "/root" and found["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert found["PYTHONPATH"].endswith(":/of/the/user") and found["OMP_NUM_THREADS"] == "3"
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and "CUDA_VISIBLE_DEVICES" not in found


def test_an_engines_environment_names_its_gpus():
    found = engine_environment({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "OMP_NUM_THREADS": "9"}, ["2", "3"], None)
    assert (
        found["CUDA_VISIBLE_DEVICES"] == "2,3"
        and found["OMP_NUM_THREADS"] == "9"
        and "VLLM_CPU_OMP_THREADS_BIND" not in found
    )


def test_an_engines_arguments():
    config = config_of(
        "rollout.vllm={max_num_seqs: 7, enforce_eager: false, block_size: 16}", "data.max_prompt_tokens=100"
    )
    found = engine_arguments(config, CPU)
    assert (found["max_num_seqs"], found["enforce_eager"], found["block_size"]) == (7, False, 16)
    assert found["max_model_len"] == 100 + config.rollout.max_response_tokens
    assert (
        found["logprobs_mode"] == "processed_logprobs"
        and found["generation_config"] == "vllm"
        and not found["enable_sleep_mode"]
    )


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["rollout.vllm={dtype: float16}"], ["rollout.vllm.dtype='float16'", "model.dtype decides it"]),
        (["rollout.vllm={worker_extension_cls: mine}"], ["rollout.vllm.worker_extension_cls"]),
        (["rollout.vllm={logprobs_mode: raw_logprobs}"], ["rollout.vllm.logprobs_mode"]),
        (["rollout.engine=sglang"], ["rollout.engine='sglang'", "vllm"]),
        (["rollout.sleep=sometimes"], ["rollout.sleep='sometimes'", "auto"]),
        (["rollout.servers=[127.0.0.1:8000]"], ["'127.0.0.1:8000'", "http://host:port"]),
        (["rollout.servers=[http://127.0.0.1:8000/v1]"], ["http://127.0.0.1:8000/v1", "without a path"]),
        (
            ["rollout.servers=[http://a:1]", "rollout.num_engines=2"],
            ["rollout.num_engines=2", "rollout.servers=['http://a:1']"],
        ),
        (["rollout.engine=transformers", "rollout.servers=[http://a:1]"], ["rollout.servers", "rollout.engine=vllm"]),
        (["rollout.gpu_memory_utilization=1.5"], ["rollout.gpu_memory_utilization=1.5", "at most 1"]),
        (["rollout.tensor_parallel=0"], ["rollout.tensor_parallel=0", "at least 1"]),
        (["rollout.max_restarts=-1"], ["rollout.max_restarts=-1", "at least 0"]),
        (["rollout.request_s=0"], ["rollout.request_s=0", "at least 1"]),
        (["rollout.temperature=0"], ["rollout.temperature=0", "at least 0.01"]),
        (["rollout.max_logprob_gap=-1"], ["rollout.max_logprob_gap=-1", "above 0", "null"]),
        (["weight_sync.channel=carrier"], ["weight_sync.channel='carrier'", "shared_memory"]),
        (["weight_sync.bucket_mb=0"], ["weight_sync.bucket_mb=0", "above 0"]),
        (["weight_sync.attempts=0"], ["weight_sync.attempts=0", "at least 1"]),
        (["weight_sync.full_every=0"], ["weight_sync.full_every=0", "at least 1"]),
    ],
)
def test_a_setting_that_cannot_work_is_refused(overrides, words):
    with pytest.raises(ConfigError) as refused:
        config_of(*overrides)
    assert all(word in str(refused.value) for word in words), refused.value


def channel_of(*overrides: str, device: torch.device = CPU, **environment: str) -> str:
    return build.weight_channel(config_of(*overrides), device, environment)


def test_cuda_ipc_needs_a_gpu_and_engines_of_the_runs_own():
    with pytest.raises(
        ConfigError, match="weight_sync.channel=cuda_ipc needs engines of the run's own.*this run is on cpu"
    ):
        channel_of("weight_sync.channel=cuda_ipc")
    with pytest.raises(ConfigError, match="this run is on cuda with rollout.servers=..http://a:1"):
        channel_of("weight_sync.channel=cuda_ipc", "rollout.servers=[http://a:1]", device=GPU)
    assert channel_of("weight_sync.channel=cuda_ipc", device=GPU) == "cuda_ipc"


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_auto_takes_handles_on_a_shared_gpu_alone(device, caplog):
    assert channel_of(device=device) == {"cpu": "shared_memory", "cuda": "cuda_ipc"}[device.type]
    assert channel_of("rollout.sleep=never", device=device) == channel_of(device=device)
    here, elsewhere = (
        'rollout.servers=["http://127.0.0.1:8000","http://' + host + '"]' for host in ("[::1]:8001", "10.0.0.7:8000")
    )
    assert channel_of(here, device=device) == "shared_memory" and channel_of(elsewhere, device=device) == "broadcast"
    assert channel_of("weight_sync.channel=shared_memory", device=device) == "shared_memory"
    assert not caplog.records


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_users_expandable_segments_keep_auto_from_handles(name, caplog):
    given = {name: "backend:native,expandable_segments:True"}
    assert channel_of(device=GPU, **given) == "shared_memory"
    assert f"takes shared_memory, and cuda_ipc would be faster: {name}={given[name]} asks" in caplog.text
    assert channel_of(device=GPU, **{name: "expandable_segments:False"}) == "cuda_ipc"
    assert channel_of("weight_sync.channel=shared_memory", device=GPU, **given) == "shared_memory"
    with pytest.raises(
        ConfigError, match=f"cuda_ipc cannot open memory in expandable segments, and {name} is 'backend"
    ):
        channel_of("weight_sync.channel=cuda_ipc", device=GPU, **given)
    caplog.clear()
    assert channel_of(**given) == "shared_memory" and not caplog.records


def test_broadcast_to_engines_on_the_trainers_own_gpus_is_refused():
    with pytest.raises(ConfigError, match="weight_sync.channel=broadcast .* NCCL refuses that .*channel=auto"):
        channel_of("weight_sync.channel=broadcast", device=GPU)
    assert channel_of("weight_sync.channel=broadcast") == "broadcast"
    assert channel_of("weight_sync.channel=broadcast", "rollout.servers=[http://10.0.0.7:8000]", device=GPU)


@pytest.mark.parametrize(
    ("width", "first", "visible", "count", "expected"),
    [
        (1, 3, None, 8, ["3"]),
        (2, 2, "4,5,6,7", 4, ["6", "7"]),
        (1, 0, "GPU-5f", 1, ["GPU-5f"]),  # a process that sees one GPU; its local rank is of no matter
        (1, 1, "0, 2", 2, ["2"]),
    ],
)
def test_an_engine_gets_its_ranks_gpus(width, first, visible, count, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert build.engine_devices(width, first, environment, count) == expected


def test_an_engine_wider_than_the_gpus_its_rank_sees_is_refused():
    with pytest.raises(ConfigError, match="tensor_parallel=2 begins at GPU 0 .* sees 1 .*=5.*--gpus-per-node"):
        build.engine_devices(2, 0, {"CUDA_VISIBLE_DEVICES": "5"}, 1)


def test_without_vllm_an_engine_of_ones_own_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    seat = RankLocation(rank=0, world_size=1, local_rank=0, local_world_size=1)
    with pytest.raises(ConfigError, match="not installed here; pip install 'megatron_rl\\[vllm\\]'.*rollout.servers"):
        build._process(config_of(), seat, CPU)


def test_sleeping_needs_a_shared_gpu():
    assert shares_device(config_of(), torch.device("cuda")) and not shares_device(config_of(), CPU)
    assert not shares_device(config_of("rollout.sleep=never"), torch.device("cuda"))
    assert not shares_device(config_of("rollout.servers=[http://a:1]"), torch.device("cuda"))
    with pytest.raises(ConfigError, match="rollout.sleep=always needs a GPU"):
        shares_device(config_of("rollout.sleep=always"), CPU)


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system does not say which cores a process may use"
)
def test_the_cores_counted_are_those_that_this_process_may_use():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert build.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert build.usable_cores() == len(before)


def test_changes_alone_are_refused_for_engines_that_discard_or_quantize_their_weights():
    delta, servers = "weight_sync.delta=true", "rollout.servers=[http://a:1]"
    for overrides, device in (([], CPU), ([servers], GPU), (["rollout.sleep=never"], GPU)):
        config = config_of(delta, *overrides)
        refuse_delta(config, shares_device(config, device))
    with pytest.raises(
        ConfigError, match="weight_sync.delta=true .*rollout.sleep=auto.* weight_sync.delta=false, keep"
    ):
        refuse_delta(config_of(delta), shares_device(config_of(delta), GPU))
    with pytest.raises(
        ConfigError, match="weight_sync.delta=true .* rollout.vllm.quantization='fp8' .*=false, or drop"
    ):
        refuse_delta(config_of(delta, servers, "rollout.vllm={quantization: fp8}"), False)
    refuse_delta(config_of("rollout.vllm={quantization: fp8}"), True)


def test_changes_alone_are_refused_for_the_trainers_own_engine():
    config = config_of("weight_sync.delta=true", "rollout.engine=transformers")
    with pytest.raises(ConfigError, match="weight_sync.delta=true .* rollout.engine=transformers .*=false, or take"):
        validate.check_delta(config)
    validate.check_delta(config_of("weight_sync.delta=true"))


@pytest.mark.parametrize(("fields", "wanted"), [({}, True), ({"attn_temperature_tuning": False}, False)])
def test_llama_4s_scale_by_position_is_on_in_vllm_where_config_json_says_so(tmp_path, fields, wanted):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4_text"} | fields))
    assert family_arguments(str(tmp_path)) == {"override_generation_config": {"attn_temperature_tuning": wanted}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert family_arguments(str(tmp_path)) == {}


@pytest.mark.parametrize(
    ("fields", "dtype", "device", "wanted"),
    [
        ({"kv_lora_rank": 512}, "float32", CPU, {"attention_backend": "CPU_MLA"}),
        ({"kv_lora_rank": 512}, "bfloat16", CPU, {}),
        ({"kv_lora_rank": 512}, "float32", GPU, {}),
        ({}, "float32", CPU, {}),
    ],
)
def test_latent_attention_on_a_cpu_gets_the_kernel_that_takes_its_dtype(tmp_path, fields, dtype, device, wanted):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"} | fields))
    assert latent_arguments(config_of(f"model.hf_path={tmp_path}", f"model.dtype={dtype}"), device) == wanted
