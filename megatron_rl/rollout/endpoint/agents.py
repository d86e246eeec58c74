"""Rollouts that agents make: an engine that runs an agent per sample and records what it asks the endpoint.

Agents run in threads and speak HTTP. An engine of this process samples in the thread of
``generate`` alone, all requests that wait together; one that is elsewhere gets each request at
once, while it samples others.

A session ends once its agent has returned and its reward is known: a number that the agent
returned, or one that came by POST /sessions/ID/reward. It fails where the agent raises, has asked
nothing, or where there is no reward ``rollout.endpoint.deadline_s`` after its start;
``environment.on_error`` says what follows. Where a request was refused for the session's length or
number of requests, an agent that raises has ended its episode, and has not failed.

What an agent asks ends no run. An error of the engine other than EngineLost is one request's own if
it fails alone too, and the engine then samples a token behind an end of sequence: the request is
refused to its agent. An engine that does not even sample that is broken, and the error ends the
call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from megatron_rl.config import DataConfig, EndpointConfig, RolloutConfig
from megatron_rl.distributed.http_access import keys_in
from megatron_rl.environment.step_pool import Overdue, StepPool, Ticket
from megatron_rl.errors import ConfigError, EpisodeError
from megatron_rl.rollout.endpoint.recorder import Record
from megatron_rl.rollout.endpoint.rendering import Rendering
from megatron_rl.rollout.endpoint.requests import MOST_REWARD
from megatron_rl.rollout.endpoint.session import Pending, Session, Tally
from megatron_rl.rollout.engines.engine import Engine, EngineLost, OnFinished
from megatron_rl.rollout.engines.wrapper import EngineAround
from megatron_rl.rollout.http_server import listening
from megatron_rl.types import Prompt, Rollout
from megatron_rl.users_code import is_reward, resolve

log = logging.getLogger(__name__)
LOOK_S = 0.05  # between two looks at agents that may have ended or be overdue
MAX_TRACEBACK = 20_000  # characters
MAX_ENDED = 10_000  # sessions whose ends are remembered
Agent = Callable[[str, Mapping[str, object]], float | None]


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """Holds what one call of ``generate`` waits for, under ``change``.

    threads: they wait for an engine that is elsewhere. error: the first one of theirs.
    """

    change: threading.Condition = field(default_factory=threading.Condition)
    waiting: list[Pending] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    error: BaseException | None = None

    def put(self, pending: Pending) -> None:
        with self.change:
            self.waiting.append(pending)
            self.change.notify_all()

    def take(self) -> list[Pending]:
        """Return the requests that wait, after at most LOOK_S. Raises a thread's error."""
        with self.change:
            if not self.waiting and self.error is None:
                self.change.wait(LOOK_S)
            if self.error is not None:
                raise self.error
            found, self.waiting = self.waiting, []
            return found

    def start(self, act: Callable[[], None]) -> None:
        """Run ``act`` in a thread, whose error ``take`` raises."""

        def run() -> None:
            try:
                act()
            except BaseException as error:  # noqa: BLE001 (raised in the caller's thread, by take)
                with self.change:
                    self.error = self.error or error
                    self.change.notify_all()

        self.threads = [thread for thread in self.threads if thread.is_alive()]
        self.threads.append(threading.Thread(target=run, daemon=True, name="agents' requests"))
        self.threads[-1].start()

    def end(self) -> None:
        """Wait until the engine has nothing of this call under way; its own deadlines bound that."""
        for thread in self.threads:
            thread.join()


@dataclass(slots=True, kw_only=True, eq=False)
class _Episode:
    """Holds one session under way. ``rollout``: once it has ended."""

    session: Session
    call: _Call
    said: Ticket | None = None
    rollout: Rollout | None = None


