"""The early ends of a call's samples (engines/early_end.py) on engines in other processes.

An engine tells its tokens while it computes. A thread of the call looks at them, and has the engine
end a sample that ``EarlyEnd`` ends. By then the engine has sampled further tokens; they are cut
off. A sample that ended by itself in the meantime is cut at the same place. So the result does not
depend on the threads' speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.errors import EngineError
from megatron_rl.rollout.engines.early_end import DECIDED, EarlyEnd, first_end
from megatron_rl.rollout.engines.replica import Completion, ReplicaLost, Watched
from megatron_rl.types import Prompt


@dataclass(slots=True, kw_only=True, eq=False)
class _Running:
    """Holds a sample of one attempt at a request. Fields are read and written under the lock of ``EarlyEnds``.

    token_ids: the tokens that the engine has told.
    looked_at: how many of them were looked at.
    end: after how many tokens the sample ends early; None if no early end was found.
    """

    token_ids: list[int] = field(default_factory=list)
    looked_at: int = 0
    end: int | None = None


class EarlyEnds:
    """Looks at the running samples of one call of ``VllmEngine.generate``, and ends them.

    prompts: request id → prompt.
    """

    def __init__(self, early_end: EarlyEnd, prompts: Mapping[str, Prompt]) -> None:
        self.every_tokens = early_end.every_tokens
        self._early_end, self._prompts = early_end, prompts
        self._samples: dict[tuple[int, str, int], _Running] = {}
        self._latest: dict[tuple[str, int], _Running] = {}
        self._lock = threading.Lock()  # not held while the user's function is called, which may hang
        self._told: queue.SimpleQueue[tuple[Watched, str, int, int, list[int]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._look_on, daemon=True, name="early-ends")
        self._thread.start()

    def told(self, engine: Watched, request_id: str, sample: int, start: int, token_ids: np.ndarray) -> None:
        """Take the tokens of a running sample from ``start`` on. The engine's own thread calls this."""
        self._told.put((engine, request_id, sample, start, token_ids.tolist()))

    def close(self) -> None:
        """Let the thread end. It is not waited for, since a user's function may hang."""
        self._told.put(None)

    def _look_on(self) -> None:
        while (message := self._told.get()) is not None:
            engine, request_id, sample, start, token_ids = message
            error: BaseException | None = None
            try:
                with contextlib.suppress(ReplicaLost):  # the dispatcher sends the request again
                    if self._look(engine, request_id, sample, start, token_ids):
                        engine.end_sample(request_id, sample)
            except BaseException as caught:  # noqa: BLE001 (the call of generate raises it)
                error = caught
            if error is not None:
                engine.fail(request_id, error)

    def _look(self, engine: Watched, request_id: str, sample: int, start: int, token_ids: list[int]) -> bool:
        with self._lock:
            key = (id(engine), request_id, sample)
            if start == 0:  # the first tokens of an attempt
                self._samples[key] = self._latest[request_id, sample] = _Running()
            running = self._samples.get(key)
            if running is None or running.end is not None or start != len(running.token_ids):
                return False
            running.token_ids += token_ids
            after, so_far = running.looked_at, list(running.token_ids)
        end = first_end(self._early_end, self._prompts[request_id], sample, so_far, after=after, whole=False)
        with self._lock:
            running.end, running.looked_at = end, len(so_far)
        return end is not None

    def cut(self, request_id: str, completions: Sequence[Completion]) -> list[Completion]:
        """Return a request's completions, each cut off where it ends early.

        Tokens that were not looked at while they were sampled are looked at now. Raises EngineError
        for a sample that the engine ended early without being told to.
        """
        return [self._cut(request_id, sample, completion) for sample, completion in enumerate(completions)]

    def _cut(self, request_id: str, sample: int, completion: Completion) -> Completion:
        token_ids, ended = completion.token_ids.tolist(), completion.finish_reason == DECIDED
        with self._lock:
            running = self._latest.pop((request_id, sample), None) or _Running()
            known = token_ids[: len(running.token_ids)] == running.token_ids
            end, after = (running.end, running.looked_at) if known else (None, 0)
        if end is None:
            place = (self._prompts[request_id], sample, token_ids)
            end = first_end(self._early_end, *place, after=after, whole=not ended)
        if end is not None:
            return _shortened(completion, end)
        if ended:
            raise EngineError(f"request {request_id}: the engine ended sample {sample} early, and nothing asked for it")
        return completion


def _shortened(completion: Completion, length: int) -> Completion:
    """Return the first ``length`` tokens of a completion, as a sample that ended early."""
    versions, left = [], length
    for version, count in completion.weight_versions:
        if left > 0:
            versions.append((version, min(count, left)))
        left -= count
    return dataclasses.replace(
        completion,
        token_ids=completion.token_ids[:length],
        logprobs=completion.logprobs[:length],
        finish_reason=DECIDED,
        weight_versions=tuple(versions),
    )
