"""The part of an engine's process that tells the rank the tokens of running samples, and ends samples at its word.

It reads the output processor of vLLM's engine (vLLM 0.32.0, v1/engine/output_processor.py), which holds
every unfinished sample's tokens so far. Nothing is told of a sample that has ended by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

Send = Callable[[Mapping[str, object], Mapping[str, np.ndarray]], None]


class PartialTokens:
    """Tells a rank the tokens of the samples that it watches, a whole number of ``every`` tokens at a time.

    engine: the process's engine.
    send: sends a message, a header and arrays, to the rank.
    """

    def __init__(self, engine: LLMEngine, send: Send) -> None:
        self._engine, self._send = engine, send
        self._every: dict[str, int] = {}  # request → after how many further tokens its samples are told
        self._told: dict[str, int] = {}  # a sample's id in the engine → how many of its tokens were told
        self._ended: dict[str, set[int]] = {}  # request → indices of its samples that the rank ended

    def watch(self, request_id: str, every: int) -> None:
        self._every[request_id], self._ended[request_id] = every, set()

    def forget(self, request_id: str) -> set[int]:
        """Stop watching a request that has ended; return the indices of its samples that the rank ended."""
        self._every.pop(request_id, None)
        return self._ended.pop(request_id, set())

    def tell(self) -> None:
        """Send the rank the new tokens of each watched sample that runs, if they are enough."""
        if not self._every:
            return
        told, self._told = self._told, {}
        for state in _running(self._engine.output_processor):
            if (every := self._every.get(request := _request_of(state))) is not None:
                self._told[state.request_id] = self._tell(state, request, every, told.get(state.request_id, 0))

    def _tell(self, state: RequestState, request: str, every: int, start: int) -> int:
        """Send a sample's tokens from ``start`` on, if they are enough; return how many were sent in all."""
        token_ids = state.detokenizer.output_token_ids
        end = max(start, len(token_ids) // every * every)
        if end > start:
            header = {"kind": "tokens", "request_id": request, "sample": state.request_index, "start": start}
            self._send(header, {"token_ids": np.asarray(token_ids[start:end], dtype=np.int64)})
        return end

    def end(self, request_id: str, sample: int) -> RequestOutput | None:
        """End one running sample of a request. Do nothing if the sample or the request has ended already.

        Returns vLLM's output of the request if this was its last running sample, else None.
        """
        for state in _running(self._engine.output_processor):
            if _request_of(state) == request_id and state.request_index == sample:
                self._ended[request_id].add(sample)
                output = _last_output(state)
                self._engine.abort_request([state.request_id], internal=True)
                if output is not None and state.parent_req is not None:
                    _drop_parent(self._engine.output_processor, state)
                return output
        return None


def _running(processor: OutputProcessor) -> list[RequestState]:
    return list(processor.request_states.values())


def _request_of(state: RequestState) -> str:
    """Return the id that the rank gave the request of a sample's state."""
    return state.external_req_id if state.parent_req is None else state.parent_req.external_req_id


def _last_output(state: RequestState) -> RequestOutput | None:
    """Count a sample as ended; return the output of its request if no other sample of it runs.

    It comes before the abort, which drops the sample's state and does not count it as ended.
    """
    from vllm.v1.engine import FinishReason

    return state.make_request_output(
        new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None
    )


def _drop_parent(processor: OutputProcessor, state: RequestState) -> None:
    """Forget a request of several samples, all of which have ended. The abort of its last sample leaves it."""
    processor.parent_requests.pop(state.parent_req.request_id, None)
