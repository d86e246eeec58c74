"""Sessions, one for each agent's episode from its first request to its reward, and counts of their outcomes.

1. A session's requests and its reward are accepted until it is closed. Later ones are refused and
   counted.
2. Slow work, such as tokenizing, is done outside a session's lock, so that the session's end never
   waits for it. It is done for one of the session's requests at a time.
3. The seed of a request's sampling depends on the sample, the context, and how often the context
   was requested before. So the order in which requests arrive does not change what is sampled.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.errors import shortened
from megatron_rl.rollout.endpoint.recorder import Record, Turn, digests
from megatron_rl.rollout.endpoint.rendering import Rendering, reply_of
from megatron_rl.rollout.endpoint.requests import CompletionRequest, Refused, canonical
from megatron_rl.types import Prompt, Rollout

MAX_NAMES = 20  # samples that a report names for each kind
# Outcomes that are counted: of sessions (every session but a lost one gives a sample), of branches, of late
# or failed requests.
KINDS = (
    "sessions",
    "failed",
    "abandoned",
    "lost",
    "limited",
    "untrained branches",
    "late requests",
    "late answers",
    "late rewards",
    "unsampled requests",
    "unknown sessions",
)


class Tally:
    """Counts sessions and requests by outcome (KINDS). Keeps the names of the first samples of each outcome."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.names: dict[str, list[str]] = {}
        self._taken: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, kind: str, name: str | None = None, count: int = 1) -> None:
        """Add ``count`` to the count of outcome ``kind``. ``name``: the sample's name, if it is known.

        Raises ValueError for an outcome that is not in KINDS.
        """
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")
        with self._lock:
            self.counts[kind] += count
            names = self.names.setdefault(kind, [])
            if name is not None and name not in names and len(names) < MAX_NAMES:
                names.append(name)

    def take(self) -> dict[str, int]:
        """Return metric name → count since the last call, one metric for each outcome listed in KINDS."""
        with self._lock:
            found = {f"endpoint/{kind.replace(' ', '_')}": self.counts[kind] - self._taken[kind] for kind in KINDS}
            self._taken = self.counts.copy()
        return found

    def report(self) -> str:
        """Return the counts of all outcomes as one line, such as "3 sessions; 1 abandoned (17@0#2)".

        In parentheses are samples' names: the prompt's name, then # and the sample's index.
        """
        with self._lock:
            parts = [
                f"{self.counts[kind]:,} {kind}" + (f" ({', '.join(self.names[kind])})" if self.names[kind] else "")
                for kind in KINDS
                if self.counts[kind]
            ]
        return "; ".join(parts) or "no sessions"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pending:
    """Holds a request that waits for the engine.

    parent: the turn that the request extends; None if it begins a conversation.
    new_ids: the tokens that the request adds to those of ``parent``.
    prompt: the whole context. The seed of the sampling derives from the prompt's id.
    limit: the maximum of tokens to sample.
    done: a future. It receives (Turn, the reply's message, the turn's number), or the error
        Refused.
    """

    session: Session
    request: CompletionRequest
    parent: Turn | None
    new_ids: tuple[int, ...]
    prompt: Prompt
    limit: int
    done: Future = field(default_factory=Future)


