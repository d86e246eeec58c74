"""Checks that the defaults put in by `megatron-rl translate` are verl's and TRL's own."""

import dataclasses
import importlib.util
import pathlib

import pytest
import yaml

from megatron_rl.commands.translate import trl as from_trl
from megatron_rl.commands.translate import verl as from_verl
from megatron_rl.commands.translate.translation import flat
from tests.oracles.batch import MISSING

pytest.importorskip("verl", reason=MISSING)
pytest.importorskip("trl", reason=MISSING)


@pytest.mark.parametrize("backend", ["ppo_trainer", "ppo_megatron_trainer"])
def test_verls_defaults(backend: str) -> None:
    folder = pathlib.Path(importlib.util.find_spec("verl").origin).parent / "trainer" / "config"
    theirs = flat(yaml.safe_load((folder / f"_generated_{backend}.yaml").read_text()))
    ours = dict(from_verl.DEFAULTS)
    assert theirs["actor_rollout_ref.rollout.name"] == "???"  # verl wants it said; vllm is what is said
    del ours["actor_rollout_ref.rollout.name"]
    found = {name: theirs[name] for name in ours}
    found["actor_rollout_ref.actor.optim.lr"] = float(found["actor_rollout_ref.actor.optim.lr"])
    assert found == ours


def test_trls_defaults() -> None:
    from trl import GRPOConfig

    defaults = {}
    for field in dataclasses.fields(GRPOConfig):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
    found = {name: defaults[name] for name in from_trl.DEFAULTS}
    found["lr_scheduler_type"] = str(getattr(found["lr_scheduler_type"], "value", found["lr_scheduler_type"]))
    assert found == from_trl.DEFAULTS
