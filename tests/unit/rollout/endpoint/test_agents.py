"""Agents on the real embedded engine, over HTTP: what was sampled is what is trained."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.config import load_config
from megatron_rl.errors import EpisodeError
from megatron_rl.rollout.endpoint.asked import asked_chat
from megatron_rl.rollout.endpoint.rendering import Rendering, answer
from megatron_rl.rollout.endpoint.session import Session, Tally
from megatron_rl.rollout.engine import EngineLost
from megatron_rl.rollout.engine_around import EngineAround
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.serialization import SavedGroup, pack_groups, unpack_groups
from megatron_rl.rollout.worker import to_sample
from megatron_rl.types import Prompt, Rollout, Score
from tests.patience import patient
from tests.unit.rollout.endpoint.agents_at_work import (
    PROMPTS,
    asked,
    chat_tokenizer,
    chatted,
    loaded_engine,
    with_agent,
)
from tests.unit.rollout.tiny_model import EOS, TEMPERATURE, VOCAB, _model


@pytest.fixture(scope="module")
def model():
    return _model()


@pytest.fixture(scope="module")
def inner(model, tmp_path_factory):
    return loaded_engine(model, tmp_path_factory.mktemp("model"))


def generated(inner, agent, *, samples=2, temperature=None, prompts=PROMPTS, **settings):
    """Return the rollouts and the report of one call."""
    engine = with_agent(inner, agent, **settings)
    try:
        return engine.generate(prompts, samples, temperature=temperature), engine.tally.counts
    finally:
        engine._pool.close()
        engine._open.close()


def three_turns(base_url, row):
    messages = [{"role": "user", "content": row["question"]}]
    for told in ("5=", "7*", None):
        messages.append(chatted(base_url, messages, max_tokens=4)["message"])
        if told is not None:
            messages.append({"role": "tool", "content": told})
    return 0.5


def ids(text: str) -> list[int]:
    return [VOCAB.index(character) for character in text]


def test_three_turns_equal_a_naive_loop(inner) -> None:
    """Greedy sessions hold the ids, log-probs and mask of a loop that appends tokens by hand."""
    found, _ = generated(inner, three_turns, samples=1, temperature=0.0)
    for rollout in found:
        context = ids(f"a{rollout.prompt.columns['question']}b")
        response, logprobs, mask = [], [], []
        for told in ("5=", "7*", None):
            prompt = Prompt(prompt_id="naive", text="", token_ids=(*context, *response), columns={})
            (turn,) = inner.generate([prompt], 1, temperature=0.0, max_tokens=[4])
            response += turn.response_ids
            logprobs += turn.logprobs
            mask += [True] * len(turn.response_ids)
            if told is not None:
                new = ([] if turn.finish_reason == "stop" else [EOS]) + ids(f"c{told}b")
                response += new
                logprobs += [0.0] * len(new)
                mask += [False] * len(new)
        assert rollout.context_ids == tuple(context) and rollout.response_ids == tuple(response)
        assert rollout.loss_mask == tuple(mask) and rollout.environment_reward == 0.5
        assert np.abs(np.subtract(rollout.logprobs, logprobs)).max() < 1e-5  # float32 sums in batches of other widths
        assert sum(count for _, count in rollout.weight_versions) == len(response)


@torch.no_grad()
def test_logprobs_equal_those_of_a_forward_pass(model, inner) -> None:
    found, _ = generated(inner, three_turns, samples=4)
    assert len({rollout.response_ids for rollout in found}) > 3
    for rollout in found:
        sample = to_sample(rollout, included=True)
        token_ids = torch.from_numpy(sample.token_ids)[None]
        logits = model(token_ids).logits[0, sample.prompt_tokens - 1 : -1] / TEMPERATURE
        targets = token_ids[0, sample.prompt_tokens :, None]
        expected = torch.log_softmax(logits, dim=-1).gather(1, targets)[:, 0].numpy()
        assert sample.loss_mask.any() and not sample.logprobs[~sample.loss_mask].any()
        assert np.abs(expected - sample.logprobs)[sample.loss_mask].max() < 1e-5


def test_a_call_repeats_whatever_the_order_of_its_requests(inner) -> None:
    def slowly(base_url, row):
        time.sleep(0.1 * (3 - int(row["question"][0])))
        return three_turns(base_url, row)

    assert [x.response_ids for x in generated(inner, three_turns)[0]] == [
        x.response_ids for x in generated(inner, slowly)[0]
    ]


def test_texts_chain_and_a_branch_is_counted(inner) -> None:
    def agent(base_url, row):
        def complete(prompt):
            status, text = asked(f"{base_url}/completions", {"prompt": prompt, "max_tokens": 3})
            assert status == 200, text
            return json.loads(text)["choices"][0]["text"]

        start = row["question"] + "="
        first = complete(start)
        complete(f"{start}{first}+1")
        complete(f"{start}{first}+2")
        return 1.0

    found, counts = generated(inner, agent, samples=1)
    for rollout in found:
        assert rollout.context_ids == tuple(ids(rollout.prompt.columns["question"] + "="))
        (start,) = (k for k in range(1, 5) if not rollout.loss_mask[k] and all(rollout.loss_mask[:k]))
        assert rollout.response_ids[start : start + 2] == tuple(ids("+2"))  # the last branch is the trained one
    assert counts["untrained branches"] == len(found)


def test_tools_are_rendered_and_a_stream_is_the_same_answer(inner) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}

    def agent(base_url, row):
        messages = [{"role": "user", "content": row["question"]}]
        body = {"model": "m", "messages": messages, "tools": [tool], "max_tokens": 3}
        status, text = asked(f"{base_url}/chat/completions", {**body, "stream": True})
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert status == 200 and events[-1] == "[DONE]"
        first, last = (json.loads(event)["choices"][0] for event in events[:2])
        streamed.append((first["delta"]["content"], last["finish_reason"]))
        return 0.0

    streamed: list = []
    found, _ = generated(inner, agent, samples=1, prompts=PROMPTS[:1])
    assert found[0].context_ids == tuple(ids("d1a0+0b"))
    assert streamed == [(found[0].text, found[0].finish_reason)]


def test_a_reward_comes_by_post_and_a_late_one_is_refused(inner) -> None:
    answers: list[tuple[int, str]] = []

    def agent(base_url, row):
        chatted(base_url, [{"role": "user", "content": "1"}], max_tokens=2)
        address = f"{base_url.removesuffix('/v1')}/reward"

        def post():
            answers.extend(asked(address, {"reward": value}) for value in ("much", 0.75, 1.0))

        threading.Timer(0.2, post).start()

    found, counts = generated(inner, agent, samples=1, prompts=PROMPTS[:1])
    for _ in range(200):
        if len(answers) == 3:
            break
        time.sleep(0.05)
    assert found[0].environment_reward == 0.75
    assert [status for status, _ in answers] == [400, 200, 410] and counts["late rewards"] == 1
    assert "reward='much' must be a finite number" in answers[0][1]


def abandons(base_url, row):
    chatted(base_url, [{"role": "user", "content": "1"}], max_tokens=2)
    return None if row["question"] == "1+1" else 1.0


def test_an_abandoned_session_is_accounted_for(inner) -> None:
    engine = with_agent(inner, abandons, on_error="drop", deadline_s=3.0)
    found = engine.generate(PROMPTS, 1)
    assert [x.environment_reward for x in found] == [1.0, None, 1.0]
    assert "no reward came within 3 s" in found[1].excluded and not to_sample(found[1], included=False).loss_mask.any()
    assert engine.tally.report() == "3 sessions; 1 abandoned (1@0#0)"
    engine._open.close()
    with pytest.raises(EpisodeError, match=r"sample 1@0#0; mend it.*\n.*no reward came within 3 s"):
        generated(inner, abandons, samples=1, deadline_s=3.0)


@pytest.fixture
def alone() -> Iterator[None]:
    """Make this process a world of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_became_of_sessions_is_in_the_rollouts_metrics(alone, inner) -> None:
    """Counts add up until a rollout's row takes them, an evaluation's too, and begin anew."""
    engine = with_agent(inner, abandons, on_error="drop", deadline_s=2.0)
    manager = RolloutManager(
        engine,
        lambda rollouts: [Score(total=1.0, by_function=()) for _ in rollouts],
        load_config(None, ["rollout.endpoint.agent=tests:agent"]),
        export=lambda: iter(()),
        version=lambda: inner.weight_version,
        share=(0, 1),
        take_counts=engine.take_counts,
    )
    manager.produce(dict(enumerate(PROMPTS[:1])), 2, temperature=0.0)
    manager.produce(dict(enumerate(PROMPTS)), 2)
    found = manager.take_metrics()
    assert (found["endpoint/sessions"], found["endpoint/abandoned"], found["endpoint/lost"]) == (8.0, 2.0, 0.0)
    manager.produce(dict(enumerate(PROMPTS[:1])), 2)
    assert manager.take_metrics()["endpoint/sessions"] == 2.0
    engine._pool.close()
    engine._open.close()


