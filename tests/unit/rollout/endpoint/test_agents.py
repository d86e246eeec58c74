"""Agents on the real embedded engine, over HTTP: what was sampled is what is trained."""

import contextlib
import itertools
import json
import math
import threading
from collections import defaultdict

import numpy as np
import pytest

from megatron_rl.errors import EpisodeError
from megatron_rl.rollout.endpoint.bodies import chat_request
from megatron_rl.rollout.endpoint.rendering import Rendering, answer, reply_of
from megatron_rl.rollout.endpoint.session import Session, Tally
from megatron_rl.rollout.engines.embedded import TransformersEngine
from megatron_rl.rollout.engines.engine import EngineLost
from megatron_rl.rollout.engines.wrapper import EngineAround
from megatron_rl.rollout.groups.serialization import SavedGroup, pack_groups, unpack_groups
from megatron_rl.rollout.job import to_sample
from megatron_rl.types import Prompt, Rollout
from tests.patience import patient
from tests.unit.rollout.endpoint import agents_at_work
from tests.unit.rollout.endpoint.agents_at_work import (
    PROMPTS,
    ROOM,
    asked,
    chat_tokenizer,
    chatted,
    generated,
    served,
    three_turns,
)
from tests.unit.rollout.fake_engine import manager_of
from tests.unit.rollout.tiny_model import (
    EOS,
    ROUNDING,
    TEMPERATURE,
    VOCAB,
    engine_of,
    forward_logprobs,
    merging_tokenizer,
)


def ids(text: str) -> list[int]:
    return [VOCAB.index(character) for character in text]


def test_three_turns_equal_a_naive_loop(inner) -> None:
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
        assert np.abs(np.subtract(rollout.logprobs, logprobs)).max() < ROUNDING
        assert sum(count for _, count in rollout.weight_versions) == len(response)


def test_logprobs_equal_those_of_a_forward_pass(model, inner) -> None:
    """Those of a saved group too, which keeps the agent's own context."""
    drawn, _ = generated(inner, three_turns, samples=4)
    packed = pack_groups({"a": SavedGroup(prompt=PROMPTS[0], rollouts=drawn[:4], scores=None)})
    (group,) = unpack_groups(packed, lambda prompt_id, attempt: PROMPTS[0]).values()
    assert len({rollout.response_ids for rollout in drawn}) > 3
    for rollout in [*drawn, *group.rollouts]:
        sample, expected = to_sample(rollout, included=True), forward_logprobs(model, rollout).numpy()
        assert sample.token_ids.tolist() == [*rollout.context_ids, *rollout.response_ids]
        assert sample.loss_mask.any() and not sample.logprobs[~sample.loss_mask].any()
        assert np.abs(expected - sample.logprobs)[sample.loss_mask].max() < ROUNDING


def test_turns_whose_text_has_other_tokens_keep_the_sampled_ones(model, hf_path) -> None:
    """The tokenizer merges letters within a turn, and across its borders with what the template writes."""
    tokenizer, drawn = chat_tokenizer(merging_tokenizer("1=ab")), []

    class Recording(TransformersEngine):
        def generate(self, *args, **given):
            found = super().generate(*args, **given)
            drawn.extend((turn.response_ids, turn.logprobs) for turn in found)
            return found

    def talks(base_url, row):
        messages = []
        for said in ("1", "1=", "="):
            messages.append({"role": "user", "content": said})
            messages.append(chatted(base_url, messages, max_tokens=4)["message"])
        return 1.0

    inner = engine_of(hf_path, model, tokenizer, Recording, max_response_tokens=ROOM, max_batch_samples=16)
    found, _ = generated(inner, talks, samples=6, tokenizer=tokenizer)
    trained = []
    for rollout in found:
        tokens = zip(rollout.loss_mask, rollout.response_ids, rollout.logprobs, strict=True)
        runs = [list(run) for sampled, run in itertools.groupby(tokens, key=lambda token: token[0]) if sampled]
        trained += [tuple(zip(*((token, logprob) for _, token, logprob in run), strict=True)) for run in runs]
        expected, mask = forward_logprobs(model, rollout).numpy(), list(rollout.loss_mask)
        assert np.abs(expected - rollout.logprobs)[mask].max() < ROUNDING
    assert sorted(trained) == sorted(drawn) and len(trained) == 3 * 3 * 6
    turns = [[token for token in turn if token != EOS] for turn, _ in drawn]
    assert sum(tokenizer(tokenizer.decode(turn), add_special_tokens=False).input_ids != turn for turn in turns) > 10


