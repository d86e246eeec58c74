"""Multi-turn episodes: an engine around another engine; its samples are conversations of policy and environment.

One call of the inner engine samples the first turns of all samples. Then the environments step.
For each later turn, the inner engine gets an episode's tokens so far as a prompt, and samples one
continuation. A sample's response is all tokens after its prompt. The environment's tokens carry no
loss.

An episode ends in one of two ways:
- With finish_reason "stop" if the environment ends it, or after ``environment.max_turns`` turns.
- With "length" if the response reaches ``rollout.max_response_tokens`` within a turn, or if no
  token would be left after an observation. The environment never sees a turn that was cut off. An
  observation that does not fit is not appended.

Three rules hold:

1. The seed of a turn depends on prompt, sample and turn, never on a rank or a position in a call.
   So any number of ranks, and a resumed run, draws the same tokens.
2. The policy's tokens stay as they were sampled; only the environment's text is tokenized.
3. ``on_finished`` gets each prompt's group once, when all its samples are finished. If the engine
   is lost, all groups that ``on_finished`` did not get begin again.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_rl.config import DataConfig, EnvironmentConfig
from megatron_rl.data.chat import Observations
from megatron_rl.environment import Environment, Step, environment_maker
from megatron_rl.environment.protocol import fault_of
from megatron_rl.environment.step_pool import Overdue, StepPool, Ticket
from megatron_rl.errors import ConfigError, EpisodeError
from megatron_rl.rollout.engines.engine import Engine, EngineLost, OnFinished, group_sizes
from megatron_rl.rollout.engines.wrapper import EngineAround
from megatron_rl.types import Prompt, Rollout

log = logging.getLogger(__name__)
MAX_TRACEBACK = 20_000  # characters


@dataclass(slots=True, kw_only=True, eq=False)
class _Episode:
    """Holds the state of one sample that is not finished.

    room: the maximum of tokens of the sample's response.
    said: the latest call of the environment, which may still run in a thread.
    ids, logprobs, mask, versions: the response so far, as Rollout's ``response_ids``, ``logprobs``,
        ``loss_mask`` and ``weight_versions``.
    last: the rollout of the latest turn alone.
    experts: [tokens, layers, top_k], the experts of the tokens so far. None if the engine reports
        none.
    why_excluded: the environment's failure, which takes the sample out of its group; None if it did
        not fail.
    """

    prompt: Prompt
    sample_index: int
    room: int
    environment: Environment | None = None
    said: Ticket | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    experts: np.ndarray | None = None
    turns: int = 0
    reward: float = 0.0
    last: Rollout | None = None
    finish_reason: str | None = None
    why_excluded: str | None = None

    @property
    def name(self) -> str:
        return f"{self.prompt.name}#{self.sample_index}"

    def next_prompt(self) -> Prompt:
        """Return the prompt of the next turn: all tokens so far. Its id names the sample and the turn."""
        if not self.turns:
            return self.prompt
        return Prompt(
            prompt_id=f"{self.name}/{self.turns}", text="", token_ids=(*self.prompt.token_ids, *self.ids), columns={}
        )

    def add_turn(self, rollout: Rollout) -> None:
        self.last, self.turns = rollout, self.turns + 1
        if rollout.routed_experts is not None:
            known = [] if self.experts is None else [self.experts[:-1]]  # earlier tokens keep their first experts
            self.experts = np.concatenate([*known, rollout.routed_experts[sum(map(len, known)) :]])
        self._add(rollout.response_ids, rollout.logprobs, True)
        for version, count in rollout.weight_versions:
            self._add_version(version, count)

    def add_observation(self, token_ids: Sequence[int]) -> None:
        self._add(token_ids, [0.0] * len(token_ids), False)
        if token_ids:
            self._add_version(self.versions[-1][0], len(token_ids))

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[float], sampled: bool) -> None:
        self.ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.mask.extend([sampled] * len(token_ids))

    def _add_version(self, version: int, count: int) -> None:
        if self.versions and self.versions[-1][0] == version:
            count += self.versions.pop()[1]
        self.versions.append((version, count))

    def rollout(self, decode: Callable[[Sequence[int]], str]) -> Rollout:
        body = self.ids[:-1] if self.last.finish_reason == "stop" else self.ids
        return Rollout(
            prompt=self.prompt,
            sample_index=self.sample_index,
            response_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            text=self.last.text if self.turns == 1 else decode(body),
            finish_reason=self.finish_reason,
            weight_versions=tuple(self.versions),
            loss_mask=None if all(self.mask) else tuple(self.mask),
            environment_reward=None if self.why_excluded else self.reward,
            excluded=self.why_excluded,
            routed_experts=self.experts,
        )


class MultiTurnEngine(EngineAround):
    """Runs episodes on an inner engine (see the module). It replaces ``generate`` and passes all other calls on.

    make: a callable that makes the environment of one sample.
    observations: turns the environment's observations into tokens.
    max_response_tokens: the maximum of tokens of the whole response.
    """

    def __init__(
        self,
        engine: Engine,
        make: Callable[[], Environment],
        observations: Observations,
        tokenizer: PreTrainedTokenizerBase,
        config: EnvironmentConfig,
        *,
        max_response_tokens: int,
    ) -> None:
        super().__init__(engine)
        self._make, self._observations, self._config = make, observations, config
        self._tokenizer, self._max_tokens = tokenizer, max_response_tokens
        self._pool = StepPool(config.num_threads, config.deadline_s, stops=config.on_error == "fail")

    def close(self) -> None:
        super().close()
        self._pool.close()

    # ---- episodes --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int | Sequence[int],
        *,
        temperature: float | None = None,
        max_tokens: Sequence[int] | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Rollout]:
        """Return rollouts (see ``Engine.generate``).

        max_tokens: for each prompt, the limit on the response tokens of a sample's turns together.

        Under ``environment.on_error=fail`` an environment that fails, or takes too long, raises
        EpisodeError with the sample's id and the turn.
        """
        rooms = [self._max_tokens] * len(prompts) if max_tokens is None else list(max_tokens)
        sizes = group_sizes(prompts, samples_per_prompt)
        groups = [
            [_Episode(prompt=prompt, sample_index=sample, room=rooms[index]) for sample in range(sizes[index])]
            for index, prompt in enumerate(prompts)
        ]
        finished: dict[int, list[Rollout]] = {}
        try:
            for episode in [member for group in groups for member in group]:
                episode.said = self._pool.submit(lambda episode=episode: self._begin(episode), (episode, "reset"))
            # The first turn samples whole groups. Each later turn samples every unfinished episode by itself.
            self._turn(groups, sizes, temperature, max_tokens)
            self._report(groups, finished, on_finished)
            while unfinished := [[member] for group in groups for member in group if member.finish_reason is None]:
                self._turn(unfinished, 1, temperature, [member.room - len(member.ids) for [member] in unfinished])
                self._report(groups, finished, on_finished)
        except EngineLost as lost:
            raise EngineLost(str(lost), finished=finished) from lost
        finally:
            self._pool.forget()
        return [rollout for index in range(len(prompts)) for rollout in finished[index]]

    def _begin(self, episode: _Episode) -> None:
        episode.environment = self._make()
        episode.environment.reset(episode.prompt)

    def _turn(
        self,
        groups: Sequence[Sequence[_Episode]],
        samples: int | Sequence[int],
        temperature: float | None,
        max_tokens: Sequence[int] | None,
    ) -> None:
        """Run one turn of each unfinished episode. Environments step while other episodes are still being sampled.

        groups: lists of episodes that have the same tokens so far, and so one next prompt.
        samples: the number of episodes of every group, or one number for each.
        max_tokens: for each group the maximum of tokens of the turn.
        """

        def took(index: int, rollouts: list[Rollout]) -> None:
            for episode, rollout in zip(groups[index], rollouts, strict=True):
                self._take(episode, rollout)

        prompts = [group[0].next_prompt() for group in groups]
        self.engine.generate(prompts, samples, temperature=temperature, max_tokens=max_tokens, on_finished=took)
        for episode in [member for group in groups for member in group if member.finish_reason is None]:
            self._answer(episode)

    def _take(self, episode: _Episode, rollout: Rollout) -> None:
        if self._pool.failed is not None:  # an environment failed while engines sampled
            self._result(self._pool.failed)
        episode.add_turn(rollout)
        if episode.turns == 1:
            self._result(episode.said)
        if episode.finish_reason is None and rollout.finish_reason == "length":
            episode.finish_reason = "length"
        if episode.finish_reason is None:
            call = f"step after turn {episode.turns}"
            episode.said = self._pool.submit(lambda: episode.environment.step(rollout.text), (episode, call))

    def _answer(self, episode: _Episode) -> None:
        """Add the environment's answer to an episode: the reward, and the observation or the episode's end."""
        step = self._result(episode.said)
        if episode.finish_reason is not None:
            return
        episode.reward += 0.0 if step.reward is None else float(step.reward)
        if step.done or episode.turns == self._config.max_turns:
            episode.finish_reason = "stop"
            return
        try:
            token_ids = self._observations.token_ids(step.observation, episode.ids[-1])
        except ConfigError as error:
            raise EpisodeError(
                f"environment {self._config.name!r} on sample {episode.name}, turn {episode.turns}: {error}"
            ) from error
        if len(episode.ids) + len(token_ids) >= episode.room:
            episode.finish_reason = "length"
        else:
            episode.add_observation(token_ids)

    def _result(self, said: Ticket) -> Step | None:
        """Return the result of an environment's call. If the call failed, raise EpisodeError or exclude the sample.

        said: the call's ticket. None is returned for a sample that is excluded.

        Under ``environment.on_error=fail`` the wait also ends if the call of another episode fails.
        Then that failure is raised.
        """
        ended = self._pool.wait(said)
        (episode, call), reason = ended.subject, None
        try:
            result = ended.result()
            reason = None if call == "reset" else fault_of(result)
        except Overdue as error:
            reason = f"{error}"
        except Exception as error:  # noqa: BLE001 (reported in full: raised, or counted and logged)
            reason = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
        if reason is None:
            return result
        message = f"environment {self._config.name!r} failed on sample {episode.name}, {call}"
        if self._config.on_error == "fail":
            raise EpisodeError(f"{message}; mend it, or set environment.on_error=drop or retry_sample:\n{reason}")
        log.warning(
            "%s, and environment.on_error=%s goes on: %s",
            message,
            self._config.on_error,
            reason.strip().splitlines()[-1] if reason.strip() else reason,
        )
        episode.finish_reason, episode.why_excluded = "stop", f"{message}: {reason}"
        return None

    def _report(
        self, groups: Sequence[Sequence[_Episode]], finished: dict[int, list[Rollout]], on_finished: OnFinished | None
    ) -> None:
        """Make the rollouts of the groups that the last turn completed, and pass them to ``on_finished``.

        finished: a group's index → its rollouts, to which this call adds the completed groups.
        """
        for index, group in enumerate(groups):
            if index not in finished and all(member.finish_reason is not None for member in group):
                finished[index] = [member.rollout(self._decode) for member in group]
                for episode in group:
                    episode.environment = None  # frees its memory
                if on_finished is not None:
                    on_finished(index, finished[index])

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)


def with_environment(
    engine: Engine,
    settings: EnvironmentConfig,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_response_tokens: int,
) -> MultiTurnEngine:
    """Return a MultiTurnEngine around the engine, with the environment that the settings name.

    Raises ConfigError for settings that cannot work, before anything is sampled.
    """
    make, observations = environment_parts(settings, data, tokenizer)
    return MultiTurnEngine(engine, make, observations, tokenizer, settings, max_response_tokens=max_response_tokens)


def environment_parts(
    settings: EnvironmentConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Callable[[], Environment], Observations]:
    """Return the function that makes environments, and the converter of their observations to tokens.

    Raises ConfigError for an unknown environment, or a chat template that does not take the
    observations' role.
    """
    observations = Observations(tokenizer, data.template, settings.role, data.template_variables)
    observations.token_ids("0", None)  # raises now if the template does not take the role
    return environment_maker(settings), observations
