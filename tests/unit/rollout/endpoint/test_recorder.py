"""The record of a session: chains by prefix, branches, and the sample of the last one."""

import itertools
import random

from megatron_rl.rollout.endpoint.bodies import completion_request
from megatron_rl.rollout.endpoint.recorder import Record, Turn, digests
from megatron_rl.rollout.endpoint.rendering import Rendering
from megatron_rl.rollout.endpoint.session import Session, Tally
from megatron_rl.types import Prompt
from tests.unit.rollout.endpoint.agents_at_work import chat_tokenizer

CHAT = ("chat", "null")
FRAMES, REASONS = (CHAT, ("chat", "tool"), ("text", ""), ("ids", "")), ("stop", "length")


def answered(record: Record, asked, reply, new_ids, ids, *, version=1, frame=CHAT, reason="stop") -> Turn:
    (known,) = digests(asked + reply, [len(asked + reply)])
    turn = Turn(
        frame=frame, parent=record.parent_of(frame, asked), known=known, new_ids=tuple(new_ids), ids=tuple(ids),
        logprobs=tuple(-0.1 * token for token in ids), weight_versions=((version, len(ids)),), finish_reason=reason,
    )
    record.add(turn)
    return turn


def test_what_extends_a_conversation_a_text_or_ids_chains_with_the_latest_and_nothing_else() -> None:
    record = Record()
    turn = answered(record, ("u",), ("a",), (5,), (8, 0))
    assert record.parent_of(CHAT, ("u", "a", "t")) is turn
    assert record.parent_of(CHAT, ("u", "a")) is None  # nothing new is said
    assert record.parent_of(CHAT, ("u", "edited", "t")) is None
    assert record.parent_of(("chat", '["tool"]'), ("u", "a", "t")) is None  # the context begins otherwise
    # of a request that was sent again, and answered alike, the client goes on from the later answer
    again = answered(record, ("u",), ("a",), (5,), (8, 8, 0))
    assert record.parent_of(CHAT, ("u", "a", "t")) is again and len(record.leaves()) == 2
    record, text, ids = Record(), ("text", ""), ("ids", "")
    first = answered(record, "1+1=", "2", (5,), (8, 0), frame=text)
    assert record.parent_of(text, "1+1=2;") is first and record.parent_of(text, "1+1=2") is None
    cut = answered(record, "3*3=", "9", (6,), (8,), frame=text, reason="length")
    assert record.parent_of(text, "3*3=9") is cut
    third = answered(record, (5, 6), (8, 0), (5, 6), (8, 0), frame=ids)
    assert record.parent_of(ids, (5, 6, 8, 0, 1)) is third and record.parent_of(text, "5") is None


def test_the_last_branch_of_random_trees_is_a_naive_walks() -> None:
    """Over random trees. A token that was not sampled carries no loss, and has the version of the one before it."""
    draw = random.Random(0)
    for _ in range(200):
        record, known, contexts, versions = Record(), [()], {(): ()}, {(): []}
        for number in range(draw.randint(1, 9)):
            base, version = draw.choice(known), draw.randint(1, 2)
            new, ids = (100 + number,), tuple(1000 + 10 * number + k for k in range(draw.randint(1, 3)))
            asked = (*base, f"u{number}")
            answered(record, asked, (f"a{number}",), new, ids, version=version)
            known.append((*asked, f"a{number}"))
            contexts[known[-1]] = (*contexts[base], *new, *ids)
            versions[known[-1]] = [*versions[base], *versions[base][-1:], *[version] * len(ids)]
        found = record.last_branch()
        assert found.prompt_ids + found.response_ids == contexts[known[-1]] == record.turns[-1].token_ids()
        assert found.loss_mask == tuple(token >= 1000 for token in found.response_ids)
        assert found.logprobs == tuple(-0.1 * token * (token >= 1000) for token in found.response_ids)
        assert [version for version, count in found.weight_versions for _ in range(count)] == versions[known[-1]]
        assert record.leaves() == [x for x in record.turns if not any(y.parent is x for y in record.turns)]


def test_the_turn_that_a_request_extends_is_a_naive_searchs() -> None:
    """Over random texts and messages of few letters, so that many begin alike."""
    draw = random.Random(1)
    for _ in range(100):
        record, known = Record(), []
        for _ in range(draw.randint(0, 12)):
            asked, frame, reason = draw.choices("ab", k=draw.randint(1, 5)), draw.choice(FRAMES), draw.choice(REASONS)
            asked = "".join(asked) if frame[0] == "text" else tuple(asked)
            fitting = [
                (len(whole), number) for number, (kind, whole, end) in enumerate(known)
                if kind == frame and asked[: len(whole)] == whole
                and (len(asked) > len(whole) or (kind[0] != "chat" and end == "length"))
            ]
            parent = record.turns[max(fitting)[1]] if fitting else None
            assert record.parent_of(frame, asked) is parent
            reply = draw.choice("ab") if frame[0] == "text" else (draw.choice("ab"),)
            answered(record, asked, reply, (5,), (8,), frame=frame, reason=reason)
            known.append((frame, asked + reply, reason))


def test_a_draw_is_named_by_its_context_whatever_the_order_of_requests() -> None:
    """Of every order in which four requests arrive, two of them alike, the names of the draws are the same four."""
    found, rendering = [], Rendering(chat_tokenizer())
    for order in itertools.permutations([(5,), (6, 7), (6, 8), (5,)]):
        prompt = Prompt(prompt_id="7@0", text="", token_ids=(2,), columns={})
        session = Session("s", prompt, 0, room=60, max_prompt_tokens=20, max_turns=9)
        asked = [(ids, completion_request({"prompt": list(ids)}, 1.0, 9)) for ids in order]
        found.append(sorted((ids, session.ask(x, rendering, Tally()).prompt.prompt_id) for ids, x in asked))
    assert all(names == found[0] for names in found) and len({name for _, name in found[0]}) == 4
