"""The drafter in a vLLM worker, called as vLLM calls it: with rows that come, move, wait and end."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.rollout.speculation.history import History, key_of
from megatron_rl.rollout.vllm import drafter
from megatron_rl.rollout.vllm.drafter import MISSES, REST, RETRY, WINDOW, Gate, HistoryDrafter

LONGEST, STOP = 64, 0


class Worker:
    """Holds requests as vLLM's worker does, and gives each the tokens of an answer as far as drafts allow."""

    def __init__(self, most: int = 4) -> None:
        settings = SimpleNamespace(num_speculative_tokens=most), SimpleNamespace(max_model_len=LONGEST)
        self.drafter = HistoryDrafter(SimpleNamespace(speculative_config=settings[0], model_config=settings[1]))
        self.requests: dict[str, SimpleNamespace] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.version = 1
        self.drafter.attach(self, lambda: self.version)
        self.answers: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.drafts: dict[str, list[int]] = {}

    def begin(self, name: str, prompt: list[int], answer: list[int]) -> None:
        sampling = SimpleNamespace(stop_token_ids=[STOP])
        self.requests[name] = SimpleNamespace(num_prompt_tokens=len(prompt), sampling_params=sampling)
        self.answers[name], self.tokens[name] = answer, list(prompt)
        self.input_batch.req_ids.append(name)

    def step(self) -> int:
        """Make one step of all requests; return the number of tokens that they got."""
        ids, sampled = self.input_batch.req_ids, []
        for name in ids:
            place = len(self.tokens[name]) - self.requests[name].num_prompt_tokens
            left, draft = self.answers[name][place:], self.drafts.get(name, [])
            accepted = next((k for k, (x, y) in enumerate(zip(draft, left, strict=False)) if x != y), len(draft))
            sampled.append(left[: accepted + 1])
            self.tokens[name] += sampled[-1]
        rows = np.zeros((len(ids), LONGEST), dtype=np.int32)
        for place, name in enumerate(ids):
            rows[place, : len(self.tokens[name])] = self.tokens[name]
        lengths = np.array([len(self.tokens[name]) for name in ids])
        self.drafts = dict(zip(ids, self.drafter.propose(sampled, lengths, rows, slot_mappings=None), strict=True))
        for name in list(ids):
            if len(self.tokens[name]) - self.requests[name].num_prompt_tokens >= len(self.answers[name]):
                ids.remove(name)
                del self.requests[name]
        return sum(map(len, sampled))

    def run(self) -> int:
        """Return the number of steps until all requests ended."""
        steps = 0
        while self.input_batch.req_ids:
            self.step()
            steps += 1
        return steps


PROMPT, ANSWER = [5, 6, 7], [11, 12, 13, 14, 15, 16, 17, 18, 19, STOP]


def test_an_answer_that_came_before_is_drafted_whole():
    worker = Worker()
    worker.begin("a", PROMPT, ANSWER)
    assert worker.run() == len(ANSWER)  # nothing is known yet
    worker.begin("b", PROMPT, ANSWER)
    assert worker.run() == 4  # 1 token, 1 + 2, 1 + 4, and the rest
    worker.begin("c", [5, 6], ANSWER)
    assert worker.run() == len(ANSWER)  # another prompt


def test_a_finished_sibling_is_drafted_while_others_run():
    worker = Worker()
    worker.begin("a", PROMPT, ANSWER[:3] + [STOP])
    worker.begin("b", PROMPT, ANSWER)
    worker.begin("c", PROMPT, ANSWER)
    for _ in range(5):
        worker.step()
    worker.begin("d", PROMPT, ANSWER[:3] + [21, STOP])
    worker.step()
    assert worker.drafts["d"][:2] == ANSWER[1:3] and worker.drafts["b"] == []


def test_rows_that_move_or_wait_keep_their_state():
    worker = Worker()
    worker.begin("a", PROMPT, ANSWER)
    worker.run()
    worker.begin("b", PROMPT, ANSWER)
    worker.begin("c", PROMPT[::-1], ANSWER[::-1] + [STOP])
    worker.step()
    worker.input_batch.req_ids.reverse()
    assert worker.step() == 3 + 1  # b's draft of two tokens, and none for c
    worker.input_batch.req_ids.remove("b")  # preempted: it is still among the requests
    worker.step()
    worker.input_batch.req_ids.append("b")
    worker.drafts["b"] = []  # vLLM drops a waiting request's draft, which then counts as rejected
    worker.step()
    assert worker.tokens["b"] == PROMPT + ANSWER[:5] and worker.drafts["b"] == ANSWER[5:6]


def test_tokens_after_the_stop_token_are_no_part_of_an_answer():
    worker = Worker()
    worker.begin("a", PROMPT, [11, STOP, 33, 34])
    worker.run()
    worker.begin("b", PROMPT, [11, 12, STOP])
    worker.step()
    assert worker.drafts["b"] == [STOP]


def test_a_row_whose_drafts_fail_drafts_none_for_a_while():
    worker = Worker()
    worker.begin("a", PROMPT, [1, 2] * 15)
    worker.run()
    worker.begin("b", PROMPT, [1, 1] * 20)
    drafted = []
    while worker.input_batch.req_ids:
        worker.step()
        drafted.append(len(worker.drafts["b"]))
    failed = [place for place, count in enumerate(drafted) if count]
    assert len(failed) <= 3 * MISSES and drafted[0] == 2 and max(drafted[1:]) <= 1
    assert drafted[failed[MISSES - 1] + 1 :][: REST - 1] == [0] * (REST - 1)


def test_drafts_leave_room_in_the_model():
    worker = Worker()
    worker.begin("a", PROMPT, list(range(1, 60)))
    worker.run()
    worker.begin("b", PROMPT, list(range(1, 62)))
    while worker.input_batch.req_ids:
        worker.step()
        assert len(worker.tokens["b"]) + len(worker.drafts["b"]) < LONGEST or not worker.drafts["b"]
    assert len(worker.tokens["b"]) == LONGEST


def test_drafting_ends_while_it_does_not_pay(caplog):
    """It is turned off and on with a line each, by counts alone."""
    gate, lines = Gate(), []
    with caplog.at_level(logging.INFO, logger=drafter.log.name):
        for _ in range(WINDOW // 4):
            gate.note(4, 1, 2)
        assert gate.is_open and not caplog.records
        for _ in range(WINDOW // 4):
            gate.note(4, 0, 1)
        assert not gate.is_open
        for _ in range(RETRY):
            gate.note(0, 0, 1)
        assert gate.is_open
        lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "no drafts" in lines[0] and "drafts again" in lines[1]


def test_a_saved_history_is_drafted_from_at_once(tmp_path):
    history, worker = History(), Worker()
    history.add(key_of(PROMPT), [ANSWER], visit=3)
    np.savez(tmp_path / "answers.npz", **history.state())
    worker.drafter.load_history(str(tmp_path / "answers.npz"))
    worker.begin("b", PROMPT, ANSWER)
    assert worker.run() == 4  # as after the answer itself: 1 token, 1 + 2, 1 + 4, and the rest


def test_a_drafter_without_a_worker_is_an_error():
    worker = Worker()
    worker.drafter._runner = None
    with pytest.raises(RuntimeError, match="not attached"):
        worker.drafter.propose([[1]], np.array([1]), np.ones((1, 4)))
