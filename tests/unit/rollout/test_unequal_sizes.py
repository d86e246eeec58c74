"""A call with another number of samples for each prompt gives each group the samples that it has in a call of its own.

A sample's random numbers do not depend on the size of its group or of its batch.
"""

import numpy as np
import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.rollout.engines.embedded import TransformersEngine
from megatron_rl.types import Prompt, Rollout
from tests.unit.rollout import letter_episodes
from tests.unit.rollout.endpoint.agents_at_work import PROMPTS as QUESTIONS
from tests.unit.rollout.endpoint.agents_at_work import ROOM, chatted, generated
from tests.unit.rollout.tiny_model import ROUNDING, _tokenizer, engine_of

SIZES = (2, 5, 3, 1, 7)
PROMPTS = [Prompt(prompt_id=f"{k}@0", text="", token_ids=(2 + k, 5, 3)[: 1 + k % 3], columns={}) for k in range(5)]


@pytest.fixture(scope="module")
def inner(model, hf_path) -> TransformersEngine:
    return engine_of(hf_path, model, max_response_tokens=ROOM, max_batch_samples=6)


def assert_alone(engine, prompts: list[Prompt], sizes: tuple[int, ...]) -> None:
    """Assert that a call with these sizes gives what one call for each prompt gives, and reports each group whole."""
    told: dict[int, list[Rollout]] = {}
    found = engine.generate(prompts, list(sizes), on_finished=told.setdefault)
    assert [rollout for k in range(len(prompts)) for rollout in told[k]] == found
    assert [len(told[k]) for k in range(len(prompts))] == list(sizes)
    alone = [
        rollout for prompt, size in zip(prompts, sizes, strict=True) for rollout in engine.generate([prompt], size)
    ]
    assert [x.response_ids for x in found] == [x.response_ids for x in alone]
    assert [(x.prompt, x.sample_index) for x in found] == [(x.prompt, x.sample_index) for x in alone]
    assert max(np.abs(np.subtract(x.logprobs, y.logprobs)).max() for x, y in zip(found, alone, strict=True)) < ROUNDING


def test_rollouts_of_unequal_groups(inner):
    """A group above the batch's limit of 6 is cut in two; other batches hold several groups."""
    assert_alone(inner, PROMPTS, SIZES)


def test_episodes_of_unequal_groups(inner):
    environment = "tests.unit.rollout.test_multi_turn_engine:Counter"
    assert_alone(
        letter_episodes.episodes_of(inner, environment, tokenizer=_tokenizer(), room=ROOM, max_turns=4), PROMPTS, SIZES
    )


def test_sessions_of_unequal_groups(inner):
    def agent(base_url, row):
        chatted(base_url, [{"role": "user", "content": row["question"]}])
        return 1.0

    found, counts = generated(inner, agent, samples=[3, 1, 2])
    assert counts["sessions"] == 6
    whole = {(x.prompt.prompt_id, x.sample_index): x.response_ids for x in generated(inner, agent, samples=3)[0]}
    wanted = [(question.prompt_id, k) for question, size in zip(QUESTIONS, (3, 1, 2), strict=True) for k in range(size)]
    assert [(x.prompt.prompt_id, x.sample_index) for x in found] == wanted
    assert [x.response_ids for x in found] == [whole[key] for key in wanted]


def test_wrong_sizes_are_refused(inner):
    with pytest.raises(ConfigError, match="at least 1"):
        inner.generate(PROMPTS[:2], [1, 0])
    with pytest.raises(ValueError, match="3 numbers for 2 prompts"):
        inner.generate(PROMPTS[:2], [1, 2, 3])
