"""Rollouts that agents make: an engine that runs one agent per sample and records its requests to the endpoint.

A session is the work of one agent on one sample. Agents run in threads and send HTTP requests. The
inner engine samples the tokens. If it is in this process, only the thread of ``generate`` samples,
all waiting requests as one batch. If it is in other processes, it gets each request at once, while
it samples others.

A session ends once its agent has returned and its reward is known. The reward is a number that the
agent returned, or that came by POST /sessions/ID/reward. The session fails if the agent raises or
made no request, or if it has no reward ``rollout.endpoint.deadline_s`` after its start.
``environment.on_error`` decides what a failure leads to. An agent may raise after a request was
refused because the session reached its maximum of tokens or requests. That ends its episode, and is
no failure.

No request of an agent can end the run. If the inner engine raises an error other than EngineLost
on a batch of requests, each request is sampled again by itself. If a request fails by itself, the
engine gets a trial request: one token, after a prompt of one end-of-sequence token. If the trial
works, only the agent's request is refused. Otherwise the engine is broken, and its error ends the
call of ``generate``.
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
from megatron_rl.rollout.engines.engine import Engine, EngineLost, OnFinished, group_sizes
from megatron_rl.rollout.engines.wrapper import EngineAround
from megatron_rl.rollout.http_server import listening
from megatron_rl.types import Prompt, Rollout
from megatron_rl.users_code import is_reward, resolve

log = logging.getLogger(__name__)
LOOK_S = 0.05  # seconds between two checks whether agents have ended or are overdue
MAX_TRACEBACK = 20_000  # characters
MAX_ENDED = 10_000  # ended sessions that are remembered
Agent = Callable[[str, Mapping[str, object]], float | None]


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """Holds the requests and threads of one call of ``generate``. Its fields are changed under the lock ``change``.

    waiting: requests that were not passed to the engine yet.
    threads: threads that pass requests to an engine in other processes, and wait for the samples.
    error: the first error of these threads; None without one.
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
        """Return and remove the waiting requests. If there are none, first wait LOOK_S seconds at most for one.

        If one of ``threads`` has failed, raises its error instead.
        """
        with self.change:
            if not self.waiting and self.error is None:
                self.change.wait(LOOK_S)
            if self.error is not None:
                raise self.error
            found, self.waiting = self.waiting, []
            return found

    def start(self, act: Callable[[], None]) -> None:
        """Call ``act`` in a new thread. The next ``take`` raises the error that ``act`` raised."""

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
        """Wait until the engine has finished every request of this call. The engine's own deadlines limit the wait."""
        for thread in self.threads:
            thread.join()


@dataclass(slots=True, kw_only=True, eq=False)
class _Episode:
    """Holds one session of a call of ``generate``.

    said: the ticket of the agent's call, which runs in a thread. Once the call has ended, the
        ticket holds its return value or error.
    rollout: the session's rollout; None until the session has ended.
    """

    session: Session
    call: _Call
    said: Ticket | None = None
    rollout: Rollout | None = None


