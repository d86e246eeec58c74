"""A real embedded engine behind an endpoint, a chat template for its tokenizer, an agent and a client in plain HTTP."""

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Mapping

from megatron_rl.config import EndpointConfig
from megatron_rl.rollout.endpoint.agents import AgentEngine
from megatron_rl.rollout.engines.embedded import TransformersEngine
from megatron_rl.types import Prompt
from tests.patience import patient
from tests.unit.rollout.tiny_model import TEMPERATURE, VOCAB, _tokenizer

ROOM = 24
# One letter for each role, and the tools' number: a(user) b(assistant) c(tool) d(system, tools).
TEMPLATE = (
    "{% if tools %}d{{ tools | length }}{% endif %}{% for m in messages %}"
    "{{ {'user': 'a', 'assistant': 'b', 'tool': 'c', 'system': 'd'}[m.role] }}{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}b{% endif %}"
)
PROMPTS = [Prompt(prompt_id=f"{k}@0", text="", token_ids=(2,), columns={"question": f"{k}+{k}"}) for k in range(3)]


def chat_tokenizer(tokenizer=None):
    tokenizer = tokenizer or _tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def with_agent(inner: TransformersEngine, agent, *, on_error: str = "fail", tokenizer=None, **settings) -> AgentEngine:
    settings = {"agent": "tests:agent", "deadline_s": patient(60.0)} | settings
    return AgentEngine(
        inner, agent, chat_tokenizer(tokenizer), EndpointConfig(**settings), port=0, temperature=TEMPERATURE,
        on_error=on_error, max_prompt_tokens=20, max_response_tokens=ROOM, vocab_size=len(VOCAB),
    )


def asked(url: str, body: Mapping | bytes, key: str = "any") -> tuple[int, str]:
    """Return the status and the text of a POST's answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=patient(60.0)) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def chatted(base_url: str, messages, **fields) -> dict:
    """Return the choice of a chat completion."""
    status, text = asked(f"{base_url}/chat/completions", {"model": "policy", "messages": messages, **fields})
    assert status == 200, text
    return json.loads(text)["choices"][0]


@contextlib.contextmanager
def served(inner, agent, **settings):
    """Open an agent's engine, and close it without its inner one, which other tests use."""
    engine = with_agent(inner, agent, **settings)
    try:
        yield engine
    finally:
        engine._pool.close()
        engine._open.close()


def generated(inner, agent, *, samples=2, temperature=None, prompts=PROMPTS, **settings):
    """Return the rollouts and the report of one call."""
    with served(inner, agent, **settings) as engine:
        return engine.generate(prompts, samples, temperature=temperature), engine.tally.counts


def three_turns(base_url, row, between=lambda: None):
    messages = [{"role": "user", "content": row["question"]}]
    for told in ("5=", "7*", None):
        messages.append(chatted(base_url, messages, max_tokens=4)["message"])
        between()
        if told is not None:
            messages.append({"role": "tool", "content": told})
    return 0.5
