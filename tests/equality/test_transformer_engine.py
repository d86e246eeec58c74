"""Transformer Engine's layer spec, on a stand-in of its modules, equals the torch spec over the same weights.

The stand-in (tests/stand_ins/) computes in plain torch and refuses each call that the real modules' signatures and
checks would refuse. It has processes of its own, as Megatron-Core decides at import what is installed. Not covered:
kernels.
"""

import contextlib
import itertools
import os
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_rl.backend import optimizer, packing
from megatron_rl.model import build, parts, weight_gradients
from megatron_rl.model.attention import packed as attention
from tests.equality.engine_rig import ENGINE, engine_workers
from tests.equality.layouts import CP2, SHARDED, TOLERANCE
from tests.equality.rig import equal_by_name, open_rig, ragged_advantages
from tests.equality.rows import measured as measured_on
from tests.equality.rows import row
from tests.equality.saved_steps import save_and_load
from tests.equality.shared_samples import SHARED, advantages_of, group_samples
from tests.pairwise import quick
from tests.reference import MIXTURES, file_weights, near_policy, relative_error
from tests.stand_ins.transformer_engine import linears

pytestmark = pytest.mark.distributed
NUM_SAMPLES, STEPS = 7, 2
SETTINGS = (*("optimizer.lr=0.0003", "optimizer.weight_decay=0.1", "optimizer.clip_grad=0.5"),
            "plan.max_tokens_per_microbatch=48")
UNSHARED, TORCH = "plan.share_prompts=false", ("model.layer_spec=torch",)
# each fused function, switched off by its own field
FUSIONS = ("apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion")
OFF = tuple(f"megatron.transformer.{name}=false" for name in FUSIONS)
ON_A_GPU = (*("TP2-SP qwen2_untied", "CP2 qwen3", "recompute qwen3", "one glm4_moe"),
            *("one qwen3", "DP2-sharded-overlap qwen2_tied", "EP2 qwen3_moe"))
RESUMED = {"engine": ("one qwen3", ENGINE, ENGINE),
           "torch-to-engine": ("one qwen2_tied", TORCH, ENGINE),
           "engine-to-torch": ("one qwen2_tied", ENGINE, TORCH),
           "mixture": ("EP2 qwen3_moe", ENGINE, ENGINE),
           # the norm before a mixture has two names, and all layers' tensors one key or each layer's its own
           "mixture-torch-to-engine": ("EP2 qwen3_moe", TORCH, ENGINE),
           "mixture-engine-to-torch": ("one qwen3_moe", ENGINE, TORCH),
           "mixed-torch-to-engine": ("one glm4_moe", TORCH, ENGINE),
           "mixed-engine-to-torch": ("EP2 glm4_moe", ENGINE, TORCH),
           "latent-torch-to-engine": ("TP2-SP deepseek_v3", TORCH, ENGINE),
           "latent-engine-to-torch": ("one moonlight", ENGINE, TORCH),
           "adapters": ("EP2-LoRA glm4_moe", ENGINE, ENGINE),
           "adapters-torch-to-engine": ("EP2-LoRA glm4_moe", TORCH, ENGINE)}
RESUMED_QUICK = ("torch-to-engine", "mixture", "mixture-engine-to-torch", "mixed-torch-to-engine",
                 "adapters-torch-to-engine")
HALF = ("TP2-SP qwen2_untied", "EP2 qwen3_moe", "CP2 qwen3", "TP2-SP qwen3_next")


def measured(family: str, *overrides: str, grouped: bool = False) -> dict:
    """Return one layer spec's log-probs, gradient, and weights and norms of two steps. grouped: over shared prompts."""
    samples, groups = group_samples()
    advantages = advantages_of(len(samples)) if grouped else ragged_advantages(NUM_SAMPLES)
    with open_rig(family, *SETTINGS, *overrides, samples=NUM_SAMPLES, total_steps=STEPS) as rig:
        if grouped:
            rig.take(near_policy(rig.model, samples), groups)
        found = {"weights": rig.weights(), "files": {k: v.clone() for k, v in file_weights(rig.model).items()}}
        plan = rig.plan(advantages, drops=True)
        found["gradient"] = rig.gradient(advantages, plan)
        rig.accumulate(advantages, plan)
        found["twice"] = rig.gradient(advantages, plan)
        found["logprobs"] = rig.logprobs()
        found["norms"] = [x.grad_norm for _ in range(STEPS) for x in rig.step(advantages, drops=True)]
        found["later weights"] = rig.weights()
    return found


