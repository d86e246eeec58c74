"""Episodes equal a plain loop, also where they end early, fail or lose their engine."""

import dataclasses
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import load_config
from megatron_rl.environment import Step
from megatron_rl.errors import ConfigError, EpisodeError
from megatron_rl.rollout.engines.engine import EngineLost
from megatron_rl.rollout.engines.multi_turn import environment_parts
from megatron_rl.types import Prompt, Rollout
from tests.patience import until
from tests.unit.data.templates import CHATML, STRICT, tokenizer_of
from tests.unit.rollout.letter_episodes import TOKENIZER, Echo, LetterEngine, episodes_of, ids_of, prompt_of, turn_of

HERE, STOP = "tests.unit.rollout.letter_episodes", TOKENIZER.eos_token_id
FAULTY = "tests.unit.rollout.test_multi_turn:Faulty"
SHORT_S = 0.5  # a deadline, where one step hangs for ever and the others return at once


class SlowLastEngine(LetterEngine):
    """Ends its last group once ``may_end`` is true, and its call not before that group was taken."""

    def generate(self, prompts, samples_per_prompt, *, on_finished, **given) -> list[Rollout]:
        taken = []

        def last_waits(k: int, group: list[Rollout]) -> None:
            assert len(taken) < len(prompts) - 1 or until(self.may_end)
            on_finished(k, group)
            taken.append(k)

        found = super().generate(prompts, samples_per_prompt, on_finished=last_waits, **given)
        raise AssertionError(f"the call went on to its end with {len(found)} samples")


class Faulty(Echo):
    """Fails in the way that its prompt's column ``fault`` names."""

    held = threading.Event()
    hanging: list[str] = []

    def reset(self, prompt: Prompt) -> None:
        super().reset(prompt)
        if prompt.columns.get("fault") == "reset":
            raise ValueError("no such puzzle")

    def step(self, action: str) -> Step:
        match self.prompt.columns.get("fault"):
            case "raises":
                raise KeyError("the tool's table")
            case "hangs":
                Faulty.hanging.append(self.prompt.name)
                Faulty.held.wait()
            case "returns":
                return "408"
            case "nan":
                return Step(reward=1e39)
            case "observes":
                return Step(observation=7)
        return super().step(action)


def plain_episode(prompt: Prompt, sample: int, room: int, max_turns: int, make=Echo) -> dict:
    """Return the episode of one sample, played one turn after the other."""
    environment = make()
    environment.reset(prompt)
    found = dict(ids=[], logprobs=[], mask=[], reward=0.0)
    ids, asked, number = found["ids"], prompt, sample

    def append(token_ids: Sequence[int], logprobs: Sequence[float], sampled: bool) -> None:
        for name, values in (("ids", token_ids), ("logprobs", logprobs), ("mask", [sampled] * len(token_ids))):
            found[name] += values

    for turn in range(1, max_turns + 1):
        drawn = turn_of(asked, number, room - len(ids))
        append(drawn.response_ids, drawn.logprobs, True)
        if drawn.finish_reason == "length":
            return found | {"reason": "length"}
        step = environment.step(drawn.text)
        found["reward"] += step.reward or 0.0
        if step.done or turn == max_turns:
            return found | {"reason": "stop"}
        said = ids_of(step.observation)
        if len(ids) + len(said) + 1 > room:
            return found | {"reason": "length"}
        append(said, [0.0] * len(said), False)
        name, token_ids = f"{prompt.name}#{sample}/{turn}", (*prompt.token_ids, *ids)
        asked, number = Prompt(prompt_id=name, text="", token_ids=token_ids, columns={}), 0
    raise AssertionError