class AgentEngine(EngineAround):
    """Runs agents' sessions on an inner engine (see the module).

    agent: a callable that gets the session's base_url and the dataset's row. It returns the reward,
        or None.
    port: the endpoint's port; 0: any free port.
    vocab_size: the model's vocabulary size. Token ids in requests must be below it.
    on_error: ``environment.on_error``.
    template_variables: ``data.template_variables``.
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
        self._calls: dict[str, _Call] = {}  # a session's key → the call that it belongs to
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
        """Close the endpoint, and log the counts of sessions and requests by their outcome."""
        super().close()
        self._pool.close()
        log.info("endpoint: %s", self.tally.report())
        self._open.close()

    def take_counts(self) -> dict[str, int]:
        """Return metric name → count since the last call, one metric for each outcome of a session or request."""
        return self.tally.take()

    def _submit(self, pending: Pending) -> None:
        call = self._calls.get(pending.session.key)
        if call is not None:  # None: the session was closed just now, which has refused the request
            call.put(pending)

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int | Sequence[int],
        *,
        temperature: float | None = None,
        max_tokens: Sequence[int] | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Rollout]:
        """Return rollouts (see ``Engine.generate``), one for each session.

        max_tokens: for each prompt, the limit on the response tokens of a session's turns together.

        Raises EpisodeError, with the sample's id, if a session fails under
        ``environment.on_error=fail``. If the inner engine itself is broken, its error is raised.
        """
        rooms = [self._max_tokens] * len(prompts) if max_tokens is None else list(max_tokens)
        call, sizes = _Call(), group_sizes(prompts, samples_per_prompt)
        groups = [
            [self._begun(prompt, sample, rooms[index], call) for sample in range(sizes[index])]
            for index, prompt in enumerate(prompts)
        ]
        finished: dict[int, list[Rollout]] = {}
        try:
            while len(finished) < len(groups):
                # Sample the waiting requests, then end the sessions that are over and report whole groups.
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
        """Run the agent in this thread, and return its reward or None.

        An error of the agent is ignored if its session had reached a limit, or had its reward.
        """
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
        """Run the engine on waiting requests, and answer each as soon as it is sampled.

        If the engine raises, each request is tried alone. A request that fails alone is refused.
        But if the engine also fails on a trial request for one token, the engine's error is raised.
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
        except Exception as error:  # noqa: BLE001 (for one request it is raised below, or answered, counted and logged)
            fault = error
        # Try each request alone.
        if len(waiting) > 1:
            for pending in [pending for pending in waiting if not pending.done.done()]:
                self._sample([pending], temperature)
            return
        # A single request failed: find out whether the engine can sample at all.
        probe = Prompt(prompt_id=f"{waiting[0].prompt.name}/probe", text="", token_ids=(self._filler,), columns={})
        try:
            self.engine.generate([probe], 1, temperature=temperature, max_tokens=[1])
        except EngineLost:
            raise
        except Exception:  # noqa: BLE001 (the engine is broken, and the first error says more)
            raise fault from None
        log.warning("a request of sample %s could not be sampled: %r", waiting[0].session.name, fault)
        waiting[0].session.give_up(waiting[0], fault, self.tally)

    def _settle(self, episode: _Episode) -> None:
        """Make the session's rollout if its agent has returned and its reward is known, or if it failed.

        Otherwise do nothing. Raises EpisodeError for a failure under ``environment.on_error=fail``.
        """
        session, ticket = episode.session, episode.said
        if not ticket.ended:
            return
        # Find the reward, or the reason of a failure.
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
        # Close the session, and raise or log its failure.
        session.close()
        self._note_end(session, kind)
        message = None
        if reason is not None:
            message = f"agent {self._config.agent!r} failed on sample {session.name}"
            if self._on_error == "fail":
                raise EpisodeError(f"{message}; mend it, or set environment.on_error=drop or retry_sample:\n{reason}")
            last = (reason.strip().splitlines() or ["?"])[-1]
            log.warning("%s, and environment.on_error=%s goes on: %s", message, self._on_error, last)
            message = f"{message}: {reason}"
        episode.rollout = session.rollout(
            self._rendering, message, version=self.engine.weight_version, filler=self._filler
        )

    def _take_return(self, session: Session, value: object) -> tuple[str | None, str | None]:
        """Take an agent's return value as the session's reward, if it is a number.

        Returns ("failed", the reason) if the value is no valid reward, or if the session already
        has one. Returns (None, None) if the value was taken, or is None.
        """
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
        """Close a session and free its memory. It is counted as lost if ``generate`` ended without its sample."""
        session = episode.session
        if episode.rollout is None:
            self.tally.note("lost", session.name)
        session.close()
        session.record = Record()  # frees its memory
        self._calls.pop(session.key, None)
        self._ended.append(session.key)  # so that late requests can be answered as late for a while
        if len(self._ended) > MAX_ENDED:
            self._routes.sessions.pop(self._ended.popleft(), None)


def agent_of(config: EndpointConfig) -> Agent:
    """Return the agent function that ``config.agent`` names, with ``config.arguments`` bound.

    Raises ConfigError if the name is no function, or if the function does not take the arguments.
    """
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
    """Return an AgentEngine around the engine. ``on_error``: ``environment.on_error``.

    Raises ConfigError if the agent cannot be called, or if the server's packages are missing.
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
