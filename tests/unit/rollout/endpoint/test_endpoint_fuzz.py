"""What goes wrong in one session of the endpoint is that session's: random requests, errors of engine and tokenizer."""

import contextlib
import copy
import http.client
import json
import math
import queue
import threading
from collections import Counter

import numpy as np
import psutil
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from megatron_rl.errors import EngineError
from megatron_rl.json_text import walk
from megatron_rl.rollout.endpoint import bodies
from megatron_rl.rollout.endpoint.rendering import Rendering
from megatron_rl.rollout.endpoint.requests import Refused
from megatron_rl.rollout.engines.wrapper import EngineAround
from megatron_rl.types import Prompt
from tests.odd_bodies import of_schema
from tests.pairwise import quick
from tests.patience import patient
from tests.unit.rollout.endpoint.agents_at_work import PROMPTS, asked, chat_tokenizer, generated, served, three_turns
from tests.unit.rollout.tiny_model import ROUNDING, TEMPERATURE

BAD = (3, 21, 3)
EXAMPLES = 200  # of a seed
CHAT, TEXT = "v1/chat/completions", "v1/completions"
SCHEMAS = {
    path: kind.model_json_schema()
    for path, kind in ((CHAT, bodies.ChatBody), (TEXT, bodies.CompletionBody), ("reward", bodies.RewardBody))
}
VALID = {
    path: of_schema(schema, {"temperature": st.just(TEMPERATURE)}, text="0123 +=ab") for path, schema in SCHEMAS.items()
}
ROUTES = (*SCHEMAS, "v1/models")
PATHS = ("/", "//[", "/docs", "/sessions//reward", "/sessions/%ed%a0%80/v1/models", "/sessions/" + "a" * 3000, "/%00")
DEEP = json.loads("[" * 90 + "]" * 90)
NUMBERS = (True, 0, -1, 22, 2**63, 10**30, 10**400, 0.5, 1e39, -1e308, math.nan, math.inf)
ODD = (
    *(None, "", "\ud800", "\0", "x", "1" * 70_000, "the-text-of-this-turn" * 3),
    *([], {}, [[]], [1], ["x", "x"], {"": None}, DEEP, [DEEP]),
)


odd = st.sampled_from(NUMBERS) | st.sampled_from(ODD).map(copy.deepcopy)  # mutations change what was drawn


@st.composite
def requests(draw) -> tuple[str, str | None, str, bytes, dict]:
    """Draw (method, path, route, body, headers); a path of None is the route's own in an attacker's session."""
    route = draw(st.sampled_from([*ROUTES, CHAT, TEXT]))
    body = draw(VALID[route]) if route in VALID else {}
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 4]))):
        places = [part for _, part in walk(body) if isinstance(part, dict | list) and part]
        if not places or draw(st.integers(0, 3)) == 0:
            name = draw(st.sampled_from([*bodies.NEUTRAL, *SCHEMAS.get(route, {}).get("properties", ())]))
            body[name] = draw(odd)
            continue
        part = draw(st.sampled_from(places))
        key = draw(st.sampled_from(list(part) if isinstance(part, dict) else range(len(part))))
        if draw(st.integers(0, 3)):
            part[key] = draw(odd)
        else:
            del part[key]
    text, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    method = "GET" if route == "v1/models" else "POST"
    match draw(st.integers(0, 15)):
        case 0:
            at = draw(st.integers(0, len(text)))
            text = text[:at] + draw(st.sampled_from([b"\xff", b"}", b"\\ud800", b"[" * 5000, b"1" * 999])) + text[at:]
        case 1:
            text = text[: draw(st.integers(0, len(text)))]
        case 2:
            headers = draw(st.sampled_from([{"Content-Type": "a/\xff"}, {"Host": "["}, {"Authorization": "\xff"}, {}]))
        case 3:
            method = draw(st.sampled_from(["GET", "PUT", "HEAD", "OPTIONS", "BREW"]))
        case 4:
            return method, draw(st.sampled_from(PATHS)), route, text, draw(st.sampled_from([{}, {}, {"Host": "["}]))
    return method, None, route, text, headers


