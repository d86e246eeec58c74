"""The index of a prompt's answers, against a search of every place where an end of the row's tokens occurs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from megatron_rl.rollout.speculation.suffixes import START, Cursor, SuffixIndex


def naive_draft(answers: Sequence[Sequence[int]], tokens: Sequence[int], most: int) -> tuple[int, list[int]]:
    """Return the length of the longest end of START + tokens that occurs in an answer, and the draft after it."""
    lines = [(START, *answer) for answer in answers]
    context, draft, matched = [START, *tokens], [], None
    while len(draft) < most:
        end, found, following = [], False, {}
        for start in range(len(context)):
            end, following = context[start:], {}
            for number, line in enumerate(lines):
                for at in range(len(line) - len(end) + 1):
                    if list(line[at : at + len(end)]) == end:
                        found = True
                        if at + len(end) < len(line):
                            following.setdefault(line[at + len(end)], {}).setdefault(number, at)
            if found:
                break
        if matched is None:
            matched = len(end) if found else 0
        if not following:
            break
        # by the number of answers, the latest of them, and the first place in it
        rank = {token: (len(x), max(x), -x[max(x)]) for token, x in following.items()}
        token = max(rank, key=rank.__getitem__)
        draft.append(token)
        context.append(token)
    return matched or 0, draft


@pytest.mark.parametrize("vocab_size", [2, 5, 50])
def test_drafts_equal_a_naive_search_while_answers_are_added(vocab_size: int) -> None:
    drawn = random.Random(vocab_size)
    for _ in range(15):
        index, answers = SuffixIndex(), []
        row = [drawn.randrange(vocab_size) for _ in range(20)]
        cursor = Cursor(index)
        for length in range(len(row) + 1):
            if length % 4 == 0:  # a sibling of the row ends
                source = drawn.choice([row, *answers])
                cut = drawn.randrange(len(source) + 1)
                answers.append([*source[:cut], *(drawn.randrange(vocab_size) for _ in range(drawn.randrange(8)))])
                index.add(answers[-1])
            if length % 3 == 0:
                draft = cursor.draft(row[:length], 5)
                assert (cursor.matched, draft) == naive_draft(answers, row[:length], 5)


def test_an_empty_index_drafts_nothing() -> None:
    assert Cursor(SuffixIndex()).draft([], 4) == []


def test_a_repeated_token_costs_no_more_than_others() -> None:
    """100,000 equal tokens have as many contexts within one another. Counted anew for each token they take minutes."""
    index = SuffixIndex()
    index.add([7] * 100_000)
    assert Cursor(index).draft([7] * 100, 3) == [7, 7, 7]
