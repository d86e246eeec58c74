"""The dtype that `model.dtype: auto` stands for."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_rl.config import ModelConfig
from megatron_rl.weights.reader import EMBEDDING_NAME, HuggingFaceReader, has_weights

# Any other dtype of files becomes float32. FP8 files state the dtype of the weights that they stand for.
OF_FILES = {"float16": "bfloat16", "bfloat16": "bfloat16"}


def settle_dtype(model: ModelConfig, hf_config: Any, *, on_gpu: bool) -> ModelConfig:
    """Return the ``model`` section with `dtype: auto` replaced: float32 on a CPU, the model's own dtype on a GPU.

    hf_config: the policy's Hugging Face config. Its `dtype` decides; if it is None, the dtype of
        the embedding in the files decides. bfloat16 stays. float16 becomes bfloat16, since
        float16's range needs loss scaling. Any other dtype, or none, becomes float32.
    on_gpu: whether the run is, or would be, on GPUs.
    """
    if model.dtype != "auto":
        return model
    dtype = "float32"
    if on_gpu:
        stated = _of_files(model.hf_path) if hf_config.dtype is None else hf_config.dtype
        dtype = OF_FILES.get(str(stated).removeprefix("torch."), dtype)
    return dataclasses.replace(model, dtype=dtype)


def _of_files(folder: str) -> object:
    """Return the dtype of the embedding in a folder's weights; None if there are no weights or no embedding."""
    if not folder or not has_weights(folder):
        return None
    reader = HuggingFaceReader(folder)
    try:
        return reader.dtype(EMBEDDING_NAME) if reader.has(EMBEDDING_NAME) else None
    finally:
        reader.close()
