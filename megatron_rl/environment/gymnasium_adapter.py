"""An adapter for gymnasium's environments: a turn's text becomes an action, and an observation becomes text.

Any object with gymnasium's ``reset(seed=, options=)`` and ``step(action)`` fits (Farama Gymnasium
1.4, core.py, Env).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping

from megatron_rl.environment.protocol import Step
from megatron_rl.errors import ConfigError
from megatron_rl.types import Prompt
from megatron_rl.users_code import is_own, resolve


class GymnasiumAdapter:
    """Plays one episode of a gymnasium environment. The prompt's text is the episode's first observation.

    The function ``rows`` makes such prompts.

    env: an id that gymnasium knows, or ``module:Class``.
    arguments: the keyword arguments that the environment is made with.
    action: ``module:function`` that turns a turn's text into an action, or raises ValueError. None:
        the text itself if the actions are texts, otherwise the last whole number in the text.
    observation: ``module:function`` that turns an observation into text; None: ``str``.
    invalid: the observation after a text that is no action; ``{error}`` is replaced by the fault.
        The environment takes no step then.

    Example: ``environment: {name: gymnasium, arguments: {env: FrozenLake-v1, arguments:
    {is_slippery: false}}}``.
    """

    def __init__(
        self,
        env: str,
        arguments: Mapping[str, object] | None = None,
        action: str | None = None,
        observation: str | None = None,
        invalid: str = "{error}",
    ) -> None:
        self.env = _made(env, arguments or {})
        self.to_action = _function(action, "action") or self._default_action
        self.to_text = _function(observation, "observation") or str
        self.invalid = invalid

    def reset(self, prompt: Prompt) -> None:
        """Begin the episode with the row's ``seed``. Raises ValueError if its first observation is not the row's."""
        row, name = prompt.columns, f"prompt {prompt.prompt_id}"
        if "seed" not in row:
            raise ValueError(f"{name} has no column 'seed', which its episode begins from; rows() writes it")
        found = self.to_text(self.env.reset(seed=int(row["seed"]), options=row.get("options"))[0])
        if found != row.get("observation", found):
            raise ValueError(
                f"{name} begins with {found!r:.80}, and its row says {row['observation']!r:.80}; write the rows again"
            )

    def step(self, action: str) -> Step:
        try:
            chosen = self.to_action(action)
            if not self.env.action_space.contains(chosen):
                raise ValueError(f"{chosen!r:.80} is no action of {self.env.action_space}")
        except ValueError as error:
            return Step(observation=self.invalid.replace("{error}", f"{error}"))
        observation, reward, terminated, truncated, _ = self.env.step(chosen)
        if done := bool(terminated or truncated):
            self.env.close()
        return Step(observation=self.to_text(observation), reward=float(reward), done=done)

    def _default_action(self, text: str) -> object:
        if type(self.env.action_space).__name__ == "Text":
            return text
        if not (numbers := re.findall(r"-?\d+", text)):
            raise ValueError("there is no whole number in it")
        return int(numbers[-1])


def rows(env: str, seeds: Iterable[int], **settings) -> list[dict]:
    """Return one dataset row for each seed: {"prompt": ..., "observation": ..., "seed": ...}.

    Both texts are the first observation of the episode with that seed.

    settings: the other arguments of GymnasiumAdapter, with the values that the run uses.
    """
    game = GymnasiumAdapter(env, **settings)
    firsts = ((seed, game.to_text(game.env.reset(seed=seed)[0])) for seed in seeds)
    return [{"prompt": text, "observation": text, "seed": seed} for seed, text in firsts]


def _made(env: str, arguments: Mapping[str, object]) -> object:
    """Return the environment that ``env`` names. Raises ConfigError for an unknown name and for bad arguments."""
    what = f"environment.arguments.env={env!r}"
    if is_own(env) and env.rpartition(":")[2].isidentifier():  # not gymnasium's "module:Name-v0"
        make = resolve(env, {}, what=what, form="module:Class")
    else:
        try:
            from gymnasium import make
        except ImportError as error:
            raise ConfigError(f"{what} needs a package: {error}; pip install gymnasium") from error
        make = functools.partial(make, env)
    try:
        return make(**arguments)
    except Exception as error:
        raise ConfigError(f"{what} with {dict(arguments)}: {error!r:.500}") from error


def _function(name: str | None, key: str) -> Callable | None:
    return resolve(name, {}, what=f"environment.arguments.{key}={name!r}", form="module:function") if name else None
