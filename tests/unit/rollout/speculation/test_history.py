"""The memory of earlier answers: what it keeps, what it drops first, and what a checkpoint restores."""

from __future__ import annotations

from megatron_rl.rollout.speculation.history import History, key_of
from megatron_rl.rollout.speculation.suffixes import Cursor


def kept(history: History, key: str) -> list[list[int]]:
    return [answer.tolist() for answer in history.answers(key)]


def test_the_latest_visits_distinct_answers_are_kept() -> None:
    history = History(max_tokens=100, visits=2)
    history.add("a", [[1, 2], [1, 2], [3]])
    assert kept(history, "a") == [[1, 2], [3]]
    history.add("a", [[3], [4]])
    assert kept(history, "a") == [[1, 2], [3], [4]]
    history.add("a", [[5, 5, 5]])
    assert kept(history, "a") == [[3], [4], [5, 5, 5]]
    assert history.num_tokens == 5
    history.add("b", [[1]], visit=7)
    history.add("b", [[2], [1]], visit=7)  # the same rollout's
    history.add("b", [[3]], visit=9)
    assert kept(history, "b") == [[2], [1], [3]]


def test_the_least_recently_used_prompt_is_dropped_first() -> None:
    history = History(max_tokens=5, visits=2)
    history.add("a", [[1, 2]])
    history.add("b", [[3, 4]])
    history.answers("a")
    history.add("c", [[5, 6]])
    assert [kept(history, key) for key in "abc"] == [[[1, 2]], [], [[5, 6]]]
    history.add("d", [[7] * 6])
    assert (len(history), history.num_tokens) == (0, 0)


def test_a_restored_history_equals_the_saved_one() -> None:
    history = History(visits=2)
    for number in range(3):
        history.add("a", [[number, 2], [], [9]])
        history.add("b", [[number]])
    restored = History(visits=2)
    restored.load_state(history.state())
    assert [kept(restored, key) for key in "abx"] == [kept(history, key) for key in "abx"]
    assert restored.num_tokens == history.num_tokens
    restored.load_state(History().state())
    assert (len(restored), restored.num_tokens) == (0, 0)
    one, other = History(), History()  # of two ranks
    one.add("a", [[1]])
    other.add("b", [[2]])
    restored.load_state(one.state(), other.state())
    assert (kept(restored, "a"), kept(restored, "b")) == ([[1]], [[2]])


def test_equal_prompts_have_equal_keys_in_any_process() -> None:
    assert key_of((1, 2, 70_000)) == key_of([1, 2, 70_000]) == "64add97e97a8e23d60a4ea405258b5c1"
    assert key_of((1, 2)) != key_of((2, 1))


def test_an_index_drafts_an_earlier_answer() -> None:
    history = History()
    history.add(key_of((1, 2)), [[5, 6, 7, 8]])
    assert Cursor(history.index(key_of((1, 2)))).draft([], 8) == [5, 6, 7, 8]
    assert Cursor(history.index(key_of((1, 3)))).draft([], 8) == []