def plain_of(rollout: Rollout) -> dict:
    mask = [True] * len(rollout.response_ids) if rollout.loss_mask is None else list(rollout.loss_mask)
    found = dict(ids=list(rollout.response_ids), logprobs=list(rollout.logprobs), mask=mask)
    return found | dict(reward=rollout.environment_reward, reason=rollout.finish_reason)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.integers(0, 6), samples=st.integers(1, 4), room=st.integers(1, 30), max_turns=st.integers(1, 5),
    seed=st.integers(0, 99), attempt=st.integers(0, 1),
)
def test_episodes_equal_a_plain_loop_over_samples_and_turns(prompts, samples, room, max_turns, seed, attempt) -> None:
    asked = [dataclasses.replace(prompt_of(k), attempt=attempt) for k in range(prompts)]
    engine = LetterEngine(room=room, seed=seed)
    episodes = episodes_of(engine, max_turns=max_turns)
    told: dict[int, list[Rollout]] = {}
    found = episodes.generate(asked, samples, on_finished=lambda k, group: told.setdefault(k, group))
    episodes.close()
    assert [(x.prompt, x.sample_index) for x in found] == [(prompt, k) for prompt in asked for k in range(samples)]
    assert [plain_of(x) for x in found] == [plain_episode(p, k, room, max_turns) for p in asked for k in range(samples)]
    assert [x for k in range(prompts) for x in told[k]] == found  # each group once, whole
    for rollout in found:
        assert len(rollout.response_ids) <= room and rollout.num_sampled == sum(plain_of(rollout)["mask"])
        assert rollout.weight_versions == ((3, len(rollout.response_ids)),) and rollout.excluded is None
        text = TOKENIZER.decode([x for x in rollout.response_ids if x != STOP])
        assert rollout.text == text and 1 <= rollout.num_turns <= max_turns