@pytest.mark.parametrize("number", quick(range(20), 0))
def test_random_requests_are_answered_and_change_no_other_session(inner, number) -> None:
    """Two honest agents take their turns between the requests of a seed; their rollouts are those of a call without."""
    urls: dict[str, queue.SimpleQueue[str]] = {route: queue.SimpleQueue() for route in ROUTES}
    over, turn, seen = threading.Event(), threading.Semaphore(0), Counter()

    def agent(base_url, row):
        if row["question"] in urls:
            urls[row["question"]].put(base_url.removesuffix("v1"))
            assert over.wait(patient(300.0))
            return None if row["question"] == "reward" else 0.0
        return three_turns(base_url, row, between=lambda: turn.acquire(timeout=patient(60.0)))

    attackers = [Prompt(prompt_id=f"{x}@0", text="", token_ids=(2,), columns={"question": x}) for x in ROUTES]
    limits = {"on_error": "drop", "deadline_s": patient(300.0), "max_turns": 10**6, "max_body_mb": 0.9}
    with served(inner, agent, **limits) as engine:
        prompts, found = [*PROMPTS[:2], *attackers], []
        work = threading.Thread(target=lambda: found.extend(engine.generate(prompts, 1)), daemon=True)
        work.start()
        sessions = {route: waiting.get(timeout=patient(60.0)) for route, waiting in urls.items()}

        @seed(number)
        @settings(max_examples=EXAMPLES, database=None, phases=[Phase.generate])
        @given(requests())
        def attack(drawn) -> None:
            method, path, route, text, headers = drawn
            path = path or f"{sessions[route].removeprefix(engine.address)}{route}"
            address = engine.address.removeprefix("http://")
            with contextlib.closing(http.client.HTTPConnection(address, timeout=patient(60.0))) as connection:
                connection.request(method, path, text, headers)
                answer = connection.getresponse()
                said = answer.read()
            seen[answer.status] += 1
            assert answer.status < 500 and len(said) < 2**20, (answer.status, said[:500])
            if answer.status == 400 and said.startswith(b"{"):
                assert 0 < len(json.loads(said)["error"]["message"]) < 1500
            if seen.total() % (EXAMPLES // 8) == 0:
                turn.release()

        process = psutil.Process()
        before, size = process.num_fds(), process.memory_info().rss
        try:
            attack()
        finally:
            turn.release(100)
            asked(f"{sessions['reward']}reward", {"reward": 1.0})
            over.set()
            work.join(patient(120.0))
        assert process.num_fds() < before + 30 and process.memory_info().rss < size + 300 * 2**20
    assert len(found) == 6 and engine.tally.counts["sessions"] == 6 and not engine.tally.counts["lost"]
    assert all(x.excluded or x.environment_reward is not None for x in found) and {200, 400, 405} <= {*seen}
    for rollout, alone in zip(found, generated(inner, three_turns, samples=1, prompts=PROMPTS[:2])[0], strict=False):
        assert rollout.response_ids == alone.response_ids and rollout.environment_reward == 0.5
        assert np.abs(np.subtract(rollout.logprobs, alone.logprobs)).max() < ROUNDING


class Picky(EngineAround):
    """An engine that fails for every call with the prompt BAD, or for every call."""

    is_broken, is_elsewhere, own = False, False, threading.Lock()

    def generate(self, prompts, *args, **settings):
        if self.is_broken or any(prompt.token_ids == BAD for prompt in prompts):
            raise EngineError("request 0-1 was answered wrongly 2 times")
        with self.own:
            return self.engine.generate(prompts, *args, **settings)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_an_engine_raises_for_one_request_fails_that_request_alone(inner, elsewhere) -> None:
    def agent(base_url, row):
        if row["question"] == "0+0":
            refused.append(asked(f"{base_url}/completions", {"prompt": BAD}))
        return three_turns(base_url, row)

    refused, engine = [], Picky(inner)
    engine.is_elsewhere = elsewhere
    found, counts = generated(engine, agent)
    assert [x.response_ids for x in found] == [x.response_ids for x in generated(inner, three_turns)[0]]
    assert [status for status, _ in refused] == [400, 400] and "answered wrongly" in refused[0][1]
    assert counts["unsampled requests"] == 2 and not counts["failed"]
    engine.is_broken = True
    with pytest.raises(EngineError, match="answered wrongly"):
        generated(engine, agent, on_error="drop")


def test_a_session_ends_while_its_request_is_tokenized(inner, monkeypatch) -> None:
    def agent(base_url, row):
        def ask():
            answers.append(asked(f"{base_url}/completions", {"prompt": row["question"]}))

        thread = threading.Thread(target=ask)  # agents run side by side: the list's last one may be another's
        threads.append(thread)
        thread.start()
        assert began.acquire(timeout=patient(60.0))
        return 1.0

    def encode(*_):
        began.release()
        assert may.wait(patient(60.0))
        return (5,)

    threads, answers, may, began = [], [], threading.Event(), threading.Semaphore(0)
    with served(inner, agent, on_error="drop") as engine:
        monkeypatch.setattr(engine._rendering, "_encode", encode)
        found = engine.generate(PROMPTS, 1)
        may.set()
        for thread in threads:
            thread.join(patient(60.0))
    assert ["made no request" in x.excluded for x in found] == [True] * 3
    assert [status for status, _ in answers] == [410] * 3 and engine.tally.counts["late requests"] == 3


@pytest.mark.parametrize("kind", [TypeError, RecursionError, type("PanicException", (BaseException,), {})])
def test_whatever_the_tokenizer_raises_is_that_requests(kind, monkeypatch) -> None:
    def fails(*_):
        raise kind("byte index 3 is not a boundary")

    rendering = Rendering(chat_tokenizer())
    monkeypatch.setattr(rendering, "_encode", fails)
    chat = bodies.chat_request({"messages": [{"role": "user"}]}, 1.0)
    for said in (bodies.completion_request({"prompt": "1"}, 1.0, 9), chat):
        with pytest.raises(Refused, match=f"cannot read the request .{kind.__name__}: byte index 3"):
            rendering.new_ids(said, None)
