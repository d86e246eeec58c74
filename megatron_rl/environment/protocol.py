"""The protocol of environments: two methods, and one instance per sample, made by a configured class or function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.config import EnvironmentConfig
from megatron_rl.errors import ConfigError
from megatron_rl.types import Prompt
from megatron_rl.users_code import is_reward, resolve

BUILT_IN = {
    "calculator": "megatron_rl.environment.calculator:Calculator",
    "gymnasium": "megatron_rl.environment.gymnasium_adapter:GymnasiumAdapter",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Holds an environment's reply to one turn of the policy.

    observation: a text, or under ``data.template=chat`` chat messages ``{"role": ..., "content":
        ...}``. The policy reads it before its next turn. No loss is computed on it.
    reward: a number that is added to the sample's reward; None: nothing.
    done: True if the episode is over. Then the observation is ignored.

    Example: ``Step(observation="408")`` continues the episode, ``Step(reward=1.0, done=True)`` ends
    it.
    """

    observation: str | Sequence[Mapping[str, str]] = ""
    reward: float | None = None
    done: bool = False


class Environment(Protocol):
    """Describes the environment of one sample.

    Its methods are called in threads: one call at a time, not always in the same thread. An
    instance is released when its episode ends. A run can be repeated only if results depend on the
    prompt and the actions alone.

    Example::

        class Echo:
            def reset(self, prompt):
                self.left = 2

            def step(self, action):
                self.left -= 1
                return Step(observation=action.upper(), reward=0.5, done=self.left == 0)
    """

    def reset(self, prompt: Prompt) -> None:
        """Begin the episode. It is called once, before the first turn. ``prompt.columns`` is the dataset's row."""
        ...

    def step(self, action: str) -> Step:
        """Return the reply to a turn. It is called after every turn that the token limit did not cut off.

        action: the turn's text, without special tokens.
        """
        ...


def fault_of(step: object) -> str | None:
    """Return in words what is wrong with a value that an environment's ``step`` returned; None if nothing is."""
    if not isinstance(step, Step):
        return f"it returned a {type(step).__name__}; return a megatron_rl.environment.Step"
    reward = step.reward
    if reward is not None and not is_reward(reward):
        return f"its reward is {reward!r:.80}; give a finite number (float32), or None for nothing"
    if not isinstance(step.observation, str | list | tuple):
        return f"its observation is a {type(step.observation).__name__}; give a text or a list of messages"
    return None


def environment_maker(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Return the function that makes one sample's environment.

    Raises ConfigError for a name that does not resolve, for arguments that do not fit, and for a
    class without ``reset`` or ``step``.
    """
    name = config.name
    factory = resolve(name, BUILT_IN, what=f"environment.name={name!r}", form="module:Class")
    if not callable(factory):
        raise ConfigError(
            f"environment.name={name!r} is a {type(factory).__name__}; name a class, or a function that makes "
            "environments"
        )
    try:
        inspect.signature(factory).bind(**config.arguments)
    except TypeError as error:
        raise ConfigError(
            f"environment.name={name!r} cannot be made with environment.arguments={dict(config.arguments)}: {error}; "
            f"it takes {inspect.signature(factory)}"
        ) from None
    if inspect.isclass(factory):
        missing = [method for method in ("reset", "step") if not hasattr(factory, method)]
        if missing:
            raise ConfigError(
                f"environment.name={name!r} has no method {missing[0]!r}; an environment has reset(prompt) and "
                "step(action)"
            )
    return lambda: factory(**config.arguments)
