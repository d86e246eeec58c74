"""Adapters travel alone to engines that have the weights beside them, and with those weights to every other."""

import pathlib
from collections.abc import Iterator

import pytest
import torch
from transformers import Qwen2Config

from megatron_rl.config import Config, load_config
from megatron_rl.errors import ConfigError, EngineError
from megatron_rl.model.hf_config import read_shape
from megatron_rl.rollout.engines.engine import NO_WEIGHTS, SyncReport
from megatron_rl.rollout.engines.placement import refuse_mixture, refuse_sharing, shares_device
from megatron_rl.rollout.engines.replica import ReplicaLost
from megatron_rl.rollout.vllm.arguments import adapter_arguments, engine_arguments
from megatron_rl.rollout.weight_sync.adapter_encoder import AdapterEncoder
from megatron_rl.rollout.weight_sync.sender import WeightSender
from megatron_rl.rollout.weight_sync.transport import is_adapter
from megatron_rl.serve.server import check_config
from megatron_rl.validate import validate_config
from megatron_rl.weights.mapping import adapter_entries, stage_entries
from tests.unit.rollout.fake_engine import WillingEngine, manager_of
from tests.unit.rollout.receiving_engine import Engine, broken_after, num_bytes_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ALONE = ("rollout.engine=vllm", "lora.rank=5", "lora.alpha=2.5", "weight_sync.adapters=alone")
WEIGHTS = {"model.layers.0.mlp.down_proj.weight": torch.ones(4, 6), "model.norm.weight": torch.ones(4)}
PAIR = {
    "model.layers.0.mlp.down_proj.lora_A.weight": torch.ones(5, 6),
    "model.layers.0.mlp.down_proj.lora_B.weight": torch.ones(4, 5),
}
WHOLE = {**WEIGHTS, **PAIR}
ADAPTER = {"rank": 5, "alpha": 2.5}
SENDER = {"bucket_bytes": 256, "encoder": lambda: AdapterEncoder(**ADAPTER)}


def config_of(*overrides: str) -> Config:
    return load_config(None, [*ALONE, *overrides])


def test_an_engine_that_has_the_weights_is_sent_the_pairs_alone(sync: WeightSender) -> None:
    """Its end says rank and alpha, and it is told to use them after the finish, which would drop them."""
    engine = Engine("one")
    assert sync.lacks_weights(engine)
    whole = sync.deliver(iter(WHOLE.items()), 1, [engine])
    assert not whole.failed and not sync.lacks_weights(engine) and list(engine.held) == list(WHOLE)
    engine.asked.clear()
    alone = sync.deliver(iter(PAIR.items()), 2, [engine])
    assert not alone.failed and not sync.lacks_weights(engine) and list(engine.held) == list(PAIR)
    assert alone.num_bytes == num_bytes_of(PAIR) and engine.end["adapter"] == ADAPTER
    asked = [x for x in engine.asked if x in ("finish_weight_update", "use_adapter", "reset_prefix_cache")]
    assert asked == ["finish_weight_update", "use_adapter", "reset_prefix_cache"]


def test_an_engine_that_is_new_was_forgotten_or_failed_lacks_the_weights(sync: WeightSender) -> None:
    one, other = Engine("one"), Engine("other")
    assert not sync.deliver(iter(PAIR.items()), 1, [one]).failed and sync.lacks_weights(one)  # it never had them
    sync.deliver(iter(WHOLE.items()), 1, [one, other])
    sync.forget(one)
    assert sync.lacks_weights(one) and not sync.lacks_weights(other)
    other.lies = {"checksum": "0" * 32}
    assert sync.deliver(iter(PAIR.items()), 2, [other]).failed
    assert sync.lacks_weights(other)

    sync.deliver(iter(WHOLE.items()), 3, [one])
    with pytest.raises(EngineError, match="the exporter broke"):
        sync.deliver(broken_after(WHOLE, 2), 4, [one])
    assert sync.lacks_weights(one)


def test_an_engine_that_does_not_use_its_adapters_has_no_version(sync: WeightSender, monkeypatch) -> None:
    engine = Engine("one")
    control = engine.control

    def refuses(method: str, arguments: dict, timeout_s: float) -> object:
        if method == "use_adapter":
            raise ReplicaLost("one is gone")
        return control(method, arguments, timeout_s)

    monkeypatch.setattr(engine, "control", refuses)
    report = sync.deliver(iter(WHOLE.items()), 1, [engine])
    assert report.failed == {"one": "one is gone"} and sync.lacks_weights(engine)


def test_pairs_are_told_by_their_names_and_without_them_a_sync_is_what_it_was(senders) -> None:
    shape = read_shape(Qwen2Config(num_hidden_layers=2), layer_spec="torch").with_adapters(config_of().lora)
    assert all(is_adapter(name) for entry in adapter_entries(shape, 0, 1) for name in entry.hf)
    assert not any(is_adapter(name) for entry in stage_entries(shape, 0, 1) for name in entry.hf)
    engine = Engine("one")
    assert not senders(bucket_bytes=256).deliver(iter(WEIGHTS.items()), 1, [engine]).failed
    assert "adapter" not in engine.end and "use_adapter" not in engine.asked


