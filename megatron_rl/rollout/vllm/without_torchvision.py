"""Qwen3.5's text models in a vLLM that lacks torchvision, as beside torch's CPU build.

vLLM (0.32.0, models/qwen3_5.py) has the text models in one module with the vision-language models.
This module imports transformers' image processors, which import torchvision. torchvision's files on
the package index are built for CUDA, and fail to load beside a CPU build of torch. A text model
never calls them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

TEXT_MODELS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def register_text_models(architectures: Sequence[str]) -> None:
    """Make vLLM know Qwen3.5's text models where torchvision is missing; elsewhere, do nothing.

    vLLM would import each model in a process of its own first, which this skips: the classes are
    imported here, with empty modules in place of torchvision, and given to vLLM.

    architectures: the model's ``architectures`` in config.json.
    """
    wanted = [name for name in architectures if name in TEXT_MODELS]
    if not wanted or importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.utils import is_torchvision_available
    from vllm import ModelRegistry

    assert not is_torchvision_available()  # kept by transformers, so that the empty modules are not taken for it
    modules = {name: ModuleType(name) for name in NAMES}
    for name, module in modules.items():
        module.__path__ = []
        package, _, last = name.rpartition(".")
        if package:
            setattr(modules[package], last, module)
    sys.modules.update(modules)
    try:
        models = importlib.import_module("vllm.model_executor.models.qwen3_5")
    finally:
        for name in NAMES:
            del sys.modules[name]
    for name in wanted:
        ModelRegistry.register_model(name, getattr(models, name))
