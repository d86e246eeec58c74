"""The engine of each rank, the arguments and environment of its process, and the settings that are refused."""

import json
import os
import shlex
from collections.abc import Callable
from functools import partial

import pytest
import torch

from megatron_rl.commands.serve_vllm import refuse_lossy_speculation
from megatron_rl.config import Config, load_config
from megatron_rl.distributed.child_process import LAUNCHER_VARIABLES
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.engines.placement import EngineRole, RankLocation, refuse_delta, role_of, shares_device
from megatron_rl.rollout.vllm import build
from megatron_rl.rollout.vllm.arguments import delta_arguments, engine_arguments, family_arguments, latent_arguments
from megatron_rl.rollout.vllm.process_replica import engine_environment
from megatron_rl.validate import rollouts, validate_config

CPU, GPU, URL = torch.device("cpu"), torch.device("cuda", 0), "http://127.0.0.1:8000"


def config_of(*overrides: str) -> Config:
    return load_config(None, ["rollout.engine=vllm", *overrides])


def refused_with(words: str, act: Callable[[], object]) -> None:
    """Assert that a ConfigError says all the words, which ``|`` parts."""
    with pytest.raises(ConfigError) as refused:
        act()
    assert all(word in str(refused.value) for word in words.split("|")), refused.value


def places(overrides: str, world_size: int) -> list[EngineRole]:
    rollout = config_of(*overrides.split()).rollout
    seat = {"world_size": world_size, "local_world_size": world_size}
    return [role_of(rollout, RankLocation(rank=rank, local_rank=rank, **seat)) for rank in range(world_size)]


def own(number: int, engines: int) -> EngineRole:
    return EngineRole(share=(number, engines), starts=True, drives=True)


NONE = EngineRole(share=None, starts=False, drives=False)
TP2, TP4 = "rollout.tensor_parallel=2", "rollout.tensor_parallel=4"


@pytest.mark.parametrize(("overrides", "world_size", "wanted"), [
    ("", 3, [own(0, 3), own(1, 3), own(2, 3)]),
    (TP2, 5, [own(0, 2), NONE, own(1, 2), NONE, NONE]),
    (f"rollout.num_engines=2 {TP2}", 4, [own(0, 2), NONE, own(1, 2), NONE]),
    ("rollout.num_engines=3", 5, [own(0, 3), own(1, 3), own(2, 3), NONE, NONE]),
    (f"rollout.num_engines=1 {TP4}", 4, [own(0, 1), NONE, NONE, NONE]),
    # with servers every rank asks and the first sends weights; with transformers every rank has its model
    *(
        (f"rollout.servers=[{URL}]", n, [EngineRole(share=(k, n), starts=False, drives=not k) for k in range(n)])
        for n in (1, 4)
    ),
    ("rollout.engine=transformers", 2, [EngineRole(share=(k, 2), starts=False, drives=True) for k in range(2)]),
])
def test_the_parts_of_ranks(overrides, world_size, wanted):
    assert places(overrides, world_size) == wanted


@pytest.mark.parametrize(("overrides", "world_size", "node_size", "words"), [
    ("rollout.num_engines=3", 2, 2, "rollout.num_engines=3|need 3 ranks|there are 2"),
    (TP4, 2, 2, f"{TP4}|need 4 ranks|there are 2"),
    (f"rollout.num_engines=2 {TP2}", 3, 3, "num_engines=2|tensor_parallel=2|need 4|there are 3"),
    (TP4, 4, 2, f"{TP4}|the 2 ranks of a node"),
    (TP2, 6, 3, f"engine 1|{TP2}|rank 2 of a node's 3"),
])
def test_engines_that_do_not_fit_are_refused_with_both_numbers(overrides, world_size, node_size, words):
    """Every rank refuses engines that do not fit, naming both numbers, so that none waits for another."""
    for rank in range(world_size):
        seat = RankLocation(rank=rank, world_size=world_size, local_rank=0, local_world_size=node_size)
        refused_with(words, lambda seat=seat: role_of(config_of(*overrides.split()).rollout, seat))


