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
from types import ModuleType

from megatron_rl.weights.config_json import read_fields

TEXT_MODELS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def register_text_models(hf_path: str) -> None:
    """Give vLLM the class of a text model of Qwen3.5 where torchvision is missing; for any other model do nothing.

    The class is imported with empty modules in place of torchvision. vLLM would first import it in a
    process of its own, which has no such modules.

    hf_path: the model's folder.
    """
    named = read_fields(hf_path).get("architectures")
    wanted = [name for name in TEXT_MODELS if name in (named or ())]
    if not wanted or importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.utils import is_torchvision_available
    from vllm import ModelRegistry

    is_torchvision_available()  # transformers keeps the answer, and so does not take the empty modules for torchvision
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
