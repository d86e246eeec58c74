"""The kernels of the gated delta rule: torch's equal a loop over tokens, fla's get the right runs, and the choice."""

import importlib
import importlib.metadata
import logging
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from megatron_rl.distributed.platform import Host
from megatron_rl.errors import ConfigError
from megatron_rl.model.delta_net import kernels
from megatron_rl.model.delta_net.kernels import choose_rule, torch_rule
from megatron_rl.model.delta_net.rule import unit
from megatron_rl.weights.model_shape import DELTA_CHUNK
from tests.unit.model.delta_rules import SHAPE, errors, inputs, layouts, recurrence, results, run_by_run

LAYOUTS = layouts()
CLOSE = 1e-5  # float32 sums in another order; seen 1e-6
FLA = "megatron_rl.model.delta_net.fla"


def loop(*heads: torch.Tensor) -> torch.Tensor:
    return recurrence(*heads)[0]


def token_by_token(q, k, v, g, beta, *, initial_state, output_final_state, use_qk_l2norm_in_kernel, **where):
    """Do what fla-core 0.6's ``chunk_gated_delta_rule`` does, by a loop; the chunks must be those of the runs."""
    cu_seqlens, chunk_indices, chunk_size = (where.pop(x) for x in ("cu_seqlens", "chunk_indices", "chunk_size"))
    assert use_qk_l2norm_in_kernel and not where and {cu_seqlens.dtype, chunk_indices.dtype} == {torch.int32}
    bounds = cu_seqlens.tolist()
    runs = list(zip(bounds[:-1], bounds[1:], strict=True))
    assert bounds[-1] == q.shape[1] and chunk_size == DELTA_CHUNK
    wanted = [[i, start // DELTA_CHUNK] for i, (a, b) in enumerate(runs) for start in range(0, b - a, DELTA_CHUNK)]
    assert chunk_indices.tolist() == wanted
    q, k = (unit(x[0].float()).repeat_interleave(v.shape[2] // q.shape[2], 1) for x in (q, k))
    each = zip(runs, [None] * len(runs) if initial_state is None else initial_state, strict=True)
    found = [recurrence(*(x[a:b] for x in (q, k, v[0].float(), g[0], beta[0])), state) for (a, b), state in each]
    outputs = torch.cat([x for x, _ in found])[None].to(v.dtype)
    return outputs, torch.stack([state for _, state in found]) if output_final_state else None


@pytest.fixture
def fla(monkeypatch) -> Iterator[types.ModuleType]:
    """Yield our module for fla-core 0.6.0, as if installed on a host with a GPU, with loops as kernels."""
    ops = types.ModuleType("fla.ops.gated_delta_rule")
    ops.chunk_gated_delta_rule = token_by_token
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, ops.__name__, ops)
    monkeypatch.delitem(sys.modules, FLA, raising=False)
    host(monkeypatch, "cuda", "0.6.0")
    yield importlib.import_module(FLA)
    sys.modules.pop(FLA, None)
    kernels._chosen.cache_clear()


def host(monkeypatch, device: str, version: str | None) -> None:
    """Let the choice see a host with this device, with this version of fla-core installed, or none."""

    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(kernels, "HOST", Host(device_type=device, backend="gloo"))
    monkeypatch.setattr(kernels.importlib.metadata, "version", installed)
    monkeypatch.setattr(kernels, "compiler_fault", lambda: "")
    kernels._chosen.cache_clear()


@pytest.mark.parametrize("name", LAYOUTS)
def test_torch_rule_equals_a_loop_over_each_sequences_tokens(name: str) -> None:
    layout = LAYOUTS[name]
    found, wanted = results(torch_rule, layout), results(run_by_run(loop), layout)
    assert max(errors(found, wanted).values()) <= CLOSE, errors(found, wanted)


@pytest.mark.parametrize("name", LAYOUTS)
def test_fla_rule_gives_runs_and_states_to_its_kernels(fla, name: str) -> None:
    """Outputs and gradients equal those of whole sequences; in two waves if prompts are shared."""
    layout = LAYOUTS[name]
    found, wanted = results(fla.fla_rule, layout), results(run_by_run(loop), layout)
    assert max(errors(found, wanted).values()) <= CLOSE, errors(found, wanted)
    assert len(layout.waves.waves) == (1 if name == "alone" else 2)


def test_auto_takes_flas_kernels_in_half_precision_and_says_so_once(fla, caplog) -> None:
    caplog.set_level(logging.INFO)
    auto, layout = choose_rule("auto"), LAYOUTS["alone"]
    assert choose_rule("auto") is auto
    assert [x.message for x in caplog.records] == [
        "gated delta nets run on the kernels of fla-core 0.6.0, float32 on torch's"
    ]
    halves = inputs(layout, torch.bfloat16)
    assert torch.equal(auto(*halves, layout, SHAPE), fla.fla_rule(*halves, layout, SHAPE))
    assert auto(*halves, layout, SHAPE).dtype == torch.bfloat16
    assert torch.equal(auto(*inputs(layout), layout, SHAPE), torch_rule(*inputs(layout), layout, SHAPE))
    assert choose_rule("fla") is fla.fla_rule and choose_rule("torch") is torch_rule


FAULTS = (("cpu", "0.6.0", "there is no GPU"), ("cuda", None, "fla-core is not installed"),
          ("cuda", "0.5.1", "fla-core 0.5.1 is older than 0.6"), ("cuda", "0.6.0", "fla-core 0.6.0 cannot be imported"))


@pytest.mark.parametrize("device, version, fault", FAULTS)
def test_flas_kernels_are_refused_by_name_and_auto_takes_torchs(monkeypatch, caplog, device, version, fault) -> None:
    host(monkeypatch, device, version)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    with pytest.raises(ConfigError, match=rf"model.delta_kernel=fla cannot be used here: {fault}.*megatron_rl\[fla\]"):
        choose_rule("fla")
    caplog.set_level(logging.INFO)
    assert choose_rule("auto") is choose_rule("auto") is torch_rule
    (record,) = caplog.records
    assert record.message.startswith(f"gated delta nets run on torch's kernels ({fault}")
    kernels._chosen.cache_clear()


@pytest.mark.parametrize(
    ("generation", "triton", "tilelang", "refused"),
    [(9, "3.6.0", False, True), (9, "3.4.0", False, True), (9, "3.7.0", False, True), (9, "3.7.1", False, False),
     (9, "3.3.1", False, False), (9, "3.6.0", True, False), (8, "3.6.0", False, False), (10, "3.6.0", False, False)],
)  # fmt: skip
def test_flas_kernels_are_refused_where_triton_takes_wrong_gradients(
    fla, monkeypatch, generation: int, triton: str, tilelang: bool, refused: bool
) -> None:
    """Seen on an H200 under triton 3.6.0: fla-core raises in the first backward pass."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (generation, 0))
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: name if tilelang else None)
    installed = {"fla-core": "0.6.0", "triton": triton}
    monkeypatch.setattr(kernels.importlib.metadata, "version", installed.__getitem__)
    if not refused:
        assert choose_rule("fla") is fla.fla_rule
        return
    with pytest.raises(ConfigError, match=rf"gradients are wrong on this GPU under triton {triton}.*3\.7\.1.*tilelang"):
        choose_rule("fla")
    assert choose_rule("auto") is torch_rule


def test_flas_kernels_need_a_compiler(fla, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "compiler_fault", lambda: "no C compiler was found")
    with pytest.raises(ConfigError, match="no C compiler was found"):
        choose_rule("fla")