class Elsewhere(EngineAround):
    """An engine in another process, whose first request ends only after its second one has come."""

    is_elsewhere = True

    def __init__(self, engine) -> None:
        super().__init__(engine)
        self.second, self.own, self.calls = threading.Event(), threading.Lock(), itertools.count(1)

    def generate(self, *args, **settings):
        if next(self.calls) == 1:
            assert self.second.wait(patient(60.0)), "the second request waited for the first one's end"
        else:
            self.second.set()
        with self.own:
            return self.engine.generate(*args, **settings)


def test_an_engine_elsewhere_is_asked_while_it_samples_others(inner) -> None:
    def agent(base_url, row):
        if row["question"] != "0+0":
            assert engine.first.wait(patient(60.0))
        engine.first.set()
        return three_turns(base_url, row)

    engine = Elsewhere(inner)
    engine.first = threading.Event()
    found, _ = generated(engine, agent)
    assert [x.response_ids for x in found] == [x.response_ids for x in generated(inner, three_turns)[0]]


def test_an_error_of_an_engine_elsewhere_is_raised(inner) -> None:
    class Failing(Elsewhere):
        def generate(self, *args, **settings):
            raise EngineLost("it was killed", finished={})

    with pytest.raises(EngineLost, match="it was killed") as lost:
        generated(Failing(inner), three_turns)
    assert lost.value.finished == {}