class AgentEngine(EngineAround):
    """Runs agents' sessions on an inner engine (see the module).

    agent: called with the session's base_url and the row. port: of the endpoint; 0: any free one.
    vocab_size: the model's, above every token id that is sampled behind.
    on_error: ``environment.on_error``. template_variables: ``data.template_variables``.
    """

    def __init__(
        self,
        engine: Engine,
        agent: Agent,
        tokenizer: PreTrainedTokenizerBase,
        config: EndpointConfig,
        *,
        port: int,
        temperature: float,
        vocab_size: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        on_error: str,
        template_variables: Mapping[str, object] | None = None,
    ) -> None:
        try:
            from megatron_rl.rollout.endpoint.routes import HOST, SessionRoutes
        except ImportError as error:
            raise ConfigError(
                f"rollout.endpoint.agent={config.agent!r} needs a server's packages: {error}; install "
                "megatron_rl[agent]"
            ) from error
        super().__init__(engine)
        self._agent, self._config, self._on_error = agent, config, on_error
        self._max_prompt_tokens, self._max_tokens = max_prompt_tokens, max_response_tokens
        self._filler = tokenizer.eos_token_id or 0
        self._rendering, self.tally = Rendering(tokenizer, template_variables), Tally()
        self._calls: dict[str, _Call] = {}  # by the key of a session
        self._ended: deque[str] = deque()
        keys = keys_in(config.api_key_env, setting="rollout.endpoint.api_key_env")
        self._routes = SessionRoutes(
            config,
            self._rendering,
            self.tally,
            temperature=temperature,
            vocab_size=vocab_size,
            keys=keys,
            submit=self._submit,
        )
        self._pool = StepPool(config.num_agents, config.deadline_s, key="rollout.endpoint.deadline_s")
        self._open = contextlib.ExitStack()
        self.address = self._open.enter_context(listening(self._routes.app, HOST, port, section="rollout.endpoint"))

    def close(self) -> None:
        """End the endpoint and log what became of the sessions."""
        super().close()
        self._pool.close()
        log.info("endpoint: %s", self.tally.report())
        self._open.close()

    def take_counts(self) -> dict[str, int]:
        """Return what became of sessions and requests since the last call, by their metrics' names."""
        return self.tally.take()

    def _submit(self, pending: Pending) -> None:
        call = self._calls.get(pending.session.key)
        if call is not None:  # else the session was closed just now, and the request refused
            call.put(pending)

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        *,
        temperature: float | None = None,
        max_tokens: Sequence[int] | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Rollout]:
        """Return rollouts as ``Engine.generate`` does, one for each session; ``max_tokens`` bounds whole responses.

        Raises EpisodeError, with the sample's id, where a session fails under
        ``environment.on_error=fail``, and the error of an engine that is broken (see the module).
        """
        rooms = [self._max_tokens] * len(prompts) if max_tokens is None else list(max_tokens)
        call = _Call()
        groups = [
            [self._begun(prompt, sample, rooms[index], call) for sample in range(samples_per_prompt)]
            for index, prompt in enumerate(prompts)
        ]
        finished: dict[int, list[Rollout]] = {}
        try:
            while len(finished) < len(groups):
                if waiting := call.take():
                    if self.engine.is_elsewhere:
                        call.start(functools.partial(self._sample, waiting, temperature))
                    else:
                        self._sample(waiting, temperature)
                for index, group in enumerate(groups):
                    for episode in [x for x in group if x.rollout is None]:
                        self._settle(episode)
                    if index not in finished and all(episode.rollout is not None for episode in group):
                        finished[index] = [episode.rollout for episode in group]
                        if on_finished is not None:
                            on_finished(index, finished[index])
        except EngineLost as lost:
            raise EngineLost(str(lost), finished=finished) from lost
        finally:
            for episode in [member for group in groups for member in group]:
                self._release(episode)
            call.end()
        return [rollout for index in range(len(prompts)) for rollout in finished[index]]

    def _begun(self, prompt: Prompt, sample: int, room: int, call: _Call) -> _Episode:
        session = Session(
            secrets.token_hex(8),
            prompt,
            sample,
            room=room,
            max_prompt_tokens=self._max_prompt_tokens,
            max_turns=self._config.max_turns,
        )
        self._calls[session.key] = call
        self._routes.sessions[session.key] = session
        self.tally.note("sessions")
        episode = _Episode(session=session, call=call)
        episode.said = self._pool.submit(lambda: self._play(episode), episode)
        return episode

    def _play(self, episode: _Episode) -> float | None:
        """Run the agent, in a thread. Its error is none where its session had come to a limit or had its reward."""
        session = episode.session
        try:
            return self._agent(f"{self.address}/sessions/{session.key}/v1", session.prompt.columns)
        except Exception as error:
            if session.exhausted is None and session.reward is None:
                raise
            log.debug("the agent of sample %s raised after its session's end: %r", session.name, error)
            session.reward = 0.0 if session.reward is None else session.reward
            return None

    def _sample(self, waiting: Sequence[Pending], temperature: float | None) -> None:
        """Run the engine on requests that wait, and answer each as soon as it is sampled.

        Where that fails each is tried alone; one that fails alone is refused, or the engine is
        broken (see the module).
        """

        def took(index: int, rollouts: list[Rollout]) -> None:
            waiting[index].session.take(waiting[index], rollouts[0], self.tally)

        try:
            limits = [pending.limit for pending in waiting]
            prompts = [pending.prompt for pending in waiting]
            self.engine.generate(prompts, 1, temperature=temperature, max_tokens=limits, on_finished=took)
            return
        except EngineLost:
            raise
        except Exception as error:  # noqa: BLE001 (of one request it is raised, or said, counted and logged)
            fault = error
        if len(waiting) > 1:
            for pending in [pending for pending in waiting if not pending.done.done()]:
                self._sample([pending], temperature)
            return
        probe = Prompt(prompt_id=f"{waiting[0].prompt.name}/probe", text="", token_ids=(self._filler,), columns={})
        try:
            self.engine.generate([probe], 1, temperature=temperature, max_tokens=[1])
        except EngineLost:
            raise
        except Exception:  # noqa: BLE001 (the same fault, of which the first one says more)
            raise fault from None
        log.warning("a request of sample %s could not be sampled: %r", waiting[0].session.name, fault)
        waiting[0].session.give_up(waiting[0], fault, self.tally)

    def _settle(self, episode: _Episode) -> None:
        """End a session whose agent has returned and whose reward is known, or that failed."""
        session, ticket = episode.session, episode.said
        if not ticket.ended:
            return
        kind = reason = None
        try:
            kind, reason = self._take_return(session, ticket.result())
            if reason is None and session.reward is None:
                if time.monotonic() < ticket.ends_at:
                    return  # the reward comes by POST
                kind, reason = "abandoned", f"no reward came within {self._config.deadline_s:g} s"
        except Overdue as error:
            if session.reward is None:
                kind, reason = "abandoned", f"{error}"
        except Exception as error:  # noqa: BLE001 (reported in full: raised, or counted and logged)
            kind, reason = "failed", "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
        if reason is None and not session.record.turns:
            kind, reason = "failed", "it made no request, so that there is nothing to train"
        session.close()
        self._note_end(session, kind)
        message = None
        if reason is not None:
            message = f"agent {self._config.agent!r} failed on sample {session.name}"
            if self._on_error == "fail":
                raise EpisodeError(f"{message}; mend it, or set environment.on_error=drop:\n{reason}")
            last = (reason.strip().splitlines() or ["?"])[-1]
            log.warning("%s, which is taken out of its group: %s", message, last)
            message = f"{message}: {reason}"
        episode.rollout = session.rollout(
            self._rendering, message, version=self.engine.weight_version, filler=self._filler
        )

    def _take_return(self, session: Session, value: object) -> tuple[str | None, str | None]:
        """Take what an agent returned as the reward; return (kind, reason) of a fault, or (None, None)."""
        if value is None:
            return None, None
        if isinstance(value, bool) or not is_reward(value) or abs(value) > MOST_REWARD:
            said = f"it returned {value!r:.80}; return a finite number of at most {MOST_REWARD:.0e} either way"
            return "failed", f"{said}, or None if the reward comes by POST"
        if session.reward is not None:
            return "failed", f"it returned {value!r:.80} and {session.reward} came by POST; give one reward"
        session.reward = float(value)
        return None, None

    def _note_end(self, session: Session, kind: str | None) -> None:
        if kind is not None:
            self.tally.note(kind, session.name)
        if session.exhausted is not None:
            self.tally.note("limited")
        if (beside := len(session.record.leaves()) - 1) > 0:
            self.tally.note("untrained branches", count=beside)

    def _release(self, episode: _Episode) -> None:
        """Close a session and forget it; one that had not ended is lost, with its call."""
        session = episode.session
        if episode.rollout is None:
            self.tally.note("lost", session.name)
        session.close()
        session.record = Record()  # frees its memory
        self._calls.pop(session.key, None)
        self._ended.append(session.key)  # for a while a late request is told that it is late
        if len(self._ended) > MAX_ENDED:
            self._routes.sessions.pop(self._ended.popleft(), None)


