"""Samples that end early, against the same samples cut by hand: in the embedded engine, and beside vLLM's process."""

from __future__ import annotations

import queue

import numpy as np
import pytest

from megatron_rl.errors import EngineError, RewardError
from megatron_rl.rollout.engines.replica import Completion
from megatron_rl.rollout.vllm.early_ends import EarlyEnds
from megatron_rl.types import Prompt, Rollout
from tests.patience import patient
from tests.unit.rollout.fake_engine import prompt_of
from tests.unit.rollout.tiny_model import ROUNDING, engine_of

PROMPTS = [prompt_of(i, token_ids=tuple(range(2, 3 + i))) for i in range(4)]


class SumIsDivisible:
    """Ends a sample if the sum of its tokens is a multiple of a number. It keeps the lengths that it was asked of."""

    def __init__(self, every_tokens: int = 3, divisor: int = 3) -> None:
        self.every_tokens, self.divisor, self.asked = every_tokens, divisor, []

    def ends(self, prompt: Prompt, sample_index: int, token_ids) -> bool:
        self.asked.append((prompt.prompt_id, sample_index, len(token_ids)))
        return sum(token_ids) % self.divisor == 0


def cut_by_hand(whole: Rollout, early_end: SumIsDivisible) -> tuple[tuple[int, ...], str]:
    """Return the tokens and the end of a sample that ends early, from the whole sample, by the rule's own words."""
    for length in range(1, len(whole.response_ids)):
        if length % early_end.every_tokens == 0 and sum(whole.response_ids[:length]) % early_end.divisor == 0:
            return whole.response_ids[:length], "decided"
    return whole.response_ids, whole.finish_reason


@pytest.mark.parametrize("max_tokens", [None, [12, 7, 9, 12]])
def test_samples_of_the_embedded_engine_equal_whole_samples_cut_by_hand(hf_path, model, max_tokens) -> None:
    engine, rows = engine_of(hf_path, model, max_batch_samples=16), []
    hook = engine._open_model().register_forward_pre_hook(
        lambda module, args, given: rows.append(given["input_ids"].numel()), with_kwargs=True
    )
    whole = engine.generate(PROMPTS, 6, max_tokens=max_tokens)
    num_whole = sum(rows)
    rows.clear()
    engine.early_end = SumIsDivisible()
    early = engine.generate(PROMPTS, 6, max_tokens=max_tokens)
    hook.remove()
    assert [(x.response_ids, x.finish_reason) for x in early] == [cut_by_hand(x, engine.early_end) for x in whole]
    assert {x.finish_reason for x in early} == {"stop", "length", "decided"}
    for one, other in zip(early, whole, strict=True):
        length = len(one.response_ids)
        assert np.abs(np.subtract(one.logprobs, other.logprobs[:length])).max() < ROUNDING
        assert one.weight_versions == ((1, length),) and one.prompt == other.prompt
        if one.finish_reason == "decided":
            assert one.text == engine._tokenizer.decode(list(one.response_ids), skip_special_tokens=True)
    assert sum(rows) < 0.8 * num_whole  # rows that ended have left the batch
    assert len(engine.early_end.asked) == len(set(engine.early_end.asked))  # no beginning is asked of twice
    wholes = engine.generate(PROMPTS, 6, max_tokens=max_tokens, temperature=0.7)  # a call's own: an evaluation's
    assert [x.response_ids for x in wholes] == [x.response_ids for x in whole]


# ---- beside an engine's process ----------------------------------------------------------------------------------


