"""Checks trainer/completions.py: the completions of a rollout carry the rewards and advantages that are trained on."""

import dataclasses
from types import SimpleNamespace

import numpy as np

from megatron_rl.config import load_config
from megatron_rl.observability.saved_rollouts import read_rollout, saved_numbers
from megatron_rl.rollout.job import Group
from megatron_rl.trainer.advantages.source import AdvantageResult
from megatron_rl.trainer.completions import completion_rules, of_training
from megatron_rl.trainer.standing_parts import saved_rollouts
from megatron_rl.types import Advantages, Prompt, Score
from tests.unit.reward.rig import rollout_of

SIZE = 3


def group_of(number: int) -> Group:
    """Return a group whose sample k has the function's value number + k / 10; its last sample was taken out."""
    prompt = Prompt(prompt_id=f"{number}@0", text=f"prompt {number}", token_ids=(1,), columns={"answer": str(number)})
    rollouts = tuple(rollout_of(prompt, k, (5,), f"text {k}") for k in range(SIZE))
    values = [number + k / 10 for k in range(SIZE - 1)]
    scores = [Score(total=value, by_function=(value,)) for value in values] + [Score(total=None, by_function=(None,))]
    return Group(rollouts=rollouts, scores=tuple(scores))


def taken_of(places: list[int], mine: list[int]) -> SimpleNamespace:
    """Return a rollout with groups at ``places``, this rank's at ``mine``; sample i's trained total is 10 + i."""
    groups = np.repeat(np.array(places), SIZE)
    totals = 10.0 + np.arange(len(groups))
    totals[SIZE - 1 :: SIZE] = np.nan
    facts = SimpleNamespace(groups=groups, response_tokens=np.ones(len(groups), dtype=np.int64))
    scored = SimpleNamespace(rewards=SimpleNamespace(totals=totals))
    return SimpleNamespace(facts=facts, scored=scored, groups={place: group_of(place) for place in mine})


def recorded(config, taken, index: int = 0) -> list[tuple]:
    rules = completion_rules(config.metrics, config.reward.functions)
    found = of_training(rules, taken, np.arange(len(taken.facts.groups)) / 100, index)
    return [(c.sample, c.response, c.answer, c.reward, dict(c.rewards), c.advantage, c.rollout) for c in found]


def test_each_rank_records_its_own_samples_every_third_rollout_and_none_where_it_is_turned_off():
    """Of places 0, 4 and 7 this rank has 4 and 7, rows 3 to 5 and 6 to 8: the best, then the one taken out."""
    config = load_config(None, ["reward.functions=[f]", "metrics.log_completions=3"])
    assert recorded(config, taken_of([0, 4, 7], [7, 4]), index=5) == [
        ("4@0#1", "text 1", "4", 14.0, {"f": 4.1}, 0.04, 6),
        ("4@0#2", "text 2", "4", None, {"f": None}, 0.05, 6),
        ("7@0#1", "text 1", "7", 17.0, {"f": 7.1}, 0.07, 6),
    ]
    config = load_config(None, ["reward.functions=[f]", "metrics.completions_every_rollouts=3"])
    assert [bool(recorded(config, taken_of([0], [0]), index)) for index in range(7)] == [i % 3 == 0 for i in range(7)]
    config = load_config(None, ["reward.functions=[f]", "metrics.log_completions=0"])
    assert recorded(config, taken_of([0], [0])) == []
    assert recorded(load_config(None, ["reward.functions=[f]"]), taken_of([0], [])) == []


TOKENIZER = SimpleNamespace(is_fast=False, convert_ids_to_tokens=lambda ids: [f"<{id}>" for id in ids])


def save(settings: list[str], taken: SimpleNamespace, advantages: Advantages, index: int, *, rank: int = 0) -> None:
    config = load_config(None, settings)
    for record in saved_rollouts(config.metrics, config.reward.functions, config.run.path, TOKENIZER, rank):
        record.rollout(index, taken, AdvantageResult(advantages=advantages, plain=advantages.of_sample))


def test_a_saved_rollout_has_its_own_samples_numbers(tmp_path):
    """Ranks with places 0 and 4, and 7: each sample with the total, the advantages and the values of its own row."""
    settings = ["reward.functions=[f]", "metrics.save_rollouts=true", f"run.dir={tmp_path}"]
    advantages = Advantages(of_sample=np.arange(9.0), of_token=np.arange(9.0) / 10)
    for rank, mine in enumerate(([0, 4], [7], [])):
        save(settings, taken_of([0, 4, 7], mine), advantages, 5, rank=rank)
    whole = read_rollout(tmp_path, 6)
    names = ("sample", "reward", "rewards", "advantage", "advantages")
    found = [(group["prompt_id"], *(s[x] for x in names)) for group in whole["groups"] for s in group["samples"]]
    for row, place in enumerate((0, 0, 0, 4, 4, 4, 7, 7, 7)):
        numbers = (None, [None]) if row % 3 == 2 else (10.0 + row, [place + row % 3 / 10])
        assert found[row] == (f"{place}@0", row % 3, *numbers, row, [row / 10])
    assert whole["tokens"] == {"5": "<5>"} and whole["functions"] == ["f"]


def test_the_environments_tokens_are_saved_without_advantage(tmp_path):
    settings = ["reward.functions=[f]", "metrics.save_rollouts=true", f"run.dir={tmp_path}"]
    taken = taken_of([0], [0])
    turns = dataclasses.replace(group_of(0).rollouts[0], response_ids=(5, 6, 5), loss_mask=(True, False, True))
    taken.groups[0] = Group(rollouts=(turns,) * SIZE, scores=group_of(0).scores)
    save(settings, taken, Advantages(of_sample=np.array([0.5, 0.0, -1.0])), 0)
    (group,) = read_rollout(tmp_path, 1)["groups"]
    assert [s["advantages"] for s in group["samples"]] == [[0.5, 0.0, 0.5], [0.0] * 3, [-1.0, 0.0, -1.0]]


def test_rollouts_are_saved_where_it_is_asked_for(tmp_path):
    for settings in ([], ["metrics.save_rollouts=true", "metrics.completions_every_rollouts=2"]):
        for index in range(4):
            given = ["reward.functions=[f]", f"run.dir={tmp_path}", *settings]
            save(given, taken_of([0], [0]), Advantages(of_sample=np.zeros(3)), index)
    assert saved_numbers(tmp_path) == [1, 3]
