"""Episodes on a real vLLM engine.

Their tokens are the embedded engine's, log-probs are Hugging Face's where a token was sampled, and a whole run goes
through.
"""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron_rl.config import EnvironmentConfig
from megatron_rl.data.chat import Observations
from megatron_rl.environment import Step, environment_maker
from megatron_rl.rollout.engine import EngineLost
from megatron_rl.rollout.multi_turn import MultiTurnEngine
from tests.runs.command import arguments, command_line, rows_of
from tests.vllm.rig import LOGPROB_TOLERANCE, make_prompts, reference_logprobs, told

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]
PROMPTS = make_prompts(*(1 + 7 * k % 60 for k in range(40)))


class Length:
    """An environment that tells how long a turn was, and says little else."""

    def reset(self, prompt) -> None:
        self.turns = 0

    def step(self, action: str) -> Step:
        self.turns += 1
        return Step(observation=f"={len(action)} ", reward=0.5, done=self.turns == 4)


def episodes_of(engine, bench) -> MultiTurnEngine:
    config = EnvironmentConfig(name="tests.vllm.test_turns:Length", max_turns=6, deadline_s=30.0)
    tokenizer = AutoTokenizer.from_pretrained(bench.folder)
    room = bench.config.rollout.max_response_tokens
    return MultiTurnEngine(
        engine,
        environment_maker(config),
        Observations(tokenizer, "{prompt}"),
        tokenizer,
        config,
        max_response_tokens=room,
    )


def test_greedy_episodes_equal_the_transformers_engines(bench) -> None:
    bench.load(1)
    other = bench.in_this_process(1)
    ours = episodes_of(bench.engine, bench).generate(PROMPTS, 2, temperature=0.0)
    theirs = episodes_of(other, bench).generate(PROMPTS, 2, temperature=0.0)
    assert told(ours) == told(theirs)
    for name in ("text", "loss_mask", "environment_reward"):
        assert [x.__getattribute__(name) for x in ours] == [x.__getattribute__(name) for x in theirs]
    turns = [x.num_turns for x in ours]
    print(f"turns: {sorted(turns)}")
    assert sum(n > 1 for n in turns) >= 4 and 1 in turns


def test_logprobs_equal_hugging_faces_where_a_token_was_sampled(bench) -> None:
    bench.load(1)
    found = episodes_of(bench.engine, bench).generate(PROMPTS, 4)
    again = episodes_of(bench.engine, bench).generate(PROMPTS[::-1], 4)
    assert sorted(told(found)) == sorted(told(again))
    gaps, environment = [], 0
    for rollout in found:
        mask = np.ones(len(rollout.response_ids), bool) if rollout.loss_mask is None else np.array(rollout.loss_mask)
        wanted = reference_logprobs(bench.model, rollout, bench.config.rollout.temperature)
        gaps.append(np.abs(wanted - np.array(rollout.logprobs))[mask].max())
        environment += int((~mask).sum())
        assert sum(count for _, count in rollout.weight_versions) == len(rollout.response_ids)
    print(f"{environment} tokens of the environment, {max(gaps):.2e}")
    assert max(gaps) < LOGPROB_TOLERANCE and environment > 50


def test_a_whole_run(pool, arithmetic, tmp_path) -> None:
    """In a whole run of DP2 the trainer's log-probs are the engine's on every sampled token, turn after turn.

    Each rank has an engine.
    """
    given = arguments(
        arithmetic,
        tmp_path,
        "rollout.engine=vllm",
        "run.deadline_s=150",
        "rollout.start_s=120",
        "rollout.request_s=60",
        "metrics.dense_every_rollouts=1",
        "metrics.dense_samples=64",
        "environment.name=tests.runs.test_turn_runs:Riddle",
        "environment.max_turns=3",
        "rollout.max_response_tokens=24",
        "sft.steps=20",
        "reward.functions=[environment,tests.reward_functions:parity]",
    )
    results = pool.run(2, command_line, given, timeout_s=200)
    assert [code for code, _ in results] == [0, 0], results
    rows = [row for row in rows_of(tmp_path) if "train/logprob_gap_max" in row]
    assert len(rows) == 2 and all(
        row["train/logprob_gap_max"] < LOGPROB_TOLERANCE and row["rollout/turns_mean"] > 1.1 for row in rows
    )


def test_an_engine_killed_between_two_turns_costs_what_was_under_way(bench) -> None:
    """An engine killed between two turns costs only the unfinished groups.

    Groups that were whole stay; after the engine is back the rest is drawn as if nothing had happened.
    """
    bench.load(1)
    version = bench.engine.weight_version
    wanted = episodes_of(bench.engine, bench).generate(PROMPTS, 2)
    episodes, told_of = episodes_of(bench.engine, bench), {}

    def kill_once(index: int, group: list) -> None:
        if not told_of:
            os.kill(bench.pid, signal.SIGKILL)
        told_of[index] = group

    with pytest.raises(EngineLost) as lost:
        episodes.generate(PROMPTS, 2, on_finished=kill_once)
    assert lost.value.finished == told_of and 0 < len(told_of) < len(PROMPTS)
    bench.load_again(1, version, episodes.lost)
    left = [k for k in range(len(PROMPTS)) if k not in told_of]
    again = episodes.generate([PROMPTS[k] for k in left], 2)
    found = told_of | {k: again[2 * i : 2 * i + 2] for i, k in enumerate(left)}
    assert told(x for k in range(len(PROMPTS)) for x in found[k]) == told(wanted)
