"""Episodes over an engine that samples letters, and the environment that plays them."""

import random
from collections.abc import Sequence

from megatron_rl.config import EnvironmentConfig
from megatron_rl.data.chat import Observations
from megatron_rl.environment import Step, environment_maker
from megatron_rl.rollout.engines.engine import EngineLost, group_sizes
from megatron_rl.rollout.engines.multi_turn import MultiTurnEngine
from megatron_rl.types import Prompt, Rollout
from tests.patience import HANG_S, patient
from tests.unit.data.templates import tokenizer_of
from tests.unit.rollout.fake_engine import WillingEngine

HERE = "tests.unit.rollout.letter_episodes"
TOKENIZER = tokenizer_of(None)
STOP = TOKENIZER.eos_token_id
BOUND_S = patient(HANG_S)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False).input_ids)


def prompt_of(number: int, **columns: object) -> Prompt:
    text = f"p{number}"
    return Prompt(prompt_id=f"{number}@0", text=text, token_ids=ids_of(text), columns=columns)


def turn_of(prompt: Prompt, sample: int, room: int, version: int = 3) -> Rollout:
    """Return an engine's turn: letters that depend on the prompt's name and tokens, as many as there is room for."""
    draw = random.Random(f"{prompt.name}/{sample}/{prompt.token_ids}/{version}")
    text = "".join(draw.choice("abcdef") for _ in range(draw.randint(1, 5)))
    whole = (*ids_of(text), STOP)
    ids = whole[:room]
    said = {"text": TOKENIZER.decode(list(ids), skip_special_tokens=True), "weight_versions": ((version, len(ids)),)}
    said |= {"finish_reason": "stop" if ids == whole else "length"}
    logprobs = tuple(-draw.random() - 0.1 for _ in ids)
    return Rollout(prompt=prompt, sample_index=sample, response_ids=ids, logprobs=logprobs, **said)


class LetterEngine(WillingEngine):
    """Finishes groups in a random order of its own.

    losses[k]: how many groups of its k-th call are finished before it is lost. newer_every: the number of calls after
    which its weight version grows by one.
    """

    def __init__(self, *, room=40, seed=0, losses: Sequence[int | None] = (), newer_every: int | None = None) -> None:
        super().__init__()
        self.room, self.random, self.losses, self.newer_every = room, random.Random(seed), list(losses), newer_every
        self.weight_version = 3

    def generate(self, prompts, samples_per_prompt, *, temperature=None, max_tokens=None, on_finished=None):
        self.calls.append([prompt.name for prompt in prompts])
        rooms = [self.room] * len(prompts) if max_tokens is None else max_tokens
        assert len(rooms) == len(prompts) and all(1 <= room <= self.room for room in rooms)
        version = self.weight_version + (len(self.calls) // self.newer_every if self.newer_every else 0)
        limit, sizes = self.losses.pop(0) if self.losses else None, group_sizes(prompts, samples_per_prompt)
        found: dict[int, list[Rollout]] = {}
        for k in self.random.sample(range(len(prompts)), len(prompts)):
            if len(found) == limit:
                raise EngineLost("it was killed", finished=found)
            found[k] = [turn_of(prompts[k], sample, rooms[k], version) for sample in range(sizes[k])]
            if on_finished is not None:
                on_finished(k, found[k])
        return [rollout for k in range(len(prompts)) for rollout in found[k]]


class Echo:
    """Says how many of a turn's letters stand before d, for as many turns as the first turn asks for."""

    def __init__(self, reward: float = 0.5, longest: int = 4) -> None:
        self.reward, self.longest = reward, longest

    def reset(self, prompt: Prompt) -> None:
        self.prompt, self.left = prompt, None

    def step(self, action: str) -> Step:
        self.left = len(action) % self.longest if self.left is None else self.left - 1
        done = self.left == 0
        return Step(
            observation=f"={sum(c < 'd' for c in action)};", reward=self.reward * len(action) if done else None,
            done=done,
        )


def episodes_of(
    engine: LetterEngine, environment: str = f"{HERE}:Echo", *, tokenizer=TOKENIZER, template: str = "{prompt}",
    room: int | None = None, **changes: object,
) -> MultiTurnEngine:
    config = EnvironmentConfig(name=environment, **{"deadline_s": BOUND_S, "max_turns": 3, **changes})
    made = environment_maker(config), Observations(tokenizer, template, config.role)
    return MultiTurnEngine(engine, *made, tokenizer, config, max_response_tokens=room or engine.room)