def test_an_agent_that_asks_nothing_or_raises_follows_on_error(inner) -> None:
    def silent(base_url, row):
        if row["question"] == "0+0":
            return 1.0
        raise KeyError("no such tool")

    found, counts = generated(inner, silent, samples=1, prompts=PROMPTS[:2], on_error="drop")
    assert "made no request" in found[0].excluded and "no such tool" in found[1].excluded
    assert counts["failed"] == 2 and all(not to_sample(x, included=True).loss_mask.any() for x in found)
    with pytest.raises(EpisodeError, match="no such tool"):
        generated(inner, silent, samples=1, prompts=PROMPTS[1:2])


@pytest.mark.parametrize(("settings", "reason"), [({}, "length"), ({"max_turns": 2}, "stop")])
def test_a_limit_ends_an_episode_and_fails_nothing(inner, settings, reason) -> None:
    def talks_on(base_url, row):
        messages = [{"role": "user", "content": "1"}]
        while True:
            messages += [chatted(base_url, messages, max_tokens=4)["message"], {"role": "tool", "content": "12"}]

    found, counts = generated(inner, talks_on, samples=1, prompts=PROMPTS[:1], **settings)
    assert found[0].finish_reason == reason and found[0].environment_reward == 0.0
    assert len(found[0].response_ids) <= 24 and counts["limited"] == 1 and not counts["failed"]


REFUSED = [
    ({"messages": []}, "messages=[] must be a list"),
    ({"messages": [{"role": "king", "content": "1"}]}, "it must have a role of"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must be a text, or parts of type text"),
    ({"temperature": 0.1}, "rollout.temperature=0.7"),
    ({"n": 2}, "n=2 would change what is sampled"),
    ({"stop": ["x"]}, "stop=['x'] would change"),
    ({"max_tokens": 0}, "max_completion_tokens=0 must be a number of tokens"),
    ({"messages": [{"role": "user", "content": "1" * 40}]}, "data.max_prompt_tokens=20"),
]


def test_keys_and_limits_are_refused_with_a_status_and_a_message(inner, monkeypatch) -> None:
    monkeypatch.setenv("AGENT_KEYS", "one,two")
    seen: list[tuple[int, str]] = []

    def agent(base_url, row):
        good = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 2, "temperature": TEMPERATURE}
        chat, root = f"{base_url}/chat/completions", base_url.split("/sessions/")[0]
        seen.append(asked(chat, good, key="three"))
        seen.append(asked(f"{root}/v1/chat/completions", good, key="two"))
        seen.append(asked(f"{root}/sessions/0/v1/chat/completions", good, key="two"))
        seen.append(asked(chat, b"{", key="two"))
        seen.append(asked(chat, b" " * 2**20, key="two"))
        seen.extend(asked(chat, good | bad, key="one") for bad, _ in REFUSED)
        assert asked(chat, good, key="two")[0] == 200
        return 1.0

    settings = {"api_key_env": "AGENT_KEYS", "max_body_mb": 0.5}
    found, counts = generated(inner, agent, samples=1, prompts=PROMPTS[:1], **settings)
    assert [status for status, _ in seen[:5]] == [401, 404, 404, 400, 413]
    assert counts["unknown sessions"] == 1 and len(found[0].response_ids) == found[0].num_sampled <= 2
    for (_, expected), (status, text) in zip(REFUSED, seen[5:], strict=True):
        assert status == 400 and expected in json.loads(text)["error"]["message"]


