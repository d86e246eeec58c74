"""The engine that the tests of the endpoint share."""

import pytest

from tests.unit.rollout.endpoint.agents_at_work import ROOM, chat_tokenizer
from tests.unit.rollout.tiny_model import engine_of


@pytest.fixture(scope="package")
def inner(model, hf_path):
    return engine_of(hf_path, model, chat_tokenizer(), max_response_tokens=ROOM, max_batch_samples=16)
