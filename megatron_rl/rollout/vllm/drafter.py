"""The drafter of ``rollout.speculation=history`` in a vLLM engine: drafts tokens from earlier answers to a prompt.

vLLM (0.32.0, v1/spec_decode/custom_class_proposer.py, ``method=custom_class``) makes it in the process
of the engine's worker, and calls ``propose`` after each step. It sees the requests' tokens in the
worker's batch, so the history is made there. A process that is started later gets the history that its
rank keeps (speculation.py).
What it drafts decides how many tokens a step gives, never which.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.rollout.speculation.history import History, key_of
from megatron_rl.rollout.speculation.suffixes import Cursor, SuffixIndex

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

log = logging.getLogger(f"vllm.{__name__}")  # vLLM writes the lines of loggers below its own
MISSES, REST = 3, 16  # a row of so many drafts without an accepted token drafts none in so many steps
FIRST = 2  # most tokens of a request's first draft; it doubles while all are accepted
WINDOW, SHARE = 2000, 0.2  # of so many drafted tokens this share must be accepted, or drafting ends
RETRY = 50_000  # sampled tokens after which drafting begins again


class Gate:
    """Ends drafting while too few drafted tokens are accepted. Counts decide, and no clock."""

    def __init__(self) -> None:
        self._drafted = self._accepted = self._sampled = 0
        self.is_open = True

    def note(self, drafted: int, accepted: int, sampled: int) -> None:
        """Take one step of a request into account: its drafted, accepted and sampled tokens."""
        if not self.is_open:
            self._sampled += sampled
            if self._sampled >= RETRY:
                log.info("rollout.speculation: drafts again after %d tokens without", self._sampled)
                self.__init__()
            return
        self._drafted += drafted
        self._accepted += accepted
        if self._drafted < WINDOW:
            return
        if self._accepted < SHARE * self._drafted:
            log.info(
                "rollout.speculation: no drafts for the next %d tokens, since only %d of %d drafted ones were accepted",
                *(RETRY, self._accepted, self._drafted),
            )
            self.is_open = False
        self._drafted = self._accepted = 0


@dataclass(slots=True)
class _Row:
    """Holds a request's state. start: the place of its first sampled token; most: of tokens of its next draft."""

    key: str
    start: int
    cursor: Cursor
    stops: Collection[int]
    most: int
    answer: list[int] = field(default_factory=list)
    drafted: int = 0
    misses: int = 0
    rest: int = 0

    def verified(self, accepted: int, most: int) -> None:
        """Choose the length of the next draft: doubled if all tokens were accepted, else one more than were."""
        if not self.drafted:
            return
        self.most = min(most, 2 * self.drafted if accepted == self.drafted else accepted + 1)
        self.misses = 0 if accepted else self.misses + 1
        if self.misses >= MISSES:
            self.misses, self.rest = 0, REST


class HistoryDrafter:
    """Drafts from the earlier answers to a request's prompt, and from those of finished requests of the same prompt.

    vllm_config: vLLM's settings.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._longest = vllm_config.model_config.max_model_len
        self._runner: GPUModelRunner | None = None
        self._version: Callable[[], int] = lambda: 0
        self._history, self._gate = History(), Gate()
        self._rows: dict[str, _Row] = {}
        self._indices: dict[str, SuffixIndex] = {}  # of the prompts with requests under way
        self._users: Counter[str] = Counter()  # prompt → requests under way

    def attach(self, runner: GPUModelRunner, version: Callable[[], int]) -> None:
        """Take the worker's batches from ``runner``. ``version``: returns the version of the weights that sample."""
        self._runner, self._version = runner, version

    def load_history(self, path: str) -> None:
        """Replace the history by a saved one, before the first request. ``path``: an .npz of ``History.state``."""
        with np.load(path, allow_pickle=False) as file:
            self._history.load_state(dict(file))

    def load_model(self, *_: object) -> None:
        """Do nothing: the drafter has no weights."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return the drafted tokens of each request of the batch; none for one that sampled nothing in this step.

        sampled_token_ids: the tokens that each request sampled in this step.
        num_tokens_no_spec: each request's number of tokens, of the prompt too.
        token_ids_cpu: each request's tokens, in rows.

        Raises RuntimeError before ``attach``.
        """
        if self._runner is None:
            raise RuntimeError("the drafter of rollout.speculation=history was not attached to the engine's worker")
        self._end_finished()
        ids = self._runner.input_batch.req_ids
        return [
            self._draft(ids[place], sampled, token_ids_cpu[place, : num_tokens_no_spec[place]]) if sampled else []
            for place, sampled in enumerate(sampled_token_ids)
        ]

    def _draft(self, name: str, sampled: Sequence[int], tokens: np.ndarray) -> list[int]:
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = self._begin(name, tokens)
        accepted = min(len(sampled) - 1, row.drafted)
        self._gate.note(row.drafted, accepted, len(sampled))
        row.verified(accepted, self._most)
        row.drafted = 0
        row.answer.extend(sampled)
        if len(row.answer) != len(tokens) - row.start:  # tokens came or went while no draft was asked for
            row.answer, row.cursor = tokens[row.start :].tolist(), Cursor(self._indices[row.key])
        row.rest -= row.rest > 0
        most = min(row.most, self._longest - len(tokens) - 1)
        if row.rest or most < 1 or not self._gate.is_open:
            return []
        draft = row.cursor.draft(row.answer, most)
        row.drafted = len(draft)
        return draft

    def _begin(self, name: str, tokens: np.ndarray) -> _Row:
        request = self._runner.requests[name]
        prompt = tokens[: request.num_prompt_tokens]
        key = key_of(prompt)
        if key not in self._indices:
            self._indices[key] = self._history.index(key)
        self._users[key] += 1
        sampling = request.sampling_params
        stops = frozenset(() if sampling is None else sampling.stop_token_ids or ())
        return _Row(key, len(prompt), Cursor(self._indices[key]), stops, min(FIRST, self._most))

    def _end_finished(self) -> None:
        """Put the answers of requests that ended in the history. Requests that wait again keep their state."""
        for name in [name for name in self._rows if name not in self._runner.requests]:
            row = self._rows.pop(name)
            end = next((place + 1 for place, token in enumerate(row.answer) if token in row.stops), len(row.answer))
            answer = row.answer[:end]
            self._history.add(row.key, [answer], visit=self._version())
            self._indices[row.key].add(answer)
            self._users[row.key] -= 1
            if not self._users[row.key]:
                del self._users[row.key], self._indices[row.key]