def test_every_prompt_has_one_engine():
    """The shares of the ranks that have an engine are 0 … n−1 of n, whatever the world."""
    for world_size in range(1, 10):
        for width in range(1, world_size + 1):
            for engines in [None, *range(1, world_size // width + 1)]:
                chosen = "" if engines is None else f" rollout.num_engines={engines}"
                found = places(f"rollout.tensor_parallel={width}{chosen}", world_size)
                wanted = engines or world_size // width
                shares = [place.share for place in found if place.share is not None]
                assert shares == [(number, wanted) for number in range(wanted)], (world_size, width, engines)
                starts = [rank for rank, place in enumerate(found) if place.starts]
                assert all(right - left >= width for left, right in zip(starts, [*starts[1:], world_size], strict=True))


def test_an_engines_environment_names_its_gpus_and_its_arguments_are_the_configs():
    of_ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_PROCID", "TORCH_NCCL_X")
    dropped = (*of_ranks, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "VLLM_ALLOW_INSECURE_SERIALIZATION")
    kept = {"PATH": "/bin", "HOME": "/root", "VLLM_CPU_KVCACHE_SPACE": "4"}
    given = dict.fromkeys(dropped, "1") | kept | {"PYTHONPATH": "/of/the/user"}
    before = dict(given)
    found = engine_environment(given, None, 3)
    assert given == before and not set(dropped) & set(found) and kept.items() <= found.items()
    assert not any(LAUNCHER_VARIABLES.fullmatch(name) for name in found)
    assert found["PYTHONPATH"].endswith(":/of/the/user") and found["OMP_NUM_THREADS"] == "3"
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and "CUDA_VISIBLE_DEVICES" not in found
    found = engine_environment({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "OMP_NUM_THREADS": "9"}, ["2", "3"], None)
    assert (found["CUDA_VISIBLE_DEVICES"], found["OMP_NUM_THREADS"]) == ("2,3", "9")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in found
    given = "rollout.vllm={max_num_seqs: 7, enforce_eager: false, block_size: 16}"
    config = config_of(given, "data.max_prompt_tokens=100")
    wanted = {"max_num_seqs": 7, "enforce_eager": False, "block_size": 16, "enable_sleep_mode": False}
    wanted |= {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
    wanted["max_model_len"] = 100 + config.rollout.max_response_tokens
    sections, tokens = (config.model, config.rollout, config.weight_sync, config.lora), config.data.max_prompt_tokens
    found = engine_arguments(*sections, max_prompt_tokens=tokens, seed=config.run.seed, device=CPU)
    assert wanted.items() <= found.items()


@pytest.mark.parametrize(("overrides", "words"), [
    ("rollout.vllm={dtype: float16}", "rollout.vllm.dtype='float16'|model.dtype decides it"),
    ("rollout.vllm={worker_extension_cls: mine}", "rollout.vllm.worker_extension_cls"),
    ("rollout.vllm={logprobs_mode: raw_logprobs}", "rollout.vllm.logprobs_mode"),
    ("rollout.engine=sglang", "rollout.engine='sglang'|vllm"),
    ("rollout.sleep=sometimes", "rollout.sleep='sometimes'|auto"),
    ("rollout.servers=[127.0.0.1:8000]", "'127.0.0.1:8000'|http://host:port"),
    (f"rollout.servers=[{URL}/v1]", f"{URL}/v1|without a path"),
    (f"rollout.servers=[{URL}]|rollout.num_engines=2", f"rollout.num_engines=2|rollout.servers=['{URL}']"),
    (f"rollout.engine=transformers|rollout.servers=[{URL}]", "rollout.servers|rollout.engine=vllm"),
    ("weight_sync.channel=carrier", "weight_sync.channel='carrier'|shared_memory"),
    # a bound of each kind of value; every field's range is tests/unit/config/test_ranges.py's
    ("rollout.gpu_memory_utilization=1.5", "rollout.gpu_memory_utilization=1.5|at most 1"),
    ("rollout.tensor_parallel=0", "rollout.tensor_parallel=0|at least 1"),
    ("rollout.max_logprob_gap=-1", "rollout.max_logprob_gap=-1|above 0|null"),
])
def test_a_setting_that_cannot_work_is_refused(overrides, words):
    refused_with(words, lambda: validate_config(config_of(*overrides.split("|")), rollouts.vllm_arguments))


@pytest.mark.parametrize(("overrides", "words"), [
    ("rollout.vllm={speculative_config: {method: ngram, rejection_sample_method: synthetic}}",
     "rejection_sample_method='synthetic'|another policy"),
    ("rollout.vllm={speculative_config: {method: ngram, rejection_sample_method: block}}",
     "rejection_sample_method='block'"),
    ("rollout.vllm={speculative_config: {method: ngram, synthetic_acceptance_length: 2.5}}",
     "speculative_config.synthetic_acceptance_length=2.5"),
    ("rollout.vllm={speculative_config: {method: dspark, enable_adaptive_verification: true}}",
     "enable_adaptive_verification=True"),
    ("rollout.vllm={speculative_config: {method: eagle3, num_speculative_tokens: 3}}", "method='eagle3'|ngram"),
    ("rollout.vllm={speculative_config: {model: draft, num_speculative_tokens: 3}}", "config.model='draft'"),
    ("rollout.vllm={speculative_config: {num_speculative_tokens: 3}}", "method=None|ngram"),
    ("rollout.vllm={speculative_config: {method: ngram, of_a_later_release: 1}}", "of_a_later_release=1"),
    ("rollout.vllm={speculative_config: ngram}", "speculative_config='ngram'|mapping"),
])
def test_speculation_that_may_sample_from_another_distribution_is_refused(overrides, words):
    refused_with(words, lambda: validate_config(config_of(overrides), rollouts.vllm_arguments))


def test_speculation_that_keeps_the_distribution_is_allowed():
    drafts = "method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4, rejection_sample_method: standard"
    config = config_of(f"rollout.vllm={{speculative_config: {{{drafts}}}}}")
    validate_config(config, rollouts.vllm_arguments)
    assert config.rollout.vllm["speculative_config"]["prompt_lookup_max"] == 4


DRAFTED = "rollout.speculation=draft_model|rollout.vllm={speculative_config: {model: a"


@pytest.mark.parametrize(("overrides", "words"), [
    ("rollout.speculation=history|rollout.vllm={speculative_config: {method: ngram}}", "method='ngram'|=history"),
    ("rollout.speculation=history|rollout.vllm={speculative_config: {model: mine.Drafter}}", "model='mine.Drafter'"),
    ("rollout.speculation=medusa", "rollout.speculation='medusa'|suffix"),
    ("rollout.speculation=eagle3", "rollout.speculation=eagle3|speculative_config.model|folder"),
    ("rollout.speculation=draft_model|rollout.vllm={speculative_config: {model: 3}}", "model=3|folder"),
    ("rollout.speculation=mtp|rollout.vllm={speculative_config: {model: a}}", "model='a'|takes no model"),
    (f"{DRAFTED}, draft_sample_method: gumbel}}}}", "draft_sample_method='gumbel'|greedy, probabilistic"),
    (f"{DRAFTED}, draft_load_config: {{load_format: dummy}}}}}}", "draft_load_config=|files of its folder"),
    (f"{DRAFTED}, rejection_sample_method: synthetic}}}}", "rejection_sample_method='synthetic'|another policy"),
    (f"{DRAFTED}, quantization: fp8}}}}", "quantization='fp8'"),
    (f"{DRAFTED}}}, sleep_preserve_parameter_names: []}}", "sleep_preserve_parameter_names=[]"),
    ("rollout.speculation=draft_model|rollout.engine=transformers", "rollout.engine=transformers|the method is vLLM's"),
    ("rollout.speculation=ngram|rollout.engine=transformers", "rollout.speculation=ngram|=history"),
    ("rollout.speculation=history|rollout.servers=[http://127.0.0.1:8000]", "rollout.servers"),
])
def test_a_drafter_that_cannot_be_used_is_refused(overrides, words):
    def check():
        config = config_of(*overrides.split("|"))
        validate_config(config, rollouts.drafts)
        validate_config(config, rollouts.vllm_arguments)

    refused_with(words, check)


def engine_arguments_in(folder, *overrides: str, device=CPU) -> dict:
    config = config_of(f"model.hf_path={folder}", *overrides)
    sections = (config.model, config.rollout, config.weight_sync, config.lora)
    return engine_arguments(*sections, max_prompt_tokens=9, seed=0, device=device)


def test_drafts_have_room_after_the_longest_request(tmp_path):
    """The fields of vLLM's own section replace the method's; other runs' arguments have none of this."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 40}))
    engine_arguments_of = partial(engine_arguments_in, tmp_path)
    found = engine_arguments_of("rollout.speculation=history", "rollout.max_response_tokens=20")
    assert found["speculative_config"]["method"] == "custom_class"
    assert found["max_model_len"] == 9 + 20 + found["speculative_config"]["num_speculative_tokens"] + 1
    fewer = "rollout.vllm={speculative_config: {num_speculative_tokens: 2}}"
    found = engine_arguments_of("rollout.speculation=ngram", "rollout.max_response_tokens=20", fewer)
    assert found["max_model_len"] == 9 + 20 + 2 + 1 and found["speculative_config"]["prompt_lookup_max"] == 4
    assert "speculative_config" not in engine_arguments_of()
    short = ("rollout.speculation=history", "rollout.max_response_tokens=20", "rollout.vllm={max_model_len: 30}")
    refused_with("max_model_len=30|set 38", lambda: engine_arguments_of(*short))
    long = ("rollout.speculation=history", "rollout.max_response_tokens=30")
    refused_with("max_position_embeddings=40|need 48|lower", lambda: engine_arguments_of(*long))
    refused_with("ngram_gpu|take ngram", lambda: engine_arguments_of("rollout.speculation=ngram_gpu"))
    found = engine_arguments_of("rollout.speculation=ngram_gpu", "rollout.max_response_tokens=20", device=GPU)
    assert found["speculative_config"]["method"] == "ngram_gpu"


@pytest.mark.parametrize("extra", [
    '--speculative-config={"method": "eagle3", "rejection_sample_method": "synthetic"}',
    "--speculative_config.rejection_sample_method synthetic",
    "-sc.enable_adaptive_verification true",
])
def test_a_server_that_samples_from_another_distribution_is_not_started(extra):
    words = shlex.split(extra) if " synthetic" in extra or " true" in extra else [extra]
    with pytest.raises(ConfigError, match="=.* is refused: .*"):
        refuse_lossy_speculation(words)
    refuse_lossy_speculation(["--speculative-config", '{"method": "eagle3", "rejection_sample_method": "standard"}'])


def channel_of(*overrides: str, device: torch.device = CPU, **environment: str) -> str:
    config = config_of(*overrides)
    return build.weight_channel(config.rollout, config.weight_sync, device, environment)


CUDA_IPC, SHARED, BROADCAST = (f"weight_sync.channel={name}" for name in ("cuda_ipc", "shared_memory", "broadcast"))
ELSEWHERE = "rollout.servers=[http://10.0.0.7:8000]"


def test_a_channel_that_engines_cannot_take_and_sleep_without_a_shared_gpu_are_refused():
    """Handles need a GPU and engines of the run's own; NCCL refuses a broadcast between two ranks of one GPU."""
    refused_with("cuda_ipc needs engines of the run's own|this run is on cpu", lambda: channel_of(CUDA_IPC))
    refused_with("on cuda with rollout.servers=['http://1", lambda: channel_of(CUDA_IPC, ELSEWHERE, device=GPU))
    assert channel_of(CUDA_IPC, device=GPU) == "cuda_ipc"
    refused_with(f"{BROADCAST}|NCCL refuses that|channel=auto", lambda: channel_of(BROADCAST, device=GPU))
    assert channel_of(BROADCAST) == channel_of(BROADCAST, ELSEWHERE, device=GPU) == "broadcast"
    assert shares_device(config_of().rollout, torch.device("cuda")) and not shares_device(config_of().rollout, CPU)
    assert not shares_device(config_of("rollout.sleep=never").rollout, torch.device("cuda"))
    assert not shares_device(config_of("rollout.servers=[http://a:1]").rollout, torch.device("cuda"))
    always = config_of("rollout.sleep=always").rollout
    refused_with("rollout.sleep=always needs a GPU", lambda: shares_device(always, CPU))


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_auto_takes_handles_on_a_shared_gpu_alone(device, caplog):
    assert channel_of(device=device) == {"cpu": "shared_memory", "cuda": "cuda_ipc"}[device.type]
    assert channel_of("rollout.sleep=never", device=device) == channel_of(device=device)
    here, elsewhere = (f'rollout.servers=["{URL}","http://{host}"]' for host in ("[::1]:8001", "10.0.0.7:8000"))
    assert channel_of(here, device=device) == "shared_memory" and channel_of(elsewhere, device=device) == "broadcast"
    assert channel_of(SHARED, device=device) == "shared_memory"
    assert not caplog.records


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_users_expandable_segments_keep_auto_from_handles(name, caplog):
    given = {name: "backend:native,expandable_segments:True"}
    assert channel_of(device=GPU, **given) == "shared_memory"
    assert all(word in caplog.text for word in ("uses shared_memory", "cuda_ipc", f"{name}={given[name]}"))
    assert channel_of(device=GPU, **{name: "expandable_segments:False"}) == "cuda_ipc"
    assert channel_of(SHARED, device=GPU, **given) == "shared_memory"
    refused_with(f"expandable segments|{name} is 'backend", lambda: channel_of(CUDA_IPC, device=GPU, **given))
    caplog.clear()
    assert channel_of(**given) == "shared_memory" and not caplog.records


@pytest.mark.parametrize(("width", "first", "visible", "count", "expected"), [
    (1, 3, None, 8, ["3"]),
    (2, 2, "4,5,6,7", 4, ["6", "7"]),
    (1, 0, "GPU-5f", 1, ["GPU-5f"]),  # a process that sees one GPU; its local rank is of no matter
    (1, 1, "0, 2", 2, ["2"]),
])
def test_an_engine_gets_its_ranks_gpus(width, first, visible, count, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert build.engine_devices(width, first, environment, count) == expected


def test_an_engine_wider_than_the_gpus_its_rank_sees_and_one_without_vllm_are_refused(monkeypatch):
    words = "tensor_parallel=2 begins at GPU 0|sees 1|=5|--gpus-per-node"
    refused_with(words, lambda: build.engine_devices(2, 0, {"CUDA_VISIBLE_DEVICES": "5"}, 1))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    refused_with("pip install 'megatron_rl[vllm]'|rollout.servers", build.require_vllm)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores that a process may use are not said here")
def test_the_cores_counted_are_those_that_this_process_may_use():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert build.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert build.usable_cores() == len(before)


def test_changes_alone_are_refused_for_engines_that_discard_or_quantize_their_weights_or_share_the_trainers():
    delta, servers = "weight_sync.delta=true", "rollout.servers=[http://a:1]"
    for overrides, device in (([], CPU), ([servers], GPU), (["rollout.sleep=never"], GPU)):
        config = config_of(delta, *overrides)
        refuse_delta(config.rollout, config.weight_sync, shares_device(config.rollout, device))
    both, quantized = f"{delta}|weight_sync.delta=false", config_of(delta, servers, "rollout.vllm={quantization: fp8}")
    shared = config_of(delta)
    on_gpu = shares_device(shared.rollout, GPU)
    refused_with(
        f"{both}|rollout.sleep=auto", lambda: refuse_delta(shared.rollout, shared.weight_sync, on_gpu)
    )
    refused_with(
        f"{both}|rollout.vllm.quantization='fp8'",
        lambda: refuse_delta(quantized.rollout, quantized.weight_sync, False),
    )
    whole = config_of("rollout.vllm={quantization: fp8}")
    refuse_delta(whole.rollout, whole.weight_sync, True)
    own_engine = config_of(delta, "rollout.engine=transformers")
    refused_with(f"{both}|rollout.engine=transformers", lambda: validate_config(own_engine, rollouts.delta))
    validate_config(shared, rollouts.delta)


@pytest.mark.parametrize(("fields", "wanted"), [({}, True), ({"attn_temperature_tuning": False}, False)])
def test_llama_4s_scale_by_position_is_on_in_vllm_where_config_json_says_so(tmp_path, fields, wanted):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4_text"} | fields))
    assert family_arguments(str(tmp_path)) == {"override_generation_config": {"attn_temperature_tuning": wanted}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert family_arguments(str(tmp_path)) == {}


@pytest.mark.parametrize(("fields", "dtype", "device", "wanted"), [
    ({"kv_lora_rank": 512}, "float32", CPU, {"attention_backend": "CPU_MLA"}),
    ({"kv_lora_rank": 512}, "bfloat16", CPU, {}),
    ({"kv_lora_rank": 512}, "float32", GPU, {}),
    ({}, "float32", CPU, {}),
])
def test_latent_attention_on_a_cpu_gets_the_kernel_that_takes_its_dtype(tmp_path, fields, dtype, device, wanted):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"} | fields))
    config = config_of(f"model.hf_path={tmp_path}", f"model.dtype={dtype}")
    assert latent_arguments(config.model, device) == wanted


@pytest.mark.parametrize(("fields", "overrides", "device", "wanted"), [
    ({}, [], CPU, {"enable_prefix_caching": False}),
    ({}, ["model.dtype=float32"], GPU, {}),
    ({}, ["model.dtype=float32"], CPU, "model.dtype=float32|set model.dtype=bfloat16|rollout.engine=transformers"),
    ({"linear_value_head_dim": 64}, [], CPU, "linear_key_head_dim=128|linear_value_head_dim=64|rollout.engine"),
    ({"linear_conv_kernel_dim": 3}, [], CPU, "linear_conv_kernel_dim=3|4 tokens"),
    ({}, ["rollout.vllm={enable_prefix_caching: true}"], CPU, "rollout.vllm.enable_prefix_caching=true|leave it out"),
    ({}, ["weight_sync.adapters=alone"], GPU, "weight_sync.adapters=alone|qwen3_5_text|weight_sync.adapters=merged"),
    ({"model_type": "qwen3"}, ["weight_sync.adapters=alone"], CPU, {}),
])  # fmt: skip
def test_delta_nets_get_what_vllm_computes_on_a_device_or_are_refused(tmp_path, fields, overrides, device, wanted):
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96, vocab_size=17)
    given = {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]} | sizes | fields
    (tmp_path / "config.json").write_text(json.dumps(given))
    config = config_of(f"model.hf_path={tmp_path}", "model.dtype=bfloat16", *overrides)

    def call():
        return delta_arguments(config.model, config.rollout, config.weight_sync, device)

    if isinstance(wanted, str):
        refused_with(wanted, call)
    else:
        assert call() == wanted
