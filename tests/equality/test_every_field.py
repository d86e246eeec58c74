"""Each field of Megatron-Core's configs, changed from its value: the same model and steps, or a refusal by name."""

import dataclasses
import enum
import functools
import os
import re
import typing
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.signal import signal_rule
from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.errors import ConfigError
from tests.equality.layouts import PLAIN, SHARDED, TOLERANCE
from tests.equality.rig import config_of, open_rig
from tests.pairwise import quick
from tests.reference import FAMILIES, MIXTURES, WINDOWED, masked_logprobs, reference_gradient, relative_error

from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig  # isort: skip
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # isort: skip

pytestmark = pytest.mark.distributed
MODELS = (*FAMILIES, *MIXTURES, *WINDOWED, "deepseek_v3_wide")  # whose values are wider than its keys
SOME = ("qwen3", "gpt_oss", "deepseek_v3")  # plain, windows and experts, latent attention and shared experts
CLASSES = dict(transformer=MLATransformerConfig, ddp=DistributedDataParallelConfig, optimizer=OptimizerConfig)
LATENT_FIELDS = MLATransformerConfig.__dataclass_fields__.keys() - TransformerConfig.__dataclass_fields__.keys()
ENDS = (AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
ADVANTAGES = np.array([1.0, -0.5, 0.7, -1.0])


def others(hint: object, default: object, folder: object) -> list[object]:
    """Return values of a field's type that are not its default: all that have a name, or one and a list."""
    kinds, todo = [], [hint]
    while todo:
        kinds.append(typing.get_origin(todo[0]) or todo[0])
        todo += [x for x in typing.get_args(todo.pop(0)) if type(x) is not list]
    named = ["true", "false"] if bool in kinds else [x for x in kinds if isinstance(x, str)]
    named += [x for kind in kinds if isinstance(kind, enum.EnumType) for x in kind.__members__]
    if named:
        return [x for x in named if x not in (default, str(default).lower(), str(default).rpartition(".")[2])]
    number = default if type(default) in (int, float) and default < 1e300 else 0
    one = {int: int(number) + 1, float: number + 0.5, str: folder}
    found = [next((one[kind] for kind in kinds if kind in one), "bfloat16" if "dtype" in str(hint) else 1)]
    return [*found, "[1,0]" if int in kinds else f"[{folder}]"] if {list, tuple} & {*kinds} else found


def settings(section: str, folder: object) -> list[str]:
    """Return every field of a section with each of ``others``, as overrides."""
    hints, fields = typing.get_type_hints(CLASSES[section]), dataclasses.fields(CLASSES[section])
    every = [(x.name, value) for x in fields for value in others(hints[x.name], x.default, folder)]
    return [f"megatron.{section}.{name}={value}" for name, value in every if name != "apply_wd_to_qk_layernorm"]


def of_whom(setting: str) -> str:
    """Return the one of SOME whose layers read a field."""
    if setting.partition("=")[0].rpartition(".")[2] in LATENT_FIELDS or "shared_expert" in setting:
        return "deepseek_v3"
    return "gpt_oss" if re.search("moe|expert|window|softmax|glu|rout", setting) else "qwen3"


@functools.cache
def wanted_of(model: str) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Return transformers' gradient and log-probs for the batch of every start."""
    with open_rig(model, samples=4) as rig:
        gradient, _ = reference_gradient(rig.model, rig.samples, rig.groups, ADVANTAGES)
        return gradient, masked_logprobs(rig.model, rig.samples)


def gap(model: str, given: list[str]) -> float:
    """Return how far log-probs and gradient of a start under ``given`` are from transformers'."""
    gradient, logprobs = wanted_of(model)
    signal_rule(config_of(*given))
    with open_rig(model, *given, samples=4) as rig:
        found = rig.gradient(ADVANTAGES, rig.plan(ADVANTAGES, drops=False))
        return max(float(np.abs(rig.logprobs() - logprobs).max()), relative_error(found, gradient))


def two_steps(model: str, *given: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the weights and norms of two steps, the second a ghost."""
    with open_rig(model, "optimizer.weight_decay=0.1", *given, samples=4, total_steps=2) as rig:
        norms = [x.grad_norm for a in (ADVANTAGES, 0 * ADVANTAGES) for x in rig.step(a, drops=True)]
        return rig.weights(), norms


plain_steps = functools.cache(two_steps)


def steps_gap(model: str, given: list[str], plain: tuple[str, ...]) -> float:
    """Return how far weights and norms of two steps are from those under ``plain`` alone."""
    wanted, plain_norms = plain_steps(model, *plain)
    weights, norms = two_steps(model, *plain, *given)
    return max(relative_error(weights, wanted), *np.abs(np.subtract(norms, plain_norms)))


def wrong(rank: int, world: int, model: str, given: list[str], plain: tuple = (), at_once: int = 1) -> list[str]:
    """Return the settings that are neither without effect nor refused by name.

    plain: compare two steps, beside these settings. at_once: how many settings one start has.
    """
    if not given:
        return []
    if len(given) > at_once:
        parts = [given[i : i + at_once] for i in range(0, len(given), at_once)]
        return [fault for part in parts for fault in wrong(rank, world, model, part, plain, at_once)]
    try:
        with mock.patch.dict(os.environ):
            for name in ("FLASH", "FUSED", "UNFUSED"):  # attention_backend chooses among them, once per process
                os.environ.pop(f"NVTE_{name}_ATTN", None)
            found = steps_gap(model, given, plain) if plain else gap(model, given)
        assert found < TOLERANCE, f"off by {found}"
    except ENDS as error:
        said = str(error) if isinstance(error, ConfigError) else ""
        left = [x for x in given if not re.search(rf"\b{x.partition('=')[0]}(=| \(value)", said)]
        if len(left) < len(given):  # the others may still be tried together
            return wrong(rank, world, model, left, plain, at_once)
        return wrong(rank, world, model, left, plain) if len(left) > 1 else [f"{x}: {error!r}" for x in left]
    return []


@pytest.mark.parametrize("model", quick(SOME, *SOME[1:]))  # the plain one has every field tried alone
def test_a_field_leaves_the_model_as_it_is_or_is_refused(pool, tmp_path, model):
    """Each field is tried with one of the models, many at once; the long test has all values with all, each alone."""
    mine = {x.partition("=")[0]: x for x in settings("transformer", tmp_path / "x") if of_whom(x) == model}
    assert pool.run(1, wrong, model, [*mine.values()], at_once=16, timeout_s=120, spoils=True) == [[]]


@pytest.mark.long(seconds=25)
@pytest.mark.parametrize("model", MODELS)
def test_every_field_leaves_every_model_as_it_is_or_is_refused(pool, tmp_path, model):
    assert pool.run(1, wrong, model, settings("transformer", tmp_path / "x"), timeout_s=300, spoils=True) == [[]]


def test_a_field_leaves_the_steps_as_they_are_or_is_refused(pool, tmp_path):
    """All but ``apply_wd_to_qk_layernorm``, which asks for another decay."""
    every = [x for section in ("ddp", "optimizer") for x in settings(section, tmp_path / "x")]
    assert pool.run(1, wrong, "qwen3", every, SHARDED, at_once=16, timeout_s=120, spoils=True) == [[]]


@pytest.mark.long(seconds=20)
@pytest.mark.parametrize("plain", [PLAIN, SHARDED], ids=["plain", "sharded"])
def test_every_field_alone_leaves_the_steps_as_they_are_or_is_refused(pool, tmp_path, plain):
    every = [x for section in ("ddp", "optimizer") for x in settings(section, tmp_path / "x")]
    assert pool.run(1, wrong, "qwen3", every, plain, timeout_s=300, spoils=True) == [[]]