def gaps(engine: dict, torch_layers: dict) -> dict[str, float]:
    """Return the largest gap of each of ``measured``'s values."""
    twice = {name: 2 * x for name, x in torch_layers["gradient"].items()}
    return {"log-probs": float(np.abs(engine["logprobs"] - torch_layers["logprobs"]).max()),
            "gradient": relative_error(engine["gradient"], torch_layers["gradient"]),
            "gradient of two calls": relative_error(engine["twice"], twice),
            "norms": float(np.abs(np.array(engine["norms"]) / torch_layers["norms"] - 1).max()),
            "later weights": relative_error(engine["later weights"], torch_layers["later weights"])}


def both(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> dict:
    """Return the largest gaps between the two specs, whether files' weights came back, and the stand-in's calls."""
    from tests.stand_ins.transformer_engine.contract import CALLS

    grouped = SHARED in overrides
    torch_layers = measured(family, *overrides, *TORCH, UNSHARED, grouped=grouped)
    CALLS.clear()
    engine = measured(family, *ENGINE, *overrides, grouped=grouped)
    return {"exported": equal_by_name(engine["weights"], torch_layers["weights"])
            and all(torch.equal(engine["files"][name], x) for name, x in engine["weights"].items()),
            "gaps": gaps(engine, torch_layers),
            "calls": set(CALLS)}


CASES = (
    *("one qwen3", "one llama3_rope", "TP2-SP qwen2_untied", "PP2-VPP2 qwen2_untied", "CP2 qwen3"),
    *("DP2-sharded-overlap qwen2_tied", "recompute qwen3", "one glm4_moe", "TP2-SP deepseek_v3", "TP2-SP qwen3_moe"),
    *("EP2-permuted qwen3_moe", "TP2-SP-EP2-ETP1 qwen3_moe", "shared qwen3_moe", "TP2-SP-shared qwen2_untied"),
    "recompute-shared qwen3",
)
LONG = (*("one qwen2_untied", "one qwen3_moe", "TP2 qwen3", "PP2 qwen2_tied", "EP2 qwen3_moe", "one moonlight"),
        *("shared moonlight", "one qwen3_5_text", "TP2-SP-shared qwen3_next"),
        *("TP2-SP-ETP1 qwen3_moe", "shared qwen2_untied", "PP2-shared qwen2_tied"),
        "DP2-sharded-overlap-shared qwen2_tied")
LATENTS = ("deepseek_v3", "moonlight")


@pytest.mark.parametrize("name", quick((*CASES, *LONG), *CASES))
def test_engine_spec_equals_torch_spec(engine_pool, name):
    """Weights go in and out to the bit; everything else is equal but for the order of float32 sums.

    Torch's layers share no prompt: where the engine's do, a response's keys are the prompt's and its own, and its
    angles go on from the prompt's, pads or none between.
    """
    family = name.split()[1]
    for found in measured_on(engine_pool, name, both):
        assert found["exported"]
        assert max(found["gaps"].values()) < TOLERANCE, found["gaps"]
        reached = {f"{x}.forward" for x in ("LayerNormLinear", "DotProductAttention")}
        reached |= {"added to main_grad"} | (set() if family in LATENTS else {"apply_rotary_pos_emb"})
        assert found["calls"] >= reached | ({"GroupedLinear.forward"} if family in MIXTURES else set())
        assert ("moe_permute_with_probs" in found["calls"]) == ("permuted" in name)


@pytest.mark.long(seconds=20)
def test_oldest_engine_equals_torch_spec():
    """Transformer Engine 2.3 has other names and signatures, and takes other ways through Megatron-Core."""
    with engine_workers("2.3.0") as workers:
        for name in ("one qwen2_untied", "one qwen3_moe", "TP2-SP qwen2_untied", "CP2 qwen3", "EP2-permuted qwen3_moe",
                     "TP2-SP qwen3_next"):
            for found in measured_on(workers, name, both):
                assert found["exported"] and max(found["gaps"].values()) < TOLERANCE, (name, found["gaps"])


def fused(rank: int, world: int) -> dict[str, dict]:
    """Return what is fused under each layer spec, and what the user's fields make of it."""
    found = {}
    cases = {"torch": TORCH, "engine": ENGINE, "shared": (*ENGINE, SHARED), "off": (*ENGINE, *OFF)}
    for name, overrides in cases.items():
        with open_rig("qwen2_tied", *overrides) as rig:
            model = rig.backend.chunks[0].module
            linears = [x for x in model.modules() if hasattr(x, "fuse_wgrad_accumulation")]
            found[name] = {"rotary": model.config.apply_rope_fusion,
                           "SwiGLU": model.config.bias_activation_fusion,
                           "weight gradients": [x.fuse_wgrad_accumulation for x in linears],
                           "others": (model.config.bias_dropout_fusion, model.config.moe_permute_fusion)}
    return found


def test_fusions_are_on_under_the_engine_unless_switched_off(engine_pool):
    (found,) = engine_pool.run(1, fused)
    off = {"rotary": False, "SwiGLU": False, "weight gradients": [False] * 8, "others": (False, False)}
    assert found["torch"] == {**off, "weight gradients": []}
    assert found["engine"] == {**off, "rotary": True, "SwiGLU": True, "weight gradients": [True] * 8}
    assert found["shared"] == {**found["engine"], "rotary": False}  # the kernel takes no position of a token's own
    assert found["off"] == off


def unfused(rank: int, world: int) -> dict[str, float]:
    return gaps(measured("qwen3", *ENGINE), measured("qwen3", *ENGINE, *OFF))


def test_fused_equals_unfused(engine_pool):
    (found,) = engine_pool.run(1, unfused)
    assert max(found.values()) < TOLERANCE, found


def as_on_a_gpu(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> tuple[dict, set[str]]:
    """Return the gaps between torch's layers as on a GPU in bfloat16 and as they are here, and what ran so."""
    plain, ran = measured(family, *overrides, *TORCH, grouped=True), set()

    def noted(name: str, function: Callable) -> Callable:
        return lambda *given: (ran.add(name), function(*given))[1]

    with (
        mock.patch.multiple(build, half_on_gpu=lambda dtype: True, compiler_fault=lambda: "not compiled here"),
        mock.patch.object(parts, "half_on_gpu", lambda dtype: True),
        mock.patch.object(weight_gradients, "add_product", noted("weight gradients", weight_gradients.add_product)),
        mock.patch.object(attention, "turn", noted("rotary", attention.turn)),
    ):
        return gaps(measured(family, *overrides, *TORCH, SHARED, grouped=True), plain), ran


@pytest.mark.parametrize("name", quick(ON_A_GPU, *ON_A_GPU[:4]))
def test_torch_layers_as_on_a_gpu_equal_the_plain_ones(pool, name):
    """Weight gradients within the product, angles within the attention (half of each head in GLM-4.5), prompts once."""
    for found, ran in measured_on(pool, name, as_on_a_gpu):
        assert ran == {"weight gradients", "rotary"} and max(found.values()) < TOLERANCE, (found, ran)


def by_engine_adam(rank: int, world: int, overrides: tuple[str, ...]) -> dict[str, float]:
    """Return the gaps between steps by the stand-in's FusedAdam and by torch's AdamW."""
    from tests.stand_ins.transformer_engine.optimizers import FusedAdam

    plain = measured("qwen2_tied", *overrides)
    with mock.patch.object(optimizer, "_adam_class", lambda name: FusedAdam):
        return gaps(measured("qwen2_tied", *overrides, "optimizer.kernel=transformer_engine"), plain)


@pytest.mark.parametrize("distributed", quick(["false", "true"], "true"))
def test_engine_adam_takes_the_same_steps(engine_pool, distributed):
    for found in engine_pool.run(2, by_engine_adam, (f"optimizer.distributed={distributed}",)):
        assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("name", quick(RESUMED, *RESUMED_QUICK))
def test_checkpoint_goes_on_under_the_engine(engine_pool, tmp_path, name):
    """Weights and adapters come back to the bit, from the other layer spec too; with the same so do the next steps."""
    case, first, second = RESUMED[name]
    world, family, overrides = row(case)
    given = [(*SHARDED, *overrides, *spec) for spec in (first, second)]
    for found in engine_pool.run(world, save_and_load, str(tmp_path), *given, family, 3):
        assert found["loaded"] and found["export"] == 0 and found["error"] < TOLERANCE, found
        assert found["moved"] > 1e-4 and (found["next"] or first != second), found


def resumed_by_engine_adam(rank: int, world: int, root: str, topology: tuple[str, ...]) -> dict[str, object]:
    from tests.stand_ins.transformer_engine.optimizers import FusedAdam

    with mock.patch.object(optimizer, "_adam_class", lambda name: FusedAdam):
        return save_and_load(rank, world, root, topology, topology, "qwen2_tied", 3)


@pytest.mark.parametrize("sharded", quick([True, False], True))
def test_checkpoint_goes_on_under_the_engines_adam(engine_pool, tmp_path, sharded):
    """Its count of steps, one per group and none per parameter, comes back: the next steps are equal to the bit."""
    topology = (f"optimizer.distributed={str(sharded).lower()}", "optimizer.kernel=transformer_engine")
    for found in engine_pool.run(2, resumed_by_engine_adam, str(tmp_path), topology):
        assert found["loaded"] and found["next"] and found["rate"], found


def half_precision(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> dict[str, float]:
    """Return the gaps between the two specs in bfloat16, under all that attention checks."""
    with mock.patch.dict(os.environ, STAND_IN_ANY_DTYPE="0"):
        half = (*overrides, "model.dtype=bfloat16")
        return gaps(measured(family, *half, *ENGINE), measured(family, *half, *TORCH))


@pytest.mark.parametrize("name", quick(HALF, HALF[1]))
def test_bfloat16_is_as_close_as_its_rounding(engine_pool, name):
    for found in measured_on(engine_pool, name, half_precision):
        assert found["log-probs"] < 0.1  # seen 8e-3 to 4e-2
        assert max(found["gradient"], found["gradient of two calls"], found["norms"]) < 0.05  # seen 3e-3 to 2e-2
        assert found["later weights"] < 5e-3, found  # an ulp of bfloat16, 2^-8; seen 5e-4 to 1e-3


def _bounds_with(**changes: Callable) -> Callable[[], contextlib.AbstractContextManager]:
    """Plant packed sequences' bounds of which the named fields are changed."""
    plain = attention._bounds

    def changed(*given) -> dict:
        fields = plain(*given)
        return fields | {name: change(fields[name]) for name, change in changes.items()}

    return lambda: mock.patch.object(attention, "_bounds", changed)


def _nothing(field: object) -> None: ...


def _contiguous(lengths, rank: int, size: int) -> np.ndarray:
    """Cut sequences among context ranks in their order, where Transformer Engine's ranks hold a chunk of either end."""
    starts = np.cumsum([0, *lengths])
    return np.concatenate([np.split(np.arange(a, b), size)[rank] for a, b in itertools.pairwise(starts)])


def _keeping(name: str) -> contextlib.AbstractContextManager:
    """Have Megatron-Core hand on a field of the packed sequences that attention does not take."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    forward = TEDotProductAttention.forward

    def keeping(module, *given, **named):
        module.kept_packed_seq_params.add(name)
        return forward(module, *given, **named)

    return mock.patch.object(TEDotProductAttention, "forward", keeping)


FAULTS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager], tuple[str, ...], str]] = {
    "unknown keyword": (lambda: _keeping("layout"), (), "unexpected keyword argument 'layout'"),
    "int64 bounds": (_bounds_with(cu_seqlens_q=torch.Tensor.long), (), "in dtype torch.int32"),
    "no bounds": (_bounds_with(cu_seqlens_kv=_nothing), (), "no sbhd of 3 dimensions"),
    "longest on the device": (_bounds_with(max_seqlen_kv=torch.tensor), (), "must be an int"),
    "no padded bounds": (_bounds_with(cu_seqlens_q_padded=_nothing, cu_seqlens_kv_padded=_nothing),
                         (CP2,),
                         "padded can not be None for context parallelism"),
    "float32": (lambda: mock.patch.dict(os.environ, STAND_IN_ANY_DTYPE="0"), (), "no attention backend"),
}


def with_fault(rank: int, world: int, name: str) -> str | None:
    """Return what a run with a planted fault was refused with."""
    plant, overrides, _ = FAULTS[name]
    try:
        with plant():
            measured("qwen2_untied", *overrides, *ENGINE)
    except TypeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_refused(engine_pool, name):
    _, overrides, wanted = FAULTS[name]
    for found in engine_pool.run(2 if overrides else 1, with_fault, name):
        assert found is not None and wanted in found


def in_order(rank: int, world: int) -> dict[str, float]:
    """Return the gaps to the torch spec where context ranks hold sequences in their order, which no check sees."""
    plain = measured("qwen2_untied", CP2, *TORCH)
    with mock.patch.object(packing, "context_positions", _contiguous):
        return gaps(measured("qwen2_untied", CP2, *ENGINE), plain)


def test_context_ranks_in_another_order_show(engine_pool):
    for found in engine_pool.run(2, in_order):
        assert found["log-probs"] > 0.01 and found["gradient"] > 0.01, found


def test_signatures_refuse_what_the_real_ones_refuse():
    """Both versions' facts bind a call as Python would: an argument too many and one too few raise."""
    sizes = dict(in_features=4, out_features=4, device="cpu", params_dtype=torch.float32)
    x = torch.zeros(2, 4)
    assert linears.Linear(**sizes)(x).shape == (2, 4)
    with pytest.raises(TypeError, match="'in_features'"):
        linears.Linear(out_features=4, device="cpu", params_dtype=torch.float32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'hidden_size'"):
        linears.Linear(**sizes, hidden_size=4)
    with pytest.raises(TypeError, match="missing a required argument: 'm_splits'"):
        linears.GroupedLinear(num_gemms=1, bias=False, **sizes)(x)
    with pytest.raises(TypeError, match="beyond the stand-in"):
        linears.Linear(**sizes, ub_overlap_ag=True)