class Session:
    """Holds the episode of one sample.

    key: the session's id in the endpoint's address.
    room: the maximum of tokens of the response.
    max_prompt_tokens: the maximum of tokens of the first request.
    max_turns: the maximum of requests. Requests that cannot be tokenized count too.
    turnstile: an asyncio lock. A request holds it while the request is tokenized.
    """

    def __init__(
        self, key: str, prompt: Prompt, sample_index: int, *, room: int, max_prompt_tokens: int, max_turns: int
    ) -> None:
        self.key, self.prompt, self.sample_index, self.room = key, prompt, sample_index, room
        self.name = f"{prompt.name}#{sample_index}"
        self.record = Record()
        self.reward: float | None = None
        self.exhausted: str | None = None  # the finish_reason, if a request was refused for the session's limits
        self._max_prompt_tokens, self._max_turns = max_prompt_tokens, max_turns
        self.turnstile = asyncio.Lock()
        self._lock = threading.Lock()
        self._num_requests, self._answers = 0, itertools.count()
        self._draws: Counter[str] = Counter()
        self._waiting: set[Future] = set()
        self._closed = False

    def check_length(self, num_characters: int, rendering: Rendering) -> None:
        """Raise Refused for a request with more characters than the session's maximum of tokens can stand for.

        Called before the request is tokenized.
        """
        num_tokens = self._max_prompt_tokens + self.room
        if num_characters > (most := rendering.most_characters(num_tokens)):
            self.exhausted = "length"
            raise Refused(
                f"the request has {num_characters:,} characters or more, and a session of {num_tokens} tokens reads "
                f"{most:,}; shorten it, or raise data.max_prompt_tokens or rollout.max_response_tokens",
                code="context_length_exceeded",
            )

    def ask(self, request: CompletionRequest, rendering: Rendering, tally: Tally) -> Pending:
        """Find the turn that a request extends, and tokenize the request's new part. Return the request as Pending.

        If another request was answered meanwhile, the search is repeated, since the new turn may be
        the one to extend. Raises Refused if the session is closed, or if the request exceeds its
        limits.
        """
        self.check_length(request.num_characters, rendering)
        with self._lock:
            self._check_open("a request", tally)
            if self._num_requests >= self._max_turns:
                self.exhausted = self.exhausted or "stop"
                raise Refused(
                    f"the session has had its rollout.endpoint.max_turns={self._max_turns} requests", code="max_turns"
                )
            self._num_requests += 1
        # Tokenize without the lock, until no turn was added meanwhile.
        parent, new_ids = None, None
        while True:
            num_turns = len(self.record.turns)
            extended = self.record.parent_of(request.frame, request.conversation)
            if new_ids is None or extended is not parent:
                parent, new_ids = extended, rendering.new_ids(request, extended)
            context = new_ids if parent is None else (*parent.token_ids(), *new_ids)
            digest = hashlib.blake2b(np.array(context, dtype=np.int64).tobytes(), digest_size=6).hexdigest()
            with self._lock:
                self._check_open("a request", tally)
                if len(self.record.turns) == num_turns:
                    return self._pending(request, parent, new_ids, context, digest)

    def _pending(
        self,
        request: CompletionRequest,
        parent: Turn | None,
        new_ids: tuple[int, ...],
        context: tuple[int, ...],
        digest: str,
    ) -> Pending:
        if not context:
            raise Refused("the request's prompt has no tokens; give a prompt")
        limit = self._limit(parent, context)
        self._draws[digest] += 1
        name = f"{self.name}/{digest}.{self._draws[digest]}"
        pending = Pending(
            session=self,
            request=request,
            parent=parent,
            new_ids=new_ids,
            prompt=Prompt(prompt_id=name, text="", token_ids=context, columns={}),
            limit=limit if request.max_tokens is None else min(limit, request.max_tokens),
        )
        pending.done.set_running_or_notify_cancel()  # from here on a client that goes away cannot cancel it
        self._waiting.add(pending.done)
        return pending

    def _limit(self, parent: Turn | None, context: tuple[int, ...]) -> int:
        """Return the maximum of tokens to sample after ``context``. Raises Refused if the session has none left.

        parent: the turn that the request extends.
        """
        if parent is None:
            if len(context) <= self._max_prompt_tokens:
                return self.room
            message = (
                f"the first request has {len(context)} tokens, more than data.max_prompt_tokens="
                f"{self._max_prompt_tokens}; shorten it, or raise data.max_prompt_tokens"
            )
        else:
            used = len(context) - len(parent.path()[0].new_ids)
            if used < self.room:
                return self.room - used
            message = (
                f"the conversation has {used} tokens after its first request, and the response may have {self.room} in "
                "all; end it earlier, or raise rollout.max_response_tokens"
            )
        self.exhausted = "length"
        raise Refused(message, code="context_length_exceeded")

    def take(self, pending: Pending, rollout: Rollout, tally: Tally) -> None:
        """Record the engine's sample for a request, and answer the request.

        If the session is closed, the sample is only counted.
        """
        request, number = pending.request, next(self._answers)
        reply = reply_of(rollout.text, request, number)
        said = (canonical(reply),) if request.is_chat else rollout.text
        if request.frame[0] == "ids":
            said = tuple(rollout.response_ids)
        known = request.conversation + said
        turn = Turn(
            frame=request.frame,
            parent=pending.parent,
            known=digests(known, [len(known)])[0],
            new_ids=pending.new_ids,
            ids=rollout.response_ids,
            logprobs=rollout.logprobs,
            weight_versions=rollout.weight_versions,
            finish_reason=rollout.finish_reason,
        )
        with self._lock:
            if self._closed:
                tally.note("late answers", self.name)
                return
            self._waiting.discard(pending.done)
            self.record.add(turn)
        pending.done.set_result((turn, reply, number))

    def give_up(self, pending: Pending, error: Exception, tally: Tally) -> None:
        """Refuse and count a request that the engine could not sample. ``error``: the engine's error."""
        with self._lock:
            is_waiting = pending.done in self._waiting
            self._waiting.discard(pending.done)
        tally.note("unsampled requests", self.name)
        if is_waiting:
            said = shortened(f"{type(error).__name__}: {error}", 500)
            pending.done.set_exception(
                Refused(
                    f"the engine cannot sample the request's {len(pending.prompt.token_ids)} tokens ({said}); "
                    "change the request",
                    code="not_sampled",
                )
            )

    def take_reward(self, reward: float, tally: Tally) -> None:
        """Set the session's reward. Raises Refused for a second reward, or after the session's end."""
        with self._lock:
            self._check_open("a reward", tally)
            self.reward = reward

    def _check_open(self, what: str, tally: Tally) -> None:
        if self._closed or self.reward is not None:
            tally.note("late requests" if what == "a request" else "late rewards", self.name)
            raise Refused(f"{what} came after the end of session {self.key}", status=410, code="session_ended")

    def close(self) -> None:
        """End the session. Refuse its waiting requests and all later requests."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, set()
        for done in waiting:
            done.set_exception(Refused(f"session {self.key} has ended", status=410, code="session_ended"))

    def rollout(self, rendering: Rendering, why_excluded: str | None, *, version: int, filler: int) -> Rollout:
        """Return the session's sample as a Rollout: all turns that lead to the turn that was answered last.

        why_excluded: the session's failure, which takes the sample out of its group; None without
            one.

        The rollout of a session without turns has one token ``filler``, without loss, at weight
        version ``version``. Such a session has always failed.
        """
        common = {
            "prompt": self.prompt,
            "sample_index": self.sample_index,
            "environment_reward": None if why_excluded else (self.reward or 0.0),
            "excluded": why_excluded,
        }
        if not self.record.turns:
            return Rollout(
                **common,
                response_ids=(filler,),
                logprobs=(0.0,),
                text="",
                finish_reason="stop",
                weight_versions=((version, 1),),
                loss_mask=(False,),
            )
        branch = self.record.last_branch()
        body = branch.response_ids[:-1] if branch.finish_reason == "stop" else branch.response_ids
        return Rollout(
            **common,
            response_ids=branch.response_ids,
            logprobs=branch.logprobs,
            text=rendering.decode(body),
            finish_reason=self.exhausted or branch.finish_reason,
            weight_versions=branch.weight_versions,
            loss_mask=None if all(branch.loss_mask) else branch.loss_mask,
            context_ids=branch.prompt_ids,
        )
