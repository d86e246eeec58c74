"""Workers in which Megatron-Core finds a stand-in of Transformer Engine, and the settings of its layers."""

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

from tests.workers.nursery import Nursery
from tests.workers.pool import Pool

# As on a GPU: Transformer Engine's modules make their parameters on the device by themselves.
ENGINE = ("model.layer_spec=transformer_engine", "megatron.transformer.use_cpu_initialization=false") + (
    "plan.share_prompts=false",  # the tests that share say so: with shared prompts the rotary angles are not fused
)
# What the rigs use of tests/workers/nursery.py's list. The stand-in comes first.
IMPORTED = (
    "tests.stand_ins.install",
    "tests.equality.rig",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen2", "qwen3", "llama", "qwen3_moe", "glm4_moe")),
    *(f"transformers.models.{x}.modeling_{x}" for x in ("deepseek_v3", "qwen3_5", "qwen3_5_moe", "qwen3_next")),
)


@contextlib.contextmanager
def engine_workers(version: str) -> Iterator[Pool]:
    """Start gloo workers that find a stand-in of that version; without torch.compile, whose C++ would be waited for."""
    variables = dict(STAND_IN_TRANSFORMER_ENGINE=version, STAND_IN_ANY_DTYPE="1", TORCHDYNAMO_DISABLE="1")
    with (
        mock.patch.dict(os.environ, variables),
        Nursery(imported=IMPORTED) as nursery,
        Pool(max_world=2, nursery=nursery) as workers,
    ):
        yield workers
