"""Each field of Megatron-Core's configs, changed from its value: the same model and steps, or a refusal by name."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import typing
from unittest import mock

import numpy as np
import pytest

from megatron_rl.algorithm.signal import signal_rule
from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.errors import ConfigError
from tests.equality.layouts import PLAIN, SHARDED, TOLERANCE
from tests.equality.rig import config_of, open_rig
from tests.reference import FAMILIES, MIXTURES, WINDOWED, masked_logprobs, reference_gradient, relative_error

from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig  # isort: skip
from megatron.core.transformer.transformer_config import MLATransformerConfig  # isort: skip

pytestmark = pytest.mark.distributed
MODELS = (*FAMILIES, *MIXTURES, *WINDOWED, "deepseek_v3_wide")  # whose values are wider than its keys
CLASSES = dict(transformer=MLATransformerConfig, ddp=DistributedDataParallelConfig, optimizer=OptimizerConfig)
ENDS = (AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
ADVANTAGES = np.array([1.0, -0.5, 0.7, -1.0])


def others(hint: object, default: object, folder: object) -> list[object]:
    """Return values of a field's type that are not its default: all that have a name, or one."""
    kinds, todo = [], [hint]
    while todo:
        kinds.append(typing.get_origin(todo[0]) or todo[0])
        todo += [x for x in typing.get_args(todo.pop(0)) if not isinstance(x, list)]
    named = ["true", "false"] if bool in kinds else [x for x in kinds if isinstance(x, str)]
    named += [x for kind in kinds if isinstance(kind, enum.EnumType) for x in kind.__members__]
    if named:
        return [x for x in named if x not in (default, str(default).lower(), str(default).rpartition(".")[2])]
    number = default if type(default) in (int, float) and default < 1e300 else 0
    one = {int: int(number) + 1, float: number + 0.5, str: folder, list: "[1,0]", tuple: "[1,0]"}
    return [next((one[kind] for kind in kinds if kind in one), "bfloat16" if "dtype" in str(hint) else 1)]


def settings(section: str, folder: object) -> list[str]:
    """Return every field of a section with each of ``others``, as overrides."""
    hints, fields = typing.get_type_hints(CLASSES[section]), dataclasses.fields(CLASSES[section])
    every = [(x.name, value) for x in fields for value in others(hints[x.name], x.default, folder)]
    return [f"megatron.{section}.{name}={value}" for name, value in every if name != "apply_wd_to_qk_layernorm"]


def gap(model: str, given: list[str]) -> float:
    """Return how far log-probs and gradient of a start under ``given`` are from transformers'."""
    signal_rule(config_of(*given))
    with open_rig(model, *given, samples=4) as rig:
        found = rig.gradient(ADVANTAGES, rig.plan(ADVANTAGES, drops=False))
        wanted = reference_gradient(rig.model, rig.samples, rig.groups, ADVANTAGES)[0]
        logprobs = np.abs(rig.logprobs() - masked_logprobs(rig.model, rig.samples)).max()
        return max(float(logprobs), relative_error(found, wanted))


def steps_gap(model: str, given: list[str], plain: tuple[str, ...]) -> float:
    """Return how far the norms and weights of two steps, the second a ghost, are from those under ``plain`` alone."""
    norms, weights = [], []
    for more in (given, ()):
        with open_rig(model, "optimizer.weight_decay=0.1", *plain, *more, samples=4, total_steps=2) as rig:
            norms.append([x.grad_norm for a in (ADVANTAGES, 0 * ADVANTAGES) for x in rig.step(a, drops=True)])
            weights.append(rig.weights())
    return max(relative_error(*weights), *np.abs(np.subtract(*norms)))


def wrong(rank: int, world: int, model: str, given: list[str], plain: tuple = (), together: bool = True) -> list[str]:
    """Return the settings that are neither without effect nor refused by name. plain: compare steps, beside these."""
    if not together:
        return [fault for one in given for fault in wrong(rank, world, model, [one], plain)]
    try:
        with mock.patch.dict(os.environ):
            for name in ("FLASH", "FUSED", "UNFUSED"):  # attention_backend chooses among them, once per process
                os.environ.pop(f"NVTE_{name}_ATTN", None)
            found = steps_gap(model, given, plain) if plain else gap(model, given)
        assert found < TOLERANCE, f"off by {found}"
    except ENDS as error:
        said = str(error) if isinstance(error, ConfigError) else ""
        left = [x for x in given if not re.search(rf"\b{x.partition('=')[0].rpartition('.')[2]}\b", said)]
        if len(given) == 1:
            return [f"{x}: {error!r}" for x in left]
        return wrong(rank, world, model, *((left, plain) if len(left) == len(given) - 1 else (given, plain, False)))
    return []


@pytest.mark.parametrize("model", MODELS)
def test_a_field_leaves_the_model_as_it_is_or_is_refused(pool, tmp_path, model):
    """Each model has its share of the fields, all at once; the long test has all of them, each alone."""
    share = settings("transformer", tmp_path / "x")[MODELS.index(model) :: len(MODELS)]
    assert pool.run(1, wrong, model, share, timeout_s=120) == [[]]


@pytest.mark.long(seconds=40)
@pytest.mark.parametrize("model", MODELS)
def test_every_field_leaves_every_model_as_it_is_or_is_refused(pool, tmp_path, model):
    assert pool.run(1, wrong, model, settings("transformer", tmp_path / "x"), together=False, timeout_s=300) == [[]]


@pytest.mark.parametrize("section", ["optimizer", "ddp"])
@pytest.mark.parametrize("plain", [PLAIN, SHARDED], ids=["plain", "sharded"])
def test_a_field_leaves_the_steps_as_they_are_or_is_refused(pool, tmp_path, section, plain):
    """All but ``apply_wd_to_qk_layernorm``, which asks for another decay."""
    assert pool.run(1, wrong, "qwen3", settings(section, tmp_path / "x"), plain, timeout_s=120) == [[]]
