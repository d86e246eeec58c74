"""Episodes and agents' sessions of several turns on a real vLLM engine, alone and in whole runs."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron_rl.config import EnvironmentConfig
from megatron_rl.data.chat import Observations
from megatron_rl.environment import Step, environment_maker
from megatron_rl.rollout.endpoint.agents import AgentEngine
from megatron_rl.rollout.engines.engine import EngineLost
from megatron_rl.rollout.engines.multi_turn import MultiTurnEngine
from megatron_rl.types import Prompt
from tests.runs.command import rows_of
from tests.unit.rollout.endpoint.agents_at_work import asked
from tests.vllm.agents import agents_on
from tests.vllm.rig import LOGPROB_TOLERANCE, gap_of, make_prompts, told
from tests.vllm.served import run_killing_engines

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]
SUMS = [Prompt(prompt_id=f"{k}@0", text="", token_ids=(2,), columns={"prompt": f"{k}+{7 * k}="}) for k in range(24)]
PROMPTS = {"episodes": make_prompts(*(1 + 7 * k % 60 for k in range(40))), "agents": SUMS}


class Length:
    """An environment that tells how long a turn was, and says little else."""

    def reset(self, prompt) -> None:
        self.turns = 0

    def step(self, action: str) -> Step:
        self.turns += 1
        return Step(observation=f"={len(action)} ", reward=0.5, done=self.turns == 4)


def counts_on(base_url: str, row: dict) -> float:
    """Let a text go on three times, and earn a tenth for each of its characters."""
    text = row["prompt"]
    for number in range(3):
        status, said = asked(f"{base_url}/completions", {"prompt": text, "max_tokens": 4})
        assert status == 200, said
        text += json.loads(said)["choices"][0]["text"] + f"+{number}="
    return len(text) / 10


@contextlib.contextmanager
def sessions_on(engine, bench, kind: str) -> Iterator[MultiTurnEngine | AgentEngine]:
    """Open sessions on an engine, which outlives them."""
    if kind == "agents":
        with agents_on(engine, bench, counts_on) as opened:
            yield opened
        return
    tokenizer, room = AutoTokenizer.from_pretrained(bench.folder), bench.config.rollout.max_response_tokens
    config = EnvironmentConfig(name="tests.vllm.test_turns:Length", max_turns=6, deadline_s=30.0)
    maker, observations = environment_maker(config), Observations(tokenizer, "{prompt}")
    yield MultiTurnEngine(engine, maker, observations, tokenizer, config, max_response_tokens=room)


@pytest.fixture(params=PROMPTS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def sessions(bench, kind) -> Iterator[MultiTurnEngine | AgentEngine]:
    bench.load(1)
    with sessions_on(bench.engine, bench, kind) as opened:
        yield opened


def test_greedy_sessions_equal_the_transformers_engines(bench, sessions, kind) -> None:
    with sessions_on(bench.in_this_process(1), bench, kind) as other:
        ours, theirs = (x.generate(PROMPTS[kind], 2, temperature=0.0) for x in (sessions, other))
    assert told(ours) == told(theirs)
    for field in ("text", "loss_mask", "environment_reward", "context_ids", "num_turns"):
        assert [x.__getattribute__(field) for x in ours] == [x.__getattribute__(field) for x in theirs]
    turns = [x.num_turns for x in ours]
    assert set(turns) == {3} if kind == "agents" else 1 in turns and sum(n > 1 for n in turns) >= 4


def test_logprobs_equal_hugging_faces_where_a_token_was_sampled(bench, sessions, kind) -> None:
    found, again = (sessions.generate(prompts, 2) for prompts in (PROMPTS[kind], PROMPTS[kind][::-1]))
    assert sorted(told(found)) == sorted(told(again)), "sessions that run in another order draw the same"
    gaps, elsewhere = [], 0
    for rollout in found:
        mask = np.ones(len(rollout.response_ids), bool) if rollout.loss_mask is None else np.array(rollout.loss_mask)
        context = rollout.prompt.token_ids if rollout.context_ids is None else rollout.context_ids
        seen = replace(rollout, prompt=replace(rollout.prompt, token_ids=context))
        gaps.append(gap_of(bench.model, seen, bench.config.rollout.temperature)[mask].max())
        elsewhere += int((~mask).sum())
        assert sum(count for _, count in rollout.weight_versions) == len(rollout.response_ids)
    print(f"{elsewhere} tokens that were not sampled, {max(gaps):.2e}")
    assert max(gaps) < LOGPROB_TOLERANCE and elsewhere > 50


@pytest.mark.long
def test_an_engine_killed_between_two_turns_costs_what_was_under_way(bench, sessions, kind) -> None:
    """Groups that were whole stay; after the engine is back the rest is drawn as if nothing had happened."""
    prompts, version, told_of = PROMPTS[kind], bench.engine.weight_version, {}
    wanted = sessions.generate(prompts, 2)
    counts = [sessions.take_counts()] if kind == "agents" else []

    def kill_once(index: int, group: list) -> None:
        if not told_of:
            os.kill(bench.pid, signal.SIGKILL)
        told_of[index] = group

    with pytest.raises(EngineLost) as lost:
        sessions.generate(prompts, 2, on_finished=kill_once)
    assert lost.value.finished == told_of and 0 < len(told_of) < len(prompts)
    counts += [sessions.take_counts()] if counts else []
    bench.load_again(1, version, sessions.lost)
    left = [k for k in range(len(prompts)) if k not in told_of]
    again = sessions.generate([prompts[k] for k in left], 2)
    found = told_of | {k: again[2 * i : 2 * i + 2] for i, k in enumerate(left)}
    assert told(x for k in range(len(prompts)) for x in found[k]) == told(wanted)
    if counts:
        begun, first, then = 2 * len(prompts), counts[-1], sessions.take_counts()
        assert first["endpoint/sessions"] == begun and 0 < first["endpoint/lost"] <= begun - 2 * len(told_of)
        assert then["endpoint/sessions"] == 2 * len(left) and then["endpoint/lost"] == 0


@pytest.mark.long
def test_a_whole_run_of_episodes(run, tmp_path) -> None:
    """In a whole run of DP2 the trainer's log-probs are the engine's on every sampled token, turn after turn."""
    episodes = ("environment.name=tests.runs.test_turn_runs:Riddle", "environment.max_turns=3", "sft.steps=20")
    rewards = "reward.functions=[environment,tests.reward_functions:parity]"
    run(*episodes, rewards, "rollout.max_response_tokens=24", "optimizer.lr=3e-4", world=2)
    rows = [row for row in rows_of(tmp_path) if "train/logprob_gap_max" in row]
    assert len(rows) == 2 and all(row["train/logprob_gap_max"] < LOGPROB_TOLERANCE for row in rows)
    assert all(row["rollout/turns_mean"] > 1.1 for row in rows)


def test_a_whole_run_of_agents_whose_engine_is_killed(run, tmp_path) -> None:
    """The trainer's log-probs are the engine's on every sampled token; sessions that were lost begin anew."""
    agents = ("rollout.endpoint.agent=tests.vllm.test_turns:counts_on", "rollout.endpoint.deadline_s=100")
    given = (*agents, "rollout.max_response_tokens=24", "train.num_rollouts=3", "reward.functions=[environment]")
    ((said, killed),) = run(*given, function=run_killing_engines, more=((2,),))
    assert killed == 1 and said.count("is started again") == 1, said
    rows = [row for row in rows_of(tmp_path) if "train/logprob_gap_max" in row]
    assert len(rows) == 3 and all(row["train/logprob_gap_max"] < LOGPROB_TOLERANCE for row in rows), rows
    counts = [(row["endpoint/sessions"], row["endpoint/lost"]) for row in rows]
    assert counts[0] == counts[2] == (32, 0) and counts[1][0] == 32 + counts[1][1] > 32, counts
    assert all(row["rollout/turns_mean"] == 3.0 for row in rows)