def test_a_saved_group_keeps_the_agents_own_context(inner) -> None:
    found, _ = generated(inner, three_turns, samples=2, prompts=PROMPTS[:1])
    packed = pack_groups({"a": SavedGroup(prompt=PROMPTS[0], rollouts=found, scores=None)})
    (group,) = unpack_groups(packed, lambda prompt_id, attempt: PROMPTS[0]).values()
    assert [x.context_ids for x in group.rollouts] == [x.context_ids for x in found] != [None, None]
    for saved, rollout in zip(group.rollouts, found, strict=True):
        assert (to_sample(saved, included=True).token_ids == to_sample(rollout, included=True).token_ids).all()


def test_the_openai_client_goes_unmodified(inner) -> None:
    openai = pytest.importorskip("openai", reason="the extra `agent` brings it")

    def agent(base_url, row):
        client = openai.OpenAI(base_url=base_url, api_key="none")
        messages = [{"role": "user", "content": row["question"]}]
        first = client.chat.completions.create(model="policy", messages=messages, max_tokens=3, logprobs=True)
        logprobs.append([token.logprob for token in first.choices[0].logprobs.content])
        messages += [first.choices[0].message, {"role": "tool", "content": "1", "tool_call_id": "0"}]
        stream = client.chat.completions.create(model="policy", messages=messages, max_tokens=3, stream=True)
        said.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
        with pytest.raises(openai.BadRequestError, match="would change what is sampled"):
            client.chat.completions.create(model="policy", messages=messages, n=2)
        return 1.0

    logprobs: list = []
    said: list = []
    (rollout,), counts = generated(inner, agent, samples=1, prompts=PROMPTS[:1])
    assert rollout.num_turns == 2 and not counts["untrained branches"]
    assert list(rollout.logprobs[: len(logprobs[0])]) == logprobs[0] and rollout.text.endswith(said[0])


def test_a_turn_that_calls_a_tool_is_extended_by_the_tools_answer() -> None:
    """The sampled text of a call is read as OpenAI's call, and the client's answer to it keeps the sampled tokens."""
    rendering, tally = Rendering(chat_tokenizer()), Tally()
    session = Session("s", PROMPTS[0], 0, room=60, max_prompt_tokens=20, max_turns=4)
    tools = [{"type": "function", "function": {"name": "add"}}]
    body = {"messages": [{"role": "user", "content": "1+1"}], "tools": tools}
    first = session.ask(asked_chat(body, TEMPERATURE), rendering, tally)
    said = Rollout(
        prompt=first.prompt,
        sample_index=0,
        response_ids=(5, 6, EOS),
        logprobs=(-0.1, -0.2, -0.3),
        text='so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        finish_reason="stop",
        weight_versions=((1, 3),),
    )
    session.take(first, said, tally)
    turn, reply, number = first.done.result(timeout=0)
    (call,) = reply["tool_calls"]
    assert reply["content"] == "so" and json.loads(call["function"]["arguments"]) == {"a": 1}
    choice = answer(first.asked, turn, reply, "a", 0, None)["choices"][0]
    assert number == 0 and choice["finish_reason"] == "tool_calls"
    body["messages"] += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
    second = session.ask(asked_chat(body, TEMPERATURE), rendering, tally)
    assert second.parent is turn and second.new_ids == tuple(ids("c2b"))
    assert second.prompt.token_ids == (*ids("d1a1+1b"), 5, 6, EOS, *ids("c2b"))