def test_a_first_turn_is_one_call_names_hold_no_place_and_turns_keep_their_versions() -> None:
    engine = LetterEngine()
    found = episodes_of(engine).generate([prompt_of(4), dataclasses.replace(prompt_of(7), attempt=2)], 3)
    assert engine.calls[0] == ["4@0", "7@0.2"]
    later = [name for call in engine.calls[1:] for name in call]
    assert len(set(later)) == len(later) == sum(x.num_turns - 1 for x in found)
    assert set(later) <= {f"{name}#{k}/{turn}" for name in ("4@0", "7@0.2") for k in range(3) for turn in (1, 2)}
    prompts = (dataclasses.replace(prompt_of(7), attempt=2), prompt_of(4))
    alone = [x for prompt in prompts for x in episodes_of(LetterEngine()).generate([prompt], 3)]
    assert sorted(map(repr, alone)) == sorted(map(repr, found))  # whichever rank takes which prompt
    engine = LetterEngine(newer_every=2)
    for rollout in episodes_of(engine, max_turns=4).generate([prompt_of(k) for k in range(6)], 2):
        assert sum(count for _, count in rollout.weight_versions) == len(rollout.response_ids)
        versions = [version for version, _ in rollout.weight_versions]
        assert versions == sorted(set(versions)) and versions[0] == 3
        assert len(versions) == (rollout.num_turns // 2 + 1)  # call 1 by version 3, calls 2 and 3 by 4, call 4 by 5


def test_an_observation_is_the_templates_and_appended_only_where_a_token_fits_behind_it() -> None:
    """At every room from one token to enough, for an episode of two turns."""
    wholes = ((k, plain_episode(prompt_of(k), 0, 99, 3)) for k in range(99))
    prompt, whole = next((prompt_of(k), x) for k, x in wholes if len(x["mask"]) > 9 and x["mask"].count(False) == 3)
    first = whole["mask"].index(False)  # tokens of the first turn
    reasons = {}
    for room in range(1, len(whole["ids"]) + 2):
        (rollout,) = episodes_of(LetterEngine(room=room)).generate([prompt], 1)
        reasons[room] = (rollout.finish_reason, len(rollout.response_ids), rollout.num_turns)
    assert reasons[first - 1] == ("length", first - 1, 1)  # the turn itself was cut, and the environment never saw it
    for room in range(first, first + 4):
        assert reasons[room] == ("length", first, 1)
    assert reasons[first + 4] == ("length", first + 4, 2)
    assert reasons[len(whole["ids"])] == ("stop", len(whole["ids"]), 2)
    tokenizer = tokenizer_of(CHATML)
    episodes = episodes_of(LetterEngine(room=400), tokenizer=tokenizer, template="chat", role="user")
    rollout = next(x for x in episodes.generate([prompt_of(k) for k in range(9)], 1) if x.num_turns == 2)
    start, end = rollout.loss_mask.index(False), len(rollout.loss_mask) - rollout.loss_mask[::-1].index(False)
    between = tokenizer.decode(list(rollout.response_ids[start:end]))
    assert between.startswith("\n<|im_start|>user\n=") and between.endswith(";<|im_end|>\n<|im_start|>assistant\n")
    assert rollout.response_ids[start - 1] == STOP


@pytest.mark.parametrize(("fault", "words"), [
    ("reset", r"sample 2@0#0, reset.*no such puzzle"),
    ("raises", r"sample 2@0#0, step after turn 1.*KeyError.*the tool's table"),
    ("hangs", r"sample 2@0#0, step after turn 1.*environment\.deadline_s=0\.5 s.*held\.wait"),
    ("returns", r"sample 2@0#0, step after turn 1.*it returned a str; return a megatron_rl\.environment\.Step"),
    ("nan", r"sample 2@0#0.*its reward is 1e"),
    ("observes", r"sample 2@0#0.*its observation is a int"),
])
def test_an_environment_that_fails_is_named_or_costs_its_own_samples(fault: str, words: str) -> None:
    prompts = [prompt_of(k, **({"fault": fault} if k == 2 else {})) for k in range(4)]
    given = {"environment": FAULTY} | ({"deadline_s": SHORT_S} if fault == "hangs" else {})
    with pytest.raises(EpisodeError, match=f"(?s){words}"):
        episodes_of(LetterEngine(), **given).generate(prompts, 1)
    found = episodes_of(LetterEngine(), **given, on_error="drop").generate(prompts, 2)
    assert [x.excluded is not None for x in found] == [False] * 4 + [True] * 2 + [False] * 2
    wanted = episodes_of(LetterEngine()).generate(prompts, 2)
    assert [x for x in found if x.excluded is None] == [x for x in wanted if x.prompt.prompt_id != "2@0"]
    assert all(x.response_ids and x.environment_reward is None for x in found if x.excluded is not None)


@pytest.mark.parametrize("engine", [LetterEngine(seed=30), SlowLastEngine(seed=30)])
def test_the_first_step_that_hangs_ends_the_run(engine: LetterEngine) -> None:
    """Of groups that end as 2, 3, 0, 1: no other step is tried, and an engine that still samples is not waited for."""
    Faulty.hanging.clear()
    prompts = [prompt_of(k, **({"fault": "hangs"} if k in (2, 3) else {})) for k in range(4)]
    episodes = episodes_of(engine, FAULTY, deadline_s=SHORT_S, num_threads=1, on_error="fail")
    if isinstance(engine, SlowLastEngine):
        engine.may_end = lambda: episodes._pool.failed is not None
    with pytest.raises(EpisodeError, match=r"sample 2@0#0, step after turn 1"):
        episodes.generate(prompts, 1)
    assert Faulty.hanging == ["2@0"] and len(engine.calls) == 1


@pytest.mark.parametrize("losses", [(0,), (2,), (None, 0), (None, 1), (None, None, 1)])
def test_a_lost_engine_leaves_whole_groups_and_the_rest_is_asked_again(losses: tuple) -> None:
    prompts = [prompt_of(k) for k in range(6)]
    engine = LetterEngine(losses=losses)
    episodes = episodes_of(engine, max_turns=4)
    told: dict[int, list[Rollout]] = {}
    with pytest.raises(EngineLost, match="it was killed") as lost:
        episodes.generate(prompts, 2, on_finished=lambda k, group: told.setdefault(k, group))
    assert told == lost.value.finished
    left = [k for k in range(6) if k not in told]
    again = episodes.generate([prompts[k] for k in left], 2)
    whole = {**told, **{k: again[2 * i : 2 * i + 2] for i, k in enumerate(left)}}
    assert [x for k in range(6) for x in whole[k]] == episodes_of(LetterEngine(), max_turns=4).generate(prompts, 2)


def test_what_on_finished_raises_ends_the_call() -> None:
    def refuse(index: int, group: list[Rollout]) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        episodes_of(LetterEngine()).generate([prompt_of(1)], 1, on_finished=refuse)


def parts_of(tokenizer, *overrides: str):
    config = load_config(None, [*overrides])
    return environment_parts(config.environment, config.data, tokenizer)


@pytest.mark.parametrize(("given", "words"), [
    ("calculato", "did you mean 'calculator'"),
    ("tests.nowhere:Echo", "importing 'tests.nowhere' failed"),
    (f"{HERE}:Nobody", "has no 'Nobody'"),
    (f"{HERE}:BOUND_S", "is a float"),
    (f"{HERE}:LetterEngine", "has no method 'reset'"),
    ("calculator|environment.arguments={digits: 3}", r"cannot be made with .*'digits'.*it takes \(opening"),
])
def test_what_cannot_be_an_environment_is_refused_at_once(given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parts_of(TOKENIZER, *f"environment.name={given}".split("|"))


def test_a_template_without_tools_says_so() -> None:
    with pytest.raises(ConfigError, match=r"environment\.role=tool.*no tools here"):
        parts_of(tokenizer_of(STRICT), "environment.name=calculator", "data.template=chat")