class Choosy(WillingEngine):
    """Says whether it lacks the weights, and keeps the names that it was sent; syncs: which ones come through."""

    is_elsewhere = False

    def __init__(self, *syncs: bool) -> None:
        super().__init__()
        self.syncs, self.names, self.lacks_weights = list(syncs), [], True

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        sent = dict(tensors)
        self.names.append(list(sent))
        self.lacks_weights = not self.syncs.pop(0)
        failed = {"the engine": "a checksum differs"} if self.lacks_weights else {}
        counts = {"num_tensors": len(sent), "num_bytes": num_bytes_of(sent)}
        return SyncReport(version=version, **counts, seconds=0.1, failed=failed)

    def take_report(self, version, failed, lost) -> None:
        self.weight_version = NO_WEIGHTS if failed else version


def test_the_manager_sends_the_weights_where_an_engine_lacks_them(alone) -> None:
    """It sends them to a fresh engine, pairs alone for the next versions, and both again after a sync that failed."""
    engine, now = Choosy(True, True, False, True), [0]
    manager = manager_of(engine, *ALONE, version=lambda: now[0], weights=WEIGHTS, adapters=PAIR)
    for now[0] in range(3):
        manager.sync_weights()
    assert engine.names == [list(WHOLE), list(PAIR), list(PAIR), list(WHOLE)]
    assert manager.take_metrics()["perf/weight_sync_bytes"] == num_bytes_of(WHOLE)


def arguments_of(config: Config, device: torch.device) -> dict[str, object]:
    sections = config.model, config.rollout, config.weight_sync, config.lora
    return engine_arguments(*sections, max_prompt_tokens=config.data.max_prompt_tokens, seed=0, device=device)


@pytest.mark.parametrize("rank, most", [(1, 1), (2, 8), (8, 8), (9, 16), (64, 64), (129, 256), (257, 320), (512, 512)])
def test_an_engine_is_built_for_the_next_rank_that_vllm_knows(rank: int, most: int) -> None:
    found = arguments_of(config_of(f"lora.rank={rank}", "lora.targets=[linear_qkv,linear_fc2]"), CPU)
    assert (found["enable_lora"], found["max_loras"], found["max_lora_rank"]) == (True, 1, most)
    assert found["lora_target_modules"] == ["q_proj", "k_proj", "v_proj", "down_proj"]
    merged = arguments_of(config_of(f"lora.rank={rank}", "weight_sync.adapters=merged"), CPU)
    assert not [name for name in merged if "lora" in name]


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["lora.rank=null"], "lora.rank=null, rollout.engine=vllm.*weight_sync.adapters=merged"),
        (["rollout.engine=transformers"], "lora.rank=5, rollout.engine=transformers"),
        (["lora.rank=513"], "lora.rank=513 is more than vLLM's engines hold, 512"),
        (["rollout.servers=[http://127.0.0.1:8000]"], r"rollout.servers=\['http://127.0.0.1:8000'\]: a vLLM server"),
    ],
)
def test_adapters_alone_where_they_cannot_be_are_refused(arithmetic: pathlib.Path, overrides, words) -> None:
    given = (f"model.hf_path={arithmetic}/model", "reward.functions=arithmetic")
    validate_config(config_of(*given))
    with pytest.raises(ConfigError, match=words):
        validate_config(config_of(*given, *overrides))


def test_what_does_not_go_with_adapters_alone_is_refused(arithmetic: pathlib.Path) -> None:
    given = (f"model.hf_path={arithmetic}/model", "reward.functions=arithmetic")
    for name, value in {"enable_lora": "true", "max_loras": 2, "max_lora_rank": 64, "lora_dtype": "bfloat16"}.items():
        with pytest.raises(ConfigError, match=f"rollout.vllm.{name}=.* must not be set"):
            validate_config(config_of(*given, f"rollout.vllm={{{name}: {value}}}"))
    with pytest.raises(ConfigError, match="weight_sync.adapters='both'"):
        config_of("weight_sync.adapters=both")
    alone = config_of()
    with pytest.raises(ConfigError, match="weight_sync.adapters=alone .*rollout.sleep=never"):
        refuse_sharing(alone.rollout, alone.weight_sync, shares_device(alone.rollout, GPU))
    never = config_of("rollout.sleep=never").rollout
    refuse_sharing(never, alone.weight_sync, shares_device(never, GPU))
    settings = (alone.weight_sync, alone.lora)
    on_either = [adapter_arguments(*settings, "bfloat16", on_gpu=on_gpu) for on_gpu in (True, False)]
    assert on_either[0] == on_either[1]
    with pytest.raises(ConfigError, match="model.dtype=float32.*model.dtype=bfloat16"):
        adapter_arguments(*settings, "float32", on_gpu=True)
    assert adapter_arguments(*settings, "float32", on_gpu=False)["lora_dtype"] == "auto"
    with pytest.raises(ConfigError, match="a mixture of 8 experts"):
        refuse_mixture(alone.weight_sync, 8)
    refuse_mixture(alone.weight_sync, 0)
    refuse_mixture(config_of("weight_sync.adapters=merged").weight_sync, 8)
    served = config_of(f"model.hf_path={arithmetic}/model")
    with pytest.raises(ConfigError, match="weight_sync.adapters=alone is for one policy"):
        check_config(served.model, served.rollout, served.weight_sync, served.loss, served.sft, served.optimizer,
                     served.serve)
