"""Registers the stand-ins under Transformer Engine's names: those that the version has, and no other."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types

import torch

from tests.stand_ins.transformer_engine import attention, linears, mixture, optimizers
from tests.stand_ins.transformer_engine.contract import FACTS, VERSION, contract, require


class _NoFp8:
    """Stands for FP8GlobalStateManager, in a process without FP8."""

    is_fp8_enabled = staticmethod(lambda: False)


@contextlib.contextmanager
def _no_quantization(enabled: bool = False, **_):
    assert not enabled
    yield


@contract("get_cpu_offload_context")
def _cpu_offload_context(*, enabled=False, **_):
    require(not enabled, "the stand-in does not offload")
    return contextlib.nullcontext(), None


BUILT = {
    "pytorch": {name: vars(linears)[name] for name in ("Linear", "LayerNormLinear", "GroupedLinear", "RMSNorm")}
    | {"DotProductAttention": attention.DotProductAttention},
    "pytorch.attention.rope": {"apply_rotary_pos_emb": attention.apply_rotary_pos_emb},
    "pytorch.cpu_offload": {"get_cpu_offload_context": _cpu_offload_context},
    "pytorch.cpp_extensions": {"general_gemm": mixture.general_gemm},
    "pytorch.module.base": {"get_workspace": lambda: torch.empty(0)},
    "pytorch.permutation": {name: x for name, x in vars(mixture).items() if name.startswith("moe_")},
    "pytorch.optimizers": {name: x for name, x in vars(optimizers).items() if name.startswith(("Fused", "multi_"))},
    "pytorch.fp8": dict(FP8GlobalStateManager=_NoFp8, fp8_autocast=_no_quantization, fp8_model_init=_no_quantization),
    "pytorch.utils": {"nvtx_range_push": lambda *_: None, "nvtx_range_pop": lambda *_: None},
    "pytorch.distributed": {"is_fp8_activation_recompute_enabled": lambda: False},
}


def _unbuilt(name: str) -> type:
    """Return a class that can be named and derived from, and raises where it is made."""

    def refuse(*_, **__):
        raise NotImplementedError(f"the stand-in for Transformer Engine has no {name}")

    return type(name.rpartition(".")[2], (torch.nn.Module,), {"__init__": refuse, "__module__": name})


def register() -> None:
    """Put the modules in ``sys.modules``; a name of signatures.json without a stand-in is one that raises."""
    listed = {"transformer_engine": [], "transformer_engine.common": [], "transformer_engine.pytorch": []}
    for name in list(FACTS["names"]):
        parts = name.split(".")
        listed |= {".".join(parts[:i]): [] for i in range(1, len(parts))}
    for name in sorted(listed | FACTS["names"]):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        built = BUILT.get(name.removeprefix("transformer_engine."), {})
        for known in FACTS["names"].get(name, ()):
            setattr(module, known, built.get(known) or _unbuilt(f"{name}.{known}"))
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.modules["transformer_engine"].__version__ = VERSION
