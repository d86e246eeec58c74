"""Agents on a real vLLM engine, over HTTP.

Their tokens are the embedded engine's, log-probs are Hugging Face's, and an engine that is lost costs no session.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron_rl.config import EndpointConfig
from megatron_rl.rollout.endpoint.agents import AgentEngine
from megatron_rl.rollout.engine import EngineLost
from megatron_rl.types import Prompt
from tests.patience import patient
from tests.runs.command import arguments, rows_of
from tests.unit.rollout.endpoint.agents_at_work import asked
from tests.vllm.rig import LOGPROB_TOLERANCE, reference_logprobs, told
from tests.vllm.served import VLLM, run_killing_engines

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]
PROMPTS = [Prompt(prompt_id=f"{k}@0", text="", token_ids=(2,), columns={"prompt": f"{k}+{7 * k}="}) for k in range(24)]


def counts_on(base_url: str, row: dict) -> float:
    """Let a text go on three times, and earn a tenth for each of its characters."""
    text = row["prompt"]
    for number in range(3):
        status, said = asked(f"{base_url}/completions", {"prompt": text, "max_tokens": 4})
        assert status == 200, said
        text += json.loads(said)["choices"][0]["text"] + f"+{number}="
    return len(text) / 10


def agents_on(engine, bench) -> AgentEngine:
    return AgentEngine(
        engine,
        counts_on,
        AutoTokenizer.from_pretrained(bench.folder),
        EndpointConfig(agent="tests.vllm.test_endpoint:counts_on", deadline_s=patient(60.0), num_agents=16),
        port=0,
        temperature=bench.config.rollout.temperature,
        max_prompt_tokens=bench.config.data.max_prompt_tokens,
        max_response_tokens=bench.config.rollout.max_response_tokens,
        on_error="fail",
    )


@pytest.fixture
def agents(bench):
    """Return agents on the session's engine, which outlives them."""
    engine = agents_on(bench.engine, bench)
    yield engine
    engine._pool.close()
    engine._open.close()


def test_greedy_sessions_equal_the_transformers_engines(bench, agents) -> None:
    bench.load(1)
    inner = bench.in_this_process(1)
    other = agents_on(inner, bench)
    ours, theirs = (engine.generate(PROMPTS, 1, temperature=0.0) for engine in (agents, other))
    other.close()
    assert told(ours) == told(theirs)
    for name in ("text", "loss_mask", "environment_reward", "context_ids"):
        assert [getattr(x, name) for x in ours] == [getattr(x, name) for x in theirs]


def test_logprobs_equal_hugging_faces_where_a_token_was_sampled(bench, agents) -> None:
    bench.load(1)
    found = agents.generate(PROMPTS, 2)
    again = agents.generate(PROMPTS[::-1], 2)
    assert sorted(told(found)) == sorted(told(again)), "sessions that run in another order draw the same"
    gaps = []
    for rollout in found:
        seen = replace(rollout, prompt=replace(rollout.prompt, token_ids=rollout.context_ids))
        wanted = reference_logprobs(bench.model, seen, bench.config.rollout.temperature)
        mask = np.array(rollout.loss_mask)
        gaps.append(np.abs(wanted - np.array(rollout.logprobs))[mask].max())
        assert sum(count for _, count in rollout.weight_versions) == len(rollout.response_ids) and not mask.all()
    print(f"{max(gaps):.2e}")
    assert max(gaps) < LOGPROB_TOLERANCE and {x.num_turns for x in found} == {3}


def test_an_engine_killed_in_mid_session_costs_the_unfinished_groups(bench, agents) -> None:
    """Groups that were whole stay; after the engine is back the rest is drawn as if nothing had happened."""
    bench.load(1)
    version = bench.engine.weight_version
    wanted, told_of = agents.generate(PROMPTS, 2), {}
    agents.take_counts()

    def kill_once(index: int, group: list) -> None:
        if not told_of:
            os.kill(bench.pid, signal.SIGKILL)
        told_of[index] = group

    with pytest.raises(EngineLost) as lost:
        agents.generate(PROMPTS, 2, on_finished=kill_once)
    assert lost.value.finished == told_of and 0 < len(told_of) < len(PROMPTS)
    counts = agents.take_counts()
    begun = 2 * len(PROMPTS)
    assert counts["endpoint/sessions"] == begun and 0 < counts["endpoint/lost"] <= begun - 2 * len(told_of)
    bench.load_again(1, version, agents.lost)
    left = [k for k in range(len(PROMPTS)) if k not in told_of]
    again = agents.generate([PROMPTS[k] for k in left], 2)
    found = told_of | {k: again[2 * i : 2 * i + 2] for i, k in enumerate(left)}
    assert told(x for k in range(len(PROMPTS)) for x in found[k]) == told(wanted)
    counts = agents.take_counts()
    assert counts["endpoint/sessions"] == 2 * len(left) and counts["endpoint/lost"] == 0


def test_a_whole_run_whose_engine_is_killed(pool, arithmetic, tmp_path) -> None:
    """In a whole run the trainer's log-probs are the engine's on every sampled token, and a lost engine costs none.

    Sessions that were lost begin anew, and are counted.
    """
    given = arguments(
        arithmetic,
        tmp_path,
        *VLLM,
        "rollout.endpoint.agent=tests.vllm.test_endpoint:counts_on",
        "rollout.endpoint.deadline_s=100",
        "rollout.max_response_tokens=24",
        "train.num_rollouts=3",
        "reward.functions=[environment]",
    )
    ((code, said, killed),) = pool.run(1, run_killing_engines, given, (2,), timeout_s=300)
    assert (code, killed) == (0, 1) and said.count("is started again") == 1, said
    rows = [row for row in rows_of(tmp_path) if "train/logprob_gap_max" in row]
    assert len(rows) == 3 and all(row["train/logprob_gap_max"] < LOGPROB_TOLERANCE for row in rows), rows
    counts = [(row["endpoint/sessions"], row["endpoint/lost"]) for row in rows]
    assert counts[0] == counts[2] == (32, 0) and counts[1][0] == 32 + counts[1][1] > 32, counts
    assert all(row["rollout/turns_mean"] == 3.0 for row in rows)