def test_a_call_repeats_whatever_the_order_of_its_requests(inner) -> None:
    """The second call's prompts are asked from the last to the first."""
    ended = defaultdict(threading.Event, {3: threading.Event()})
    ended[3].set()

    def backwards(base_url, row):
        number = int(row["question"][0])
        assert ended[number + 1].wait(patient(60.0))
        reward = three_turns(base_url, row)
        ended[number].set()
        return reward

    found = [[x.response_ids for x in generated(inner, agent)[0]] for agent in (three_turns, backwards)]
    assert found[0] == found[1]


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
    waits, answers = threading.Event(), []

    def post(base_url):
        assert waits.wait(patient(60.0))
        answers.extend(asked(f"{base_url.removesuffix('/v1')}/reward", {"reward": x}) for x in ("much", 0.75, 1.0))

    def agent(base_url, row):
        chatted(base_url, [{"role": "user", "content": "1"}], max_tokens=2)
        posts.append(threading.Thread(target=post, args=(base_url,)))
        posts[0].start()

    def settle(episode):
        real(episode)
        if episode.said.ended and episode.rollout is None:  # the agent has returned, without a reward
            waits.set()

    posts: list[threading.Thread] = []
    with served(inner, agent) as engine:
        real, engine._settle = engine._settle, settle
        found = engine.generate(PROMPTS[:1], 1)
        posts[0].join(patient(60.0))
    assert found[0].environment_reward == 0.75
    assert [status for status, _ in answers] == [400, 200, 410] and engine.tally.counts["late rewards"] == 1
    assert "reward='much' must be a finite number" in answers[0][1]


@contextlib.contextmanager
def abandoned(inner, **settings):
    """Open an engine whose agent leaves the session of 1+1 without a reward, and for it the deadline comes at once."""

    def abandons(base_url, row):
        chatted(base_url, [{"role": "user", "content": "1"}], max_tokens=2)
        return None if row["question"] == "1+1" else 1.0

    def settle(episode):
        if episode.said.ended and episode.session.prompt.columns["question"] == "1+1":
            episode.said.ends_at = -math.inf
        real(episode)

    with served(inner, abandons, deadline_s=300.0, **settings) as engine:
        real, engine._settle = engine._settle, settle
        yield engine


def test_an_abandoned_session_is_accounted_for(inner) -> None:
    with abandoned(inner, on_error="drop") as engine:
        found = engine.generate(PROMPTS, 1)
    assert [x.environment_reward for x in found] == [1.0, None, 1.0]
    assert "no reward came within 300 s" in found[1].excluded
    assert not to_sample(found[1], included=False).loss_mask.any()
    assert engine.tally.report() == "3 sessions; 1 abandoned (1@0#0)"
    words = r"sample 1@0#0; mend it.*\n.*no reward came within 300 s"
    with abandoned(inner) as engine, pytest.raises(EpisodeError, match=words):
        engine.generate(PROMPTS, 1)


def test_what_became_of_sessions_is_in_the_rollouts_metrics(alone, inner) -> None:
    """Counts add up until a rollout's row takes them, an evaluation's too, and begin anew."""
    with abandoned(inner, on_error="drop") as engine:
        on, version = "rollout.endpoint.agent=tests:agent", inner.weight_version
        manager = manager_of(engine, on, version=lambda: version, take_counts=engine.take_counts)
        manager.produce(dict(enumerate(PROMPTS[:1])), 2, temperature=0.0)
        manager.produce(dict(enumerate(PROMPTS)), 2)
        found = manager.take_metrics()
        assert (found["endpoint/sessions"], found["endpoint/abandoned"], found["endpoint/lost"]) == (8.0, 2.0, 0.0)
        manager.produce(dict(enumerate(PROMPTS[:1])), 2)
        assert manager.take_metrics()["endpoint/sessions"] == 2.0


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


def test_an_error_of_an_engine_elsewhere_is_raised(inner, monkeypatch) -> None:
    def killed(*args, **settings):
        raise EngineLost("it was killed", finished={})

    monkeypatch.setattr(engine := Elsewhere(inner), "generate", killed)
    with pytest.raises(EngineLost, match="it was killed") as lost:
        generated(engine, three_turns)
    assert lost.value.finished == {}


