"""The settings with which a rollout may leave groups under way (rollout.producer.straggler_share)."""

from __future__ import annotations

import json

from megatron_rl.config import Config
from megatron_rl.errors import ConfigError
from megatron_rl.planning.num_steps import steps_per_rollout


def check_stragglers(config: Config) -> None:
    """Raise ConfigError where rollouts cannot leave groups under way, or these would be too old when they are trained.

    Without weights in flight the next sync would wait for them; parts are cut by places, further prompts are waited
    for, and episodes are run one call at a time.
    """
    producer = config.rollout.producer
    share, prompts = producer.straggler_share, config.train.prompts_per_rollout
    if not share:
        return
    if not producer.num_stragglers(prompts):
        raise ConfigError(
            f"rollout.producer.straggler_share={share:g} of train.prompts_per_rollout={prompts} is less than one "
            f"group; set it to at least {1 / prompts:.3g}, or to 0"
        )
    needed = (
        ("weight_sync.in_flight", config.weight_sync.in_flight, True),
        ("rollout.producer.mode", producer.mode, "prefetch"),
        ("rollout.producer.min_groups", producer.min_groups, None),
        ("rollout.dynamic_sampling.max_rounds", config.rollout.dynamic_sampling.max_rounds, 0),
        ("environment.name", config.environment.name, None),
    )
    for name, value, wanted in needed:
        if value != wanted:
            raise ConfigError(
                f"rollout.producer.straggler_share={share:g} leaves groups under way while their rollout is trained, "
                f"and with {name}={json.dumps(value)} that cannot be; set {name}={json.dumps(wanted)}, or "
                "rollout.producer.straggler_share=0"
            )
    steps, limit = steps_per_rollout(config), producer.max_staleness_steps
    if limit is not None and limit < steps:
        raise ConfigError(
            f"rollout.producer.straggler_share={share:g} trains groups one rollout, {steps} optimizer steps, after "
            f"their own, and rollout.producer.max_staleness_steps={limit}; raise that to at least {steps}, or to null"
        )