class Told:
    """Stands for the engine's process: keeps what it is told to end, and with what a request failed."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue = queue.SimpleQueue()

    def end_sample(self, request_id: str, sample: int) -> None:
        self.messages.put((request_id, sample))

    def fail(self, request_id: str, error: BaseException) -> None:
        self.messages.put(error)

    def heard(self) -> object:
        return self.messages.get(timeout=patient(60))


def completion_of(ids: list[int], reason: str, versions=None) -> Completion:
    logprobs = np.arange(len(ids), dtype=np.float32)
    return Completion(token_ids=np.array(ids), logprobs=logprobs, finish_reason=reason,
                      weight_versions=versions or ((3, len(ids)),))


@pytest.fixture
def watched():
    """Return (the ends of one request, the engine that it watches)."""
    ends = EarlyEnds(SumIsDivisible(every_tokens=2, divisor=7), {"r": PROMPTS[0]})
    yield ends, Told()
    ends.close()


IDS = [5, 1, 4, 3, 3, 5, 9, 9]  # sums after 2, 4, 6: 6, 13, 21 = 3 · 7


def tell(ends: EarlyEnds, engine: Told, ids: list[int], start: int = 0, sample: int = 0) -> None:
    ends.told(engine, "r", sample, start, np.array(ids[start:]))


def test_a_cut_does_not_depend_on_when_the_tokens_were_told(watched) -> None:
    """Told in pieces, at once, in part or never: the sample ends after 6 tokens, and no beginning is asked of twice."""
    ends, engine = watched
    wanted = (IDS[:6], "decided", ((3, 4), (4, 2)))
    for pieces in ((), (IDS[:2],), (IDS[:2], IDS[:4], IDS[:6]), (IDS,)):
        asked = ends._early_end.asked
        asked.clear()
        for number, piece in enumerate(pieces):
            tell(ends, engine, piece, start=len(pieces[number - 1]) if number else 0)
        if pieces and len(pieces[-1]) >= 6:
            assert engine.heard() == ("r", 0)
        elif pieces:  # the thread has looked at the piece once it looks at another sample's
            tell(ends, engine, [7, 7], sample=1)
            assert engine.heard() == ("r", 1)
            asked.remove(("0@0", 1, 2))
        for reason in ("length", "decided"):
            given = completion_of(IDS, reason, versions=((3, 4), (4, 3), (5, 1)))
            (found,) = ends.cut("r", [given])
            assert (found.token_ids.tolist(), found.finish_reason, found.weight_versions) == wanted
            assert found.logprobs.tolist() == [*range(6)]
            if reason == "length":
                assert [length for *_, length in asked] == [2, 4, 6]


def test_a_sample_that_ends_by_itself_at_that_place_keeps_its_end(watched) -> None:
    ends, _ = watched
    (found,) = ends.cut("r", [completion_of(IDS[:6], "stop")])
    assert found.finish_reason == "stop" and len(found.token_ids) == 6


def test_tokens_of_an_attempt_before_do_not_count(watched) -> None:
    """The request is sent again after its engine was lost: the tokens begin again, and only the last ones count."""
    ends, engine = watched
    tell(ends, engine, [7, 7, 7])
    assert engine.heard() == ("r", 0)
    (found,) = ends.cut("r", [completion_of(IDS[:4], "length")])
    assert found.finish_reason == "length" and len(found.token_ids) == 4
    tell(ends, engine, [7, 7])
    assert engine.heard() == ("r", 0)
    tell(ends, engine, IDS)
    assert engine.heard() == ("r", 0)
    (found,) = ends.cut("r", [completion_of(IDS, "decided")])
    assert found.token_ids.tolist() == IDS[:6]


def test_an_end_that_nobody_asked_for_is_an_error(watched) -> None:
    with pytest.raises(EngineError, match="request r: the engine ended sample 0 early, and nothing asked for it"):
        watched[0].cut("r", [completion_of(IDS[:4], "decided")])


def test_an_error_of_the_function_ends_its_request(watched) -> None:
    ends, engine = watched
    error = RewardError("no verdict")

    def fails(*_: object) -> bool:
        raise error

    ends._early_end.ends = fails
    tell(ends, engine, IDS)
    assert engine.heard() is error


def test_a_share_of_decided_samples_is_counted() -> None:
    from megatron_rl.rollout.rollout_metrics import RolloutMetrics

    counts = dict(tokens=9, generation_s=1.0, turns=4, samples=4, truncated=1, decided=3, repeats=2, ended_s=[],
                  further={}, engines=[])
    for ends_early, wanted in ((True, 0.75), (False, None)):
        metrics = RolloutMetrics(has_turns=False, has_delta=False, ends_early=ends_early)
        metrics.note_job([counts])
        found = metrics.take()
        assert found.get("rollout/decided_share") == wanted and found["rollout/truncated_share"] == 0.25
        assert found["rollout/repeat_share"] == 0.5
