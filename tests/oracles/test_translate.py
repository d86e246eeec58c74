"""Checks that the defaults put in by `megatron-rl translate` are verl's and TRL's own."""

import dataclasses
import importlib
import importlib.util
import pathlib

import pytest
import yaml

from megatron_rl.commands.translate import trl as from_trl
from megatron_rl.commands.translate import trl_pairs as from_pairs
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


@pytest.mark.parametrize("trainer", ["grpo", *from_pairs.DEFAULTS])
def test_trls_defaults(trainer: str) -> None:
    trl = importlib.import_module("trl.experimental.cpo" if trainer == "cpo" else "trl")
    names = {"grpo": "GRPOConfig", "sft": "SFTConfig", "dpo": "DPOConfig", "cpo": "CPOConfig", "reward": "RewardConfig"}
    ours = from_trl.DEFAULTS if trainer == "grpo" else from_pairs.DEFAULTS[trainer]
    fields = {field.name: field for field in dataclasses.fields(getattr(trl, names[trainer]))}
    found = {}
    for name in ours:
        field = fields[name]
        found[name] = field.default_factory() if field.default is dataclasses.MISSING else field.default
    found["lr_scheduler_type"] = str(getattr(found["lr_scheduler_type"], "value", found["lr_scheduler_type"]))
    if isinstance(found.get("loss_type"), list):
        (found["loss_type"],) = found["loss_type"]
    assert found == ours