def agent_of(config: EndpointConfig) -> Agent:
    """Return the function that plays a session. Raises ConfigError for a name or arguments that do not fit."""
    name = config.agent
    agent = resolve(name, {}, what=f"rollout.endpoint.agent={name!r}", form="module:function")
    if not callable(agent):
        raise ConfigError(f"rollout.endpoint.agent={name!r} is a {type(agent).__name__}; name a function")
    try:
        inspect.signature(agent).bind("http://127.0.0.1", {}, **config.arguments)
    except TypeError as error:
        raise ConfigError(
            f"rollout.endpoint.agent={name!r} cannot be called with base_url, row and "
            f"rollout.endpoint.arguments={dict(config.arguments)}: {error}; it takes {inspect.signature(agent)}"
        ) from None
    return functools.partial(agent, **config.arguments)


def with_agents(
    engine: Engine,
    rollout: RolloutConfig,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rank: int,
    vocab_size: int,
    on_error: str,
) -> AgentEngine:
    """Return an AgentEngine around the engine. on_error: ``environment.on_error``.

    Raises ConfigError for an agent that cannot be called, or without the server's packages.
    """
    settings = rollout.endpoint
    return AgentEngine(
        engine,
        agent_of(settings),
        tokenizer,
        settings,
        port=settings.port + rank if settings.port else 0,
        temperature=rollout.temperature,
        vocab_size=vocab_size,
        max_prompt_tokens=data.max_prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
        on_error=on_error,
        template_variables=data.template_variables,
    )