def test_an_agent_that_asks_nothing_or_raises_follows_on_error(inner) -> None:
    def silent(base_url, row):
        if row["question"] == "2+2":
            return next(wrong)
        if row["question"] == "0+0":
            return 1.0
        raise KeyError("no such tool")

    wrong = iter(no_rewards := [1e13, math.nan, 10**400, "1", True])
    for _ in no_rewards:
        found, counts = generated(inner, silent, samples=1, on_error="drop")
        assert "return a finite number of at most 1e+12" in found[2].excluded
    assert "made no request" in found[0].excluded and "no such tool" in found[1].excluded
    assert counts["failed"] == 3 and all(not to_sample(x, included=True).loss_mask.any() for x in found)
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
    ({"messages": [{"role": "king", "content": "1"}]}, "messages[0].role='king' must be one of system"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must be a text, or parts of type text"),
    ({"temperature": 0.1}, "rollout.temperature=0.7"),
    ({"n": 2}, "n=2 would change the distribution that is sampled"),
    ({"stop": ["x"]}, "stop=['x'] would change"),
    ({"max_tokens": 0}, "max_tokens=0 must be a number of tokens"),
    ({"messages": [{"role": "user", "content": "1" * 40}]}, "data.max_prompt_tokens=20"),
    ({"messages": [{"role": "user", "content": "1" * 2**16}]}, "tokens reads 65,536; shorten it"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls=5 must be a list"),
    ({"stream": "yes"}, "stream='yes' is refused"),
    ({"tools": [1]}, "tools[0]=1"),
    *(({"prompt": [3, token]}, f"token {token}, and the model has tokens from 0 to 21") for token in (22, -1)),
    ({"prompt": [10**30]}, "prompt holds token 1000"),
    ({"prompt": "x" * 800_000}, "the request has 66,667 characters or more"),  # by its bytes: its JSON is not read
    ({"prompt": [3], "logprobs": 1}, "logprobs=1 is not given here"),
    *(({"reward": reward}, f"reward={reward!r:.9}") for reward in (1e39, -1e13, 10**399, True, "1")),
]


def test_keys_and_limits_are_refused_with_a_status_and_a_message(inner, monkeypatch) -> None:
    monkeypatch.setenv("AGENT_KEYS", "one,two")
    seen: list[tuple[int, str]] = []

    def agent(base_url, row):
        good = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 2, "temperature": TEMPERATURE}
        chat, root = f"{base_url}/chat/completions", base_url.split("/sessions/")[0]
        seen.append(asked(chat, good, key="three"))
        elsewhere = [f"{root}{place}/v1/chat/completions" for place in ("", "/sessions/0")]
        seen.extend(asked(url, good, key="two") for url in elsewhere)
        seen.extend(asked(chat, data, key="two") for data in (b"{", b" " * 2**20))
        urls = {"prompt": f"{base_url}/completions", "reward": f"{base_url.removesuffix('/v1')}/reward"}
        for bad, _ in REFUSED:
            url = urls.get(next(iter(bad)))
            seen.append(asked(url or chat, bad if url else good | bad, key="one"))
        assert asked(chat, good, key="two")[0] == 200
        return 1.0

    found, counts = generated(inner, agent, samples=1, prompts=PROMPTS[:1], api_key_env="AGENT_KEYS", max_body_mb=0.9)
    assert [status for status, _ in seen[:5]] == [401, 404, 404, 400, 413]
    assert counts["unknown sessions"] == 1 and len(found[0].response_ids) == found[0].num_sampled <= 2
    for (_, expected), (status, text) in zip(REFUSED, seen[5:], strict=True):
        assert status == 400 and expected in json.loads(text)["error"]["message"]


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
        with pytest.raises(openai.BadRequestError, match="would change the distribution that is sampled"):
            client.chat.completions.create(model="policy", messages=messages, n=2)
        return 1.0

    logprobs, said = [], []
    (rollout,), counts = generated(inner, agent, samples=1, prompts=PROMPTS[:1])
    assert rollout.num_turns == 2 and not counts["untrained branches"]
    assert list(rollout.logprobs[: len(logprobs[0])]) == logprobs[0] and rollout.text.endswith(said[0])


def test_a_turn_that_calls_a_tool_is_extended_by_the_tools_answer() -> None:
    """The sampled text of a call is read as OpenAI's call, and the client's answer to it keeps the sampled tokens."""
    rendering, tally = Rendering(agents_at_work.chat_tokenizer()), Tally()
    session = Session("s", PROMPTS[0], 0, room=60, max_prompt_tokens=20, max_turns=4)
    tools = [{"type": "function", "function": {"name": "add"}}]
    body = {"messages": [{"role": "user", "content": "1+1"}], "tools": tools}
    first = session.ask(chat_request(body, TEMPERATURE), rendering, tally)
    text = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    said = {"finish_reason": "stop", "weight_versions": ((1, 3),), "logprobs": (-0.1, -0.2, -0.3), "text": text}
    session.take(first, Rollout(prompt=first.prompt, sample_index=0, response_ids=(5, 6, EOS), **said), tally)
    turn, reply, number = first.done.result(timeout=0)
    (call,) = reply["tool_calls"]
    assert reply["content"] == "so" and json.loads(call["function"]["arguments"]) == {"a": 1}
    choice = answer(first.request, turn, reply, "a", 0, None)["choices"][0]
    assert number == 0 and choice["finish_reason"] == "tool_calls"
    for odd in ('{"name": ' * 5000 + "}" * 5000, '{"name": "\\ud800"}', '{"name": "f", "arguments": NaN}'):
        assert "tool_calls" not in reply_of(f"<tool_call>{odd}</tool_call>", first.request, 0)
    body["messages"] += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
    second = session.ask(chat_request(body, TEMPERATURE), rendering, tally)
    assert second.parent is turn and second.new_ids == tuple(ids("c2b"))
    assert second.prompt.token_ids == (*ids("d1a1+1b"), 5, 6, EOS, *ids("c2b"))
