"""The construction of this rank's engine and rollout worker, the manager of all ranks' rollouts, and their queue."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.config import Config, DataConfig, EnvironmentConfig, RewardConfig, RolloutConfig, WeightSyncConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.topology import Topology
from megatron_rl.distributed.watchdog import Watchdog
from megatron_rl.model.seam_fields import DTYPES
from megatron_rl.observability.timer import StepTimer
from megatron_rl.planning.num_steps import steps_per_rollout
from megatron_rl.reward import Reward
from megatron_rl.rollout.build import place_engine
from megatron_rl.rollout.colocation import DeviceShare
from megatron_rl.rollout.engines.engine import Engine
from megatron_rl.rollout.engines.placement import RankLocation, refuse_mixture
from megatron_rl.rollout.groups.build import GroupSettings, build_parts
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.queue import QueueSettings, RolloutQueue
from megatron_rl.rollout.rollout_metrics import RolloutMetrics
from megatron_rl.rollout.scored_batch import GroupScorer, Scoring
from megatron_rl.rollout.weight_source import AdapterWeights, PolicyWeights, WeightSource
from megatron_rl.rollout.worker import RolloutWorker
from megatron_rl.types import Rollout, Score

if TYPE_CHECKING:
    from megatron_rl.rollout.engines.early_end import EarlyEnd
    from megatron_rl.rollout.retry import SampleRetry
    from megatron_rl.rollout.speculation.history import History

TakeCounts = Callable[[], Mapping[str, int]]


def build_queue(
    config: Config,
    backend: MegatronBackend,
    manager: RolloutManager,
    prompts: PromptDataset,
    timer: StepTimer,
    *,
    passes_parts: bool,
    passes_all: bool,
) -> RolloutQueue:
    """Return the queue of rollouts.

    passes_parts: whether log π_old is computed for each part of a rollout, while later parts are still
        generated. A part has ``rollout.producer.min_groups`` groups.
    passes_all: True: it is computed for all samples of a part. False: only for those that may have
        an advantage other than 0 and are not too old.
    """
    scorer = GroupScorer(Scoring.of(config.reward, config.advantage, config.rollout, config.loss), backend)
    groups = GroupSettings(
        rollout=config.rollout,
        replay=config.replay,
        reroll=config.reroll,
        train=config.train,
        num_stragglers=config.rollout.producer.num_stragglers(config.train.prompts_per_rollout),
        seed=config.run.seed,
    )
    settings = QueueSettings(
        producer=config.rollout.producer,
        train=config.train,
        weight_sync=config.weight_sync,
        steps_per_rollout=steps_per_rollout(config.train, config.rollout, config.skip),
        passes_parts=passes_parts,
        passes_all=passes_all,
    )
    parts = build_parts(groups, prompts, manager, scorer, timer)
    return RolloutQueue(settings, manager, prompts, scorer, timer, parts)


def build_manager(
    config: Config,
    backend: MegatronBackend,
    tokenizer,
    reward: Reward | None,
    watchdog: Watchdog,
    *,
    models: Sequence[DeviceShare],
) -> RolloutManager:
    """Start this rank's inference engine, and return the manager of the rollouts on all ranks.

    models: the models that this rank trains. If the engine uses the same device, the models'
        gradients and optimizer state leave the device while the engine runs.
    """
    refuse_mixture(config.weight_sync, backend.shape.num_experts)
    # This rank's engine.
    sampling, share, shared = _placed_engine(config, backend, tokenizer)
    engine, take_counts = _with_episodes(
        sampling, config.rollout, config.environment, config.data, backend, tokenizer, watchdog
    )
    if config.reward.decided is not None:
        engine.early_end = _early_end(config.reward, tokenizer, watchdog)
    retry = _retry_of(config, is_elsewhere=engine.is_elsewhere)
    drafts, derive, history = _drafts_of(config, sampling)
    counts = [take_counts, *drafts, *([] if retry is None else [retry.take_counts])]
    # The worker that drives it, and the manager over all ranks.
    worker = RolloutWorker(
        engine,
        _scorer(reward, watchdog) if reward else unscored,
        config.rollout.producer,
        apart=reward is not None and reward.runs_apart,
        share=share,
        deadline_s=config.run.deadline_s,
    )
    return RolloutManager(
        worker,
        config.weight_sync,
        weights=_weight_source(config.weight_sync, backend),
        metrics=RolloutMetrics(
            has_turns=config.plays_episodes,
            has_delta=config.weight_sync.delta,
            ends_early=config.reward.decided is not None,
            take_counts=lambda: {name: count for take in counts for name, count in take().items()},
            derive=derive,
            read_engines=None if config.metrics.prometheus_port is None else engine.readings,
        ),
        models=models if shared else (),
        retry=None if retry is None else retry.complete,
        history=history,
    )


def _placed_engine(config: Config, backend: MegatronBackend, tokenizer) -> tuple[Engine, tuple[int, int] | None, bool]:
    """Return what ``place_engine`` returns; in a run that generates nothing, an engine that does nothing."""
    if not config.generates:
        from megatron_rl.rollout.engines.idle import IdleEngine

        return IdleEngine(), None, False
    return place_engine(
        config,
        tokenizer,
        location=_location(config.separate_critic_ranks, backend.topology),
        device=HOST.device,
        dtype=DTYPES[config.model.dtype],
        vocab_size=backend.shape.vocab_size,
        has_trainer=True,
    )


def _retry_of(config: Config, *, is_elsewhere: bool) -> SampleRetry | None:
    """Return what samples failed samples again (``retry_sample``); None if that is not configured."""
    reward, environment = config.reward.num_retries, config.environment.num_retries
    if not reward and not environment:
        return None
    from megatron_rl.rollout.retry import SampleRetry

    # An environment's engine runs one call at a time.
    beside = is_elsewhere and config.environment.name is None
    return SampleRetry(reward=reward, environment=environment, beside=beside)


def _weight_source(settings: WeightSyncConfig, backend: MegatronBackend) -> WeightSource:
    bucket_bytes = settings.bucket_bytes // 2  # the sender holds the other half
    match settings.adapters:
        case "alone":
            return AdapterWeights(backend, bucket_bytes)
        case _:
            return PolicyWeights(backend, bucket_bytes)


def _with_episodes(
    engine: Engine,
    rollout: RolloutConfig,
    environment: EnvironmentConfig,
    data: DataConfig,
    backend: MegatronBackend,
    tokenizer,
    watchdog: Watchdog,
) -> tuple[Engine, TakeCounts]:
    """Return (an engine that plays an environment's or an agent's episodes, a function that returns metrics).

    The function returns {metric: count since its last call}. Without an environment and an agent,
    the result is the given engine and a function that returns {}.
    """
    take_counts = dict
    if environment.name is not None:
        from megatron_rl.rollout.engines.multi_turn import with_environment

        with watchdog.own_call("environment"):  # importing the environment is the user's code
            engine = with_environment(
                engine,
                environment,
                data,
                tokenizer,
                max_response_tokens=rollout.max_response_tokens,
            )
    if rollout.endpoint.agent is not None:
        from megatron_rl.rollout.endpoint.agents import with_agents

        with watchdog.own_call("environment"):  # so is importing the agent
            engine = with_agents(
                engine,
                rollout,
                data,
                tokenizer,
                rank=backend.topology.rank,
                vocab_size=backend.shape.vocab_size,
                on_error=environment.on_error,
            )
        take_counts = engine.take_counts
    return engine, take_counts


def _early_end(reward: RewardConfig, tokenizer, watchdog: Watchdog) -> EarlyEnd:
    """Return the object by which an engine asks the user's function ``reward.decided`` about running samples."""
    from megatron_rl.reward.decided import Decided

    return Decided(reward, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), watchdog.own_call)


