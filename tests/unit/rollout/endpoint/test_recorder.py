"""The record of a session: chains by prefix, branches, and each sampled token's one place with loss."""

from __future__ import annotations

import random

from megatron_rl.rollout.endpoint.recorder import Record, Turn

CHAT = ("chat", "null")


def answered(record: Record, asked, reply, new_ids, ids, *, version=1, frame=CHAT, reason="stop") -> Turn:
    turn = Turn(
        frame=frame,
        parent=record.parent_of(frame, asked),
        known=asked + reply,
        new_ids=tuple(new_ids),
        ids=tuple(ids),
        logprobs=tuple(-0.1 * token for token in ids),
        weight_versions=((version, len(ids)),),
        finish_reason=reason,
    )
    record.add(turn)
    return turn


def test_three_turns_chain_into_one_sample() -> None:
    record = Record()
    answered(record, ("u",), ("a",), (5, 6), (8, 0))
    answered(record, ("u", "a", "t"), ("b",), (4,), (9, 0))
    answered(record, ("u", "a", "t", "b", "v"), ("c",), (3, 3), (7, 0), version=2)
    (branch,) = record.branches()
    assert branch.prompt_ids == (5, 6) and branch.response_ids == (8, 0, 4, 9, 0, 3, 3, 7, 0)
    assert branch.loss_mask == (True, True, False, True, True, False, False, True, True)
    assert branch.logprobs == (-0.8, 0.0, 0.0, -0.9, 0.0, 0.0, 0.0, -0.1 * 7, 0.0)
    assert branch.weight_versions == ((1, 7), (2, 2)) and branch.num_turns == 3
    assert record.turns[-1].token_ids() == branch.prompt_ids + branch.response_ids
    assert record.last_branch() == branch


def test_a_branch_is_a_sample_of_its_own_and_shared_turns_carry_loss_once() -> None:
    record = Record()
    answered(record, ("u",), ("a",), (5,), (8, 0))
    answered(record, ("u", "a", "left"), ("b",), (1,), (9, 0))
    answered(record, ("u", "a", "right"), ("c",), (2,), (7, 0))
    answered(record, ("other",), ("d",), (6, 6), (4, 0))
    left, right, other = record.branches()
    assert left.response_ids == (8, 0, 1, 9, 0) and left.loss_mask == (True, True, False, True, True)
    assert right.response_ids == (8, 0, 2, 7, 0) and right.loss_mask == (False, False, False, True, True)
    assert other.prompt_ids == (6, 6) and other.response_ids == (4, 0)
    assert record.last_branch() == other


def test_what_does_not_extend_a_conversation_does_not_chain() -> None:
    record = Record()
    turn = answered(record, ("u",), ("a",), (5,), (8, 0))
    assert record.parent_of(CHAT, ("u", "a", "t")) is turn
    assert record.parent_of(CHAT, ("u", "a")) is None  # nothing new is said
    assert record.parent_of(CHAT, ("u", "edited", "t")) is None
    assert record.parent_of(("chat", '["tool"]'), ("u", "a", "t")) is None  # the context begins otherwise


def test_texts_and_ids_chain_by_their_own_prefix() -> None:
    record, text, ids = Record(), ("text", ""), ("ids", "")
    first = answered(record, "1+1=", "2", (5,), (8, 0), frame=text)
    assert record.parent_of(text, "1+1=2;") is first and record.parent_of(text, "1+1=2") is None
    cut = answered(record, "3*3=", "9", (6,), (8,), frame=text, reason="length")
    assert record.parent_of(text, "3*3=9") is cut
    third = answered(record, (5, 6), (8, 0), (5, 6), (8, 0), frame=ids)
    assert record.parent_of(ids, (5, 6, 8, 0, 1)) is third and record.parent_of(text, "5") is None


def test_the_latest_of_equal_conversations_is_extended() -> None:
    """A request that is sent again, and answered alike, leaves a branch; the client goes on from the later answer."""
    record = Record()
    answered(record, ("u",), ("a",), (5,), (8, 0))
    again = answered(record, ("u",), ("a",), (5,), (8, 8, 0))
    assert record.parent_of(CHAT, ("u", "a", "t")) is again and len(record.branches()) == 2


def test_random_trees_train_each_sampled_token_once() -> None:
    """Over random trees, loss tokens are the sampled ones, and each branch's tokens are a naive walk's."""
    draw = random.Random(0)
    for _ in range(200):
        record, known, contexts = Record(), [()], {(): ()}
        for number in range(draw.randint(1, 9)):
            base = draw.choice(known)
            new, ids = (100 + number,), tuple(1000 + 10 * number + k for k in range(draw.randint(1, 3)))
            asked = (*base, f"u{number}")
            turn = answered(record, asked, (f"a{number}",), new, ids)
            known.append(turn.known)
            contexts[turn.known] = (*contexts[base], *new, *ids)
        branches = record.branches()
        assert [b.prompt_ids + b.response_ids for b in branches] == [contexts[leaf.known] for leaf in record.leaves()]
        trained = [t for b in branches for t, loss in zip(b.response_ids, b.loss_mask, strict=True) if loss]
        assert sorted(trained) == sorted(token for turn in record.turns for token in turn.ids)
