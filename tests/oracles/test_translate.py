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
from megatron_rl.commands.translate.kinds import OF_GRPO_AND_RLOO, OF_ONE_TRAINER
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


def config_of(trainer: str) -> type:
    """Return TRL's configuration of a trainer."""
    names = {"grpo": "GRPO", "sft": "SFT", "dpo": "DPO", "cpo": "CPO", "reward": "Reward", "rloo": "RLOO", "kto": "KTO"}
    names |= {"gkd": "GKD", "online_dpo": "OnlineDPO"}
    module = f"trl.experimental.{trainer}" if trainer in ("cpo", "gkd", "online_dpo") else "trl"
    return getattr(importlib.import_module(module), f"{names[trainer]}Config")


def test_names_of_one_trainer_are_of_that_one_alone() -> None:
    fields = {trainer: {field.name for field in dataclasses.fields(config_of(trainer))} for trainer in OF_ONE_TRAINER}
    for trainer, own in OF_ONE_TRAINER.items():
        assert own <= fields[trainer]
        others = [name for name in fields if name not in (trainer, "gkd" if trainer == "sft" else trainer)]
        assert not any(own & fields[name] for name in others), trainer
    assert fields["grpo"] & fields["rloo"] >= OF_GRPO_AND_RLOO
    rest = set().union(*(fields[name] for name in fields if name not in ("grpo", "rloo")))
    assert not OF_GRPO_AND_RLOO & rest


@pytest.mark.parametrize("trainer", ["grpo", *from_pairs.DEFAULTS])
def test_trls_defaults(trainer: str) -> None:
    ours = from_trl.DEFAULTS if trainer == "grpo" else from_pairs.DEFAULTS[trainer]
    fields = {field.name: field for field in dataclasses.fields(config_of(trainer))}
    found = {}
    for name in ours:
        field = fields[name]
        found[name] = field.default_factory() if field.default is dataclasses.MISSING else field.default
    found["lr_scheduler_type"] = str(getattr(found["lr_scheduler_type"], "value", found["lr_scheduler_type"]))
    if isinstance(found.get("loss_type"), list):
        (found["loss_type"],) = found["loss_type"]
    assert found == ours