def _drafts_of(config: Config, engine: Engine) -> tuple[Sequence[TakeCounts], Callable[..., dict], History | None]:
    """Return (the counts of an engine's drafts, a function that derives metrics from them, the history).

    The history has the earlier answers for checkpoints. It is None if the engine drafts no tokens, or not
    from earlier answers.

    engine: this rank's engine, without others around it.
    """
    if not config.generates or config.rollout.speculation == "off":
        return (), dict, None
    from megatron_rl.rollout.speculation.counts import tokens_per_pass

    drafts = engine.speculation
    return (drafts.take_counts,), tokens_per_pass, drafts.history


def _location(num_critic: int, topology: Topology) -> RankLocation:
    rank, local_rank = topology.rank, int(os.environ.get("LOCAL_RANK", topology.rank))
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", topology.world_size))
    if num_critic:  # a separate critic's ranks may be on this node
        from megatron_rl.critic.link import local_policy_ranks

        on_node = local_policy_ranks(num_critic, rank, local_rank, on_node)
    return RankLocation(rank=rank, world_size=topology.world_size, local_rank=local_rank, local_world_size=on_node)


def unscored(rollouts: Sequence[Rollout]) -> list[Score]:
    """Return a Score for each rollout of a run without rewards; its total is 0, or None for an excluded rollout.

    A rollout is excluded if its environment gave it up.
    """
    return [Score(total=None if rollout.excluded else 0.0, by_function=()) for rollout in rollouts]


def _scorer(reward: Reward, watchdog: Watchdog) -> Callable[[Sequence[Rollout]], list[Score]]:
    """Return a function that scores rollouts; any thread may call it.

    The watchdog records a call in the main thread as the stage ``reward``. The watchdog's deadline
    bounds reward functions in this process; those in worker processes have deadlines of their own.
    """
    stage = watchdog.stage if reward.runs_apart else watchdog.own_code

    def score(rollouts: Sequence[Rollout]) -> list[Score]:
        if threading.current_thread() is not threading.main_thread():
            return reward.score(rollouts)
        with stage("reward"):
            return reward.score(rollouts)

    return score
