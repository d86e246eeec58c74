"""Calls of a real engine in a thread of their own, for weights that change in their middle."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

from megatron_rl.types import Prompt, Rollout
from tests.patience import patient, until
from tests.vllm.rig import Bench, make_prompts

PROMPTS = make_prompts(*range(3, 63, 3))
SAMPLES = 4
ANSWER_S = 200.0


def prompts_of(bench: Bench, times: int) -> list[Prompt]:
    """Return prompts for a call that lasts long enough for an update in its middle.

    A busy server's answer to a pause may take a second, so its calls must last for many.
    """
    return PROMPTS * times * (1 if bench.replica.ours else 3)


class Call:
    """A call of ``generate`` in a thread of its own, with the finished prompts that it told meanwhile."""

    def __init__(
        self,
        bench: Bench,
        times: int = 1,
        samples: int = SAMPLES,
        *,
        few: int | None = None,
        temperature: float | None = None,
    ) -> None:
        self.prompts = prompts = prompts_of(bench, times)[:few]
        self.told: list[tuple[int, list[Rollout]]] = []
        self.waits = 0
        self._result: Future[list[Rollout]] = Future()

        def finish(index: int, rollouts: list[Rollout]) -> None:
            self.told.append((index, rollouts))

        def run() -> None:
            try:
                self._result.set_result(
                    bench.engine.generate(prompts, samples, temperature=temperature, on_finished=finish)
                )
            except BaseException as error:  # noqa: BLE001 (``result`` raises it)
                self._result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()

    def wait_for_the_middle(self) -> None:
        """Wait until a third of the prompts has its answers, or the next third.

        Other requests run at that moment, and others wait.
        """
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
