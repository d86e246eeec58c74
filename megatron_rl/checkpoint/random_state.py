"""The reading and setting of a process's global random generators (torch, Python, NumPy, CUDA), as JSON-able values."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping

import numpy as np
import torch

from megatron_rl.distributed.platform import HOST


def random_state() -> dict[str, object]:
    """Return the state of every global random generator of this process: generator's name → JSON-able value."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, object] = {
        "torch": _text(torch.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
    }
    if HOST.is_cuda:
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def set_random_state(state: Mapping) -> None:
    torch.set_rng_state(_bytes(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if HOST.is_cuda and "cuda" in state:
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
