"""Checks that an episode through the adapter equals gymnasium's own loop, and that rows and faults are told."""

import random

import pytest

from megatron_rl.config import EnvironmentConfig
from megatron_rl.environment import Step, environment_maker
from megatron_rl.environment.gymnasium_adapter import GymnasiumAdapter, rows
from megatron_rl.errors import ConfigError
from megatron_rl.types import Prompt

gymnasium = pytest.importorskip("gymnasium", reason="the extra `gymnasium` brings it")


def prompt_of(row: dict) -> Prompt:
    return Prompt(prompt_id="1@0", text=row.get("prompt", ""), token_ids=(1,), columns=row)


class Echo:
    """Has gymnasium's methods and a space of texts, and ends after three texts."""

    action_space = gymnasium.spaces.Text(8)

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def reset(self, *, seed=None, options=None):
        self.left, self.closed = 3, False
        return f"{self.prefix}{seed}{options or ''}", {}

    def step(self, action):
        self.left -= 1
        return self.prefix + action, 0.5, self.left == 0, False, {}

    def close(self) -> None:
        self.closed = True


def shouted(observation: object) -> str:
    return f"{observation}!"


def backwards(text: str) -> str:
    return text[::-1]


@pytest.mark.parametrize("slippery", [False, True])
def test_an_episode_equals_gymnasiums_own_loop(slippery: bool) -> None:
    """Observations, rewards and the end are those of gymnasium's loop by the same actions, its time limit included."""
    settings = {"env": "FrozenLake-v1", "arguments": {"is_slippery": slippery}}
    make = environment_maker(EnvironmentConfig(name="gymnasium", arguments=settings))
    given, ends = rows(**settings, seeds=range(60)), set()
    for row in given:
        naive = gymnasium.make("FrozenLake-v1", is_slippery=slippery)
        ours, draws = make(), random.Random(row["seed"])
        first, _ = naive.reset(seed=row["seed"])
        ours.reset(prompt_of(row))
        assert row["prompt"] == row["observation"] == str(first)
        done = False
        while not done:
            move = draws.choice((0, 1, 2, 1, 2))  # mostly down and right, where the goal is
            observation, reward, terminated, truncated, _ = naive.step(move)
            found, done = ours.step(f"at 7 I go {move}."), terminated or truncated
            assert found == Step(observation=str(observation), reward=float(reward), done=done)
        ends.add((terminated, truncated, reward))
    assert len(ends) > 1


def test_texts_are_actions_of_an_own_class_and_a_text_that_is_none_changes_nothing() -> None:
    name = "tests.unit.environment.test_gymnasium_adapter"
    settings = {"arguments": {"prefix": ">"}, "observation": f"{name}:shouted", "action": f"{name}:backwards"}
    game = GymnasiumAdapter(f"{name}:Echo", **settings)
    (row,) = rows(f"{name}:Echo", [5], **settings)
    game.reset(prompt_of(row | {"prompt": f"Say: {row['prompt']}"}))
    said = [game.step(text) for text in ("ab", "cd", "ef")]
    assert row["observation"] == ">5!" and [x.observation for x in said] == [">ba!", ">dc!", ">fe!"]
    assert [(x.reward, x.done) for x in said] == [(0.5, False), (0.5, False), (0.5, True)] and game.env.closed
    game = GymnasiumAdapter("FrozenLake-v1", {"is_slippery": False}, invalid="? {error}")
    game.reset(prompt_of({"seed": 1}))
    assert game.step("go left").observation == "? there is no whole number in it"
    assert game.step("9").observation == "? 9 is no action of Discrete(4)"
    assert game.step("2") == Step(observation="1", reward=0.0, done=False)


def test_a_row_that_does_not_fit_and_an_environment_that_cannot_be_made_are_named() -> None:
    for row, said in (
        ({}, "has no column 'seed'"),
        ({"seed": 1, "observation": "7"}, "begins with '0', and its row says '7'"),
    ):
        with pytest.raises(ValueError, match=said):
            GymnasiumAdapter("FrozenLake-v1").reset(prompt_of(row))
    for env, arguments, said in (
        ("FrozenLakes-v1", {}, "environment.arguments.env='FrozenLakes-v1'"),
        ("FrozenLake-v1", {"ice": True}, "'ice'"),
        ("nowhere:Game", {}, "importing 'nowhere' failed"),
    ):
        with pytest.raises(ConfigError, match=said):
            GymnasiumAdapter(env, arguments)
