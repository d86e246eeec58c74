"""Compares megatron-bridge's own names of a family, and its order of q, k and v, with those of weights/mapping.py.

    python tests/bridge_oracle.py        prints a JSON object: family → [tensors compared, differences]

It runs in a process of its own: Transformer Engine, which megatron-bridge imports by name and a CPU cannot run, is
stood in for by empty modules, once Megatron-Core has been imported without it. No model is built, so none of them is
ever called. It has run with megatron-bridge 0.3.1 and megatron-core 0.16.1, and needs einops and triton beside them.
"""

import importlib.machinery
import json
import sys
import types
import warnings
from types import SimpleNamespace

warnings.filterwarnings("ignore")

import torch  # noqa: E402

from megatron_rl.checkpoint.megatron_lm import stored_layers  # noqa: E402
from megatron_rl.model.hf_config import read_shape  # noqa: E402  (imports Megatron-Core)
from megatron_rl.weights.entry import Layout  # noqa: E402
from megatron_rl.weights.mapping import hf_size, load_shard, merge_shards  # noqa: E402
from tests.reference import tiny_config  # noqa: E402

PARTS = ("", ".pytorch", ".common", ".common.recipe", ".pytorch.fp8", ".pytorch.tensor")


class Empty:
    """Has every attribute: a class that has every attribute, and a torch module, since some are derived from."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return EmptyClass(name, (torch.nn.Module,), {})


class EmptyClass(Empty, type):
    pass


class EmptyModule(Empty, types.ModuleType):
    pass


def stand_in_for_transformer_engine() -> None:
    for name in (f"transformer_engine{part}" for part in PARTS):
        module = EmptyModule(name)
        module.__version__, module.__path__ = "2.3.0", []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def registries() -> dict:
    from megatron.bridge.models.llama.llama_bridge import LlamaBridge
    from megatron.bridge.models.mistral.mistral_bridge import MistralBridge
    from megatron.bridge.models.qwen.qwen2_bridge import Qwen2Bridge
    from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge
    from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge

    bridges = dict(qwen2_tied=Qwen2Bridge, qwen2_untied=Qwen2Bridge, qwen3=Qwen3Bridge, qwen3_moe=Qwen3MoEBridge)
    bridges |= dict(llama=LlamaBridge, mistral=MistralBridge)
    return {family: bridge().mapping_registry() for family, bridge in bridges.items()}


def compare(family: str, registry) -> tuple[int, list[str]]:
    """Return how many Megatron tensors were looked up, and the differences found."""
    from megatron.bridge.models.conversion.param_mapping import merge_qkv_weights, split_qkv_weights

    config = tiny_config(family)
    shape = read_shape(config, layer_spec="transformer_engine")
    heads = dict(num_attention_heads=shape.num_heads, num_query_groups=shape.num_kv_heads, kv_channels=shape.head_dim)
    provider = SimpleNamespace(hidden_size=shape.hidden_size, attention_output_gate=False, **heads)
    count, differences = 0, []
    for stored in (stored for layer in stored_layers(shape) for stored in layer):
        name = stored.keys()[0] if stored.layer is None else f"decoder.layers.{stored.layer}.{stored.name}"
        if stored.expert is not None:
            name = name.replace("experts.experts.", "experts.") + str(stored.expert)
        found = registry.megatron_to_hf_lookup(name)
        theirs = None if found is None else found.hf_param
        ours = stored.entry.hf
        count += 1
        if (tuple(theirs.values()) if isinstance(theirs, dict) else (theirs,)) != ours:
            differences.append(f"{name}: {ours} here, {theirs} there")
        if stored.entry.layout is Layout.QKV:
            parts = {x: torch.randn(hf_size(shape, x)) for x in ours}
            merged = merge_qkv_weights(provider, *parts.values())
            mine = load_shard(stored.entry, shape, lambda x, d, a, b, p=parts: p[x].narrow(d, a, b - a), 0, 1)
            if not torch.equal(merged, mine):
                differences.append(f"{name}: another order of q, k, v")
            if merged.dim() > 1:
                split = split_qkv_weights(provider, merged)
                mine = [x for _, x in merge_shards(stored.entry, shape, [merged])]
                if not all(torch.equal(a, b) for a, b in zip(split, mine, strict=True)):
                    differences.append(f"{name}: another split of q, k, v")
    return count, differences


if __name__ == "__main__":
    stand_in_for_transformer_engine()
    print(json.dumps({family: compare(family, registry) for family, registry in registries().items()}))
