"""Calls of a real engine in a thread of their own, for weights that change in their middle."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from megatron_rl.types import Prompt, Rollout
from tests.patience import patient, until
from tests.vllm.rig import LOGPROB_TOLERANCE, Bench, make_prompts

PROMPTS = make_prompts(*range(3, 63, 5))
SAMPLES = 2
# Tokens of the answers, by turns. An engine of four places holds two prompts, which never end at the same token: an
# update at any moment falls in the middle of at least one.
LENGTHS = (100, 71, 83, 57, 91)
FEW = 4  # rollouts of each kind are compared with Hugging Face
ANSWER_S = 200.0
# A wait for a request's deadline would outlast every bound of the tests.
LONG = ("rollout.max_response_tokens=100", "rollout.request_s=3600", "weight_sync.in_flight=true")


def prompts_of(bench: Bench, times: int) -> list[Prompt]:
    """Return prompts for a call with an update in its middle, to which a busy server answers after a second."""
    return PROMPTS * times * (1 if bench.replica.ours else 3)


def lengths_of(prompts: list[Prompt]) -> list[int]:
    return list(itertools.islice(itertools.cycle(LENGTHS), len(prompts)))


class Call:
    """A call of ``generate`` in a thread of its own, with the finished prompts that it told meanwhile."""

    def __init__(self, bench: Bench, times: int = 1, samples: int = SAMPLES, few: int | None = None,
                 temperature=None) -> None:
        self.prompts = prompts = prompts_of(bench, times)[:few]
        self.told: list[tuple[int, list[Rollout]]] = []
        self.waits = 0
        self._result: Future[list[Rollout]] = Future()

        def run() -> None:
            try:
                found = bench.engine.generate(
                    prompts, samples, temperature=temperature, max_tokens=lengths_of(prompts),
                    on_finished=lambda index, rollouts: self.told.append((index, rollouts)),
                )  # fmt: skip
                self._result.set_result(found)
            except BaseException as error:  # noqa: BLE001 (``result`` raises it)
                self._result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()

    def wait_for_the_middle(self) -> None:
        """Wait until a third of the prompts has its answers, or the next third; others run then, and others wait."""
        self.waits += 1
        assert until(lambda: self._result.done() or 3 * len(self.told) >= self.waits * len(self.prompts), ANSWER_S)
        assert not self._result.done(), "the call was over before its middle"

    def result(self) -> list[Rollout]:
        return self._result.result(patient(ANSWER_S))


def spans(rollout: Rollout) -> Iterator[tuple[int, slice]]:
    start = 0
    for version, count in rollout.weight_versions:
        yield version, slice(start, start + count)
        start += count


def spans_hold(bench: Bench, load: Callable[[int], int], refer_to: Callable[[int], object], few=None) -> None:
    """Assert that each token is of the weights of its span; load: sends a seed's weights and returns their version."""
    versions, call = {load(1): 1}, Call(bench, few=few)
    for seed in (2, 3):
        call.wait_for_the_middle()
        versions[load(seed)] = seed
    rollouts = call.result()
    assert [x for _, group in sorted(call.told) for x in group] == rollouts and len(call.told) == len(call.prompts)
    wanted = [n for n in lengths_of(call.prompts) for _ in range(SAMPLES)]
    assert [len(x.response_ids) for x in rollouts] == wanted
    assert [sum(count for _, count in x.weight_versions) for x in rollouts] == wanted
    kinds: dict[tuple[int, ...], list[Rollout]] = {}
    for rollout in rollouts:
        kinds.setdefault(tuple(version for version, _ in rollout.weight_versions), []).append(rollout)
    print("versions of the rollouts:", {kind: len(found) for kind, found in sorted(kinds.items())})
    assert {version for kind in kinds for version in kind} == set(versions) and sum(len(kind) > 1 for kind in kinds) > 1
    gaps, others = dict.fromkeys(versions, 0.0), []
    for version, seed in versions.items():
        refer_to(seed)
        for rollout in [x for found in kinds.values() for x in found[:FEW]]:
            gap = bench.gap(rollout)
            for named, tokens in spans(rollout):
                if named == version:
                    gaps[version] = max(gaps[version], gap[tokens].max())
                else:
                    others.append(gap[tokens].max())
    assert max(gaps.values()) < LOGPROB_TOLERANCE and max(others) > 1000 * LOGPROB_TOLERANCE
