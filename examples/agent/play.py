"""An agent program: OpenAI's client, unmodified, plays the calculator game against the endpoint of a run.

It knows nothing of the trainer. ``base_url`` is all that tells one session from another.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import openai

from megatron_rl.environment.calculator import evaluate, last_number

OPENING, CLOSING, MAX_TURNS = "<calc>", "</calc>", 3
for name in ("httpx", "httpx2"):  # a line for each request
    logging.getLogger(name).setLevel(logging.WARNING)


@functools.cache
def shared_client() -> openai.OpenAI:
    """Return the process's one client: its connections serve all sessions."""
    return openai.OpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0)


def play(base_url: str, row: Mapping[str, object]) -> float:
    """Play one episode and return its reward: 1.0 for the right number, else 0.0.

    row: ``prompt``, such as "47*83=", and ``answer``.
    """
    client = shared_client().with_options(base_url=base_url)
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(MAX_TURNS):
        turn = client.chat.completions.create(model="policy", messages=messages).choices[0]
        said = turn.message.content or ""
        before, closing, _ = said.rpartition(CLOSING)
        _, opening, expression = before.rpartition(OPENING)
        if turn.finish_reason == "length" or not (opening and closing):
            return float(last_number(said) == last_number(str(row["answer"])))
        try:
            result = evaluate(expression)
        except ValueError:
            result = "error"
        messages += [turn.message, {"role": "tool", "content": result, "tool_call_id": "calculator"}]
    return 0.0
