"""Agents' sessions on an engine of the tests, through the run's endpoint."""

import contextlib
from collections.abc import Callable, Iterator

from transformers import AutoTokenizer

from megatron_rl.config import EndpointConfig
from megatron_rl.rollout.endpoint.agents import AgentEngine
from tests.patience import patient
from tests.vllm.rig import Bench


@contextlib.contextmanager
def agents_on(engine, bench: Bench, agent: Callable) -> Iterator[AgentEngine]:
    """Open an endpoint for an agent's sessions on ``engine``, which outlives them. ``bench``: has the settings."""
    tokenizer, room = AutoTokenizer.from_pretrained(bench.folder), bench.config.rollout.max_response_tokens
    config = EndpointConfig(agent="tests:agent", deadline_s=patient(60.0), num_agents=16)
    rollout, given = bench.config.rollout, dict(port=0, on_error="fail", max_response_tokens=room)
    given |= dict(temperature=rollout.temperature, max_prompt_tokens=bench.config.data.max_prompt_tokens)
    opened = AgentEngine(engine, agent, tokenizer, config, vocab_size=len(tokenizer), **given)
    try:
        yield opened
    finally:
        opened._pool.close()
        opened._open.close()
