"""Builds a trainer and all its parts, and takes them down in order."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron_rl import hub
from megatron_rl.algorithm.signal import signal_rule
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.run_state import ResumePoint
from megatron_rl.config import Config, config_to_dict, config_to_yaml
from megatron_rl.critic import Critic, RemoteCritic, RewardModel, build_critic
from megatron_rl.critic.link import PolicyCriticLink, local_policy_ranks
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.distributed.agreement import this_job
from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.watchdog import Watchdog, open_watchdog
from megatron_rl.model.seam_fields import DTYPES
from megatron_rl.observability.metrics import MetricsWriter
from megatron_rl.observability.progress_bar import ProgressBar
from megatron_rl.observability.run_status import RunState, kept_status, write_status
from megatron_rl.observability.timer import StepTimer
from megatron_rl.observability.untrained import TrainingWatch
from megatron_rl.planning.num_steps import critic_steps_per_rollout, moving_rl_steps, steps_per_rollout, total_rl_steps
from megatron_rl.reward import Reward, opened_reward
from megatron_rl.rollout.build import RankLocation, place_engine, refuse_mixture
from megatron_rl.rollout.endpoint.agents import AgentEngine, with_agents
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.idle_engine import IdleEngine
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.multi_turn import with_environment
from megatron_rl.rollout.queue import RolloutQueue
from megatron_rl.rollout.serialization import check_packed
from megatron_rl.simulator.record import Recorder
from megatron_rl.trainer.announcement import announce
from megatron_rl.trainer.evaluation import Evaluation
from megatron_rl.trainer.reference_policy import ReferencePolicy
from megatron_rl.trainer.run_folder import (
    held_run_folder,
    on_every_rank,
    refuse_finished,
    repair_records,
    report_run,
    written_rows,
)
from megatron_rl.trainer.supervised import held_out_responses, start_supervised_optimizer
from megatron_rl.trainer.teacher import build_teacher
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.trainer.training_data import context_tokens, load_prompts
from megatron_rl.trainer.update import UpdatePlanner, passes_parts
from megatron_rl.types import Rollout, Score
from megatron_rl.validate import check_critic_model, check_lengths
from megatron_rl.weights.config_json import check_served, load_hf_config
from megatron_rl.weights.model_dtype import settle_dtype

log = logging.getLogger(__name__)


@contextlib.contextmanager
def build_trainer(config: Config, critic_link: PolicyCriticLink | None = None) -> Iterator[Trainer]:
    """Build a trainer and all its parts, restore the newest checkpoint if there is one, and take them down in order.

    critic_link: connects to the ranks of a separate critic.

    However the run ends, its report is written from the metrics so far. Raises ConfigError where the run's folder
    cannot be written or another run is in it.
    """
    with held_run_folder(config):
        hf_config = _read_model(config)
        config = settle_dtype(config, hf_config, on_gpu=HOST.is_cuda)
        tokenizer = load_tokenizer(config, hf_config.vocab_size)
        with (
            # first, since the functions say which columns the data must have
            opened_reward(config.reward, config.run.deadline_s, episodes=config.plays_episodes) as reward,
            _built(config, critic_link, hf_config, tokenizer, reward) as trainer,
        ):
            yield trainer


@contextlib.contextmanager
def _built(
    config: Config, critic_link: PolicyCriticLink | None, hf_config, tokenizer, reward: Reward | None
) -> Iterator[Trainer]:
    """Do the work of ``build_trainer`` within the run's folder, with the reward's workers started."""
    prompts = load_prompts(config, tokenizer, hf_config, reward.required_columns if reward else ())
    config = dataclasses.replace(config, data=prompts.data, sft=config.sft.settled(len(prompts)))
    rl_steps = total_rl_steps(config, len(prompts))
    this_job(deadline_s=config.run.deadline_s).wait_for_all(config.run.deadline_s)
    model = RewardModel if config.trains_reward_model else MegatronBackend
    backend = model(config, hf_config=hf_config, total_steps=moving_rl_steps(config, len(prompts)))
    is_main, folder = backend.topology.is_main, config.run.path
    critic = build_critic(config, rl_steps // steps_per_rollout(config) * critic_steps_per_rollout(config), critic_link)
    checkpoints = CheckpointManager(config, backend, critic)
    resume_point = _load_newest(checkpoints, backend, config, prompts)
    num_steps = config.sft.steps + rl_steps
    metrics_state = resume_point.state["metrics"] if resume_point else None
    with (
        _open_writer(config, num_steps, is_main, metrics_state) as writer,
        ProgressBar(
            num_steps,
            config.metrics.progress and is_main,
            config.metrics.untrained_warning_steps,
            done_steps=resume_point.state["backend"]["step_index"] if resume_point else 0,
            done_ghosts=metrics_state["ghost_steps"] if metrics_state else 0,
        ) as progress,
        kept_status(folder, num_steps, is_main=is_main, leaves=lambda: checkpoints.leaves),
    ):
        trainer = None
        try:
            with _open_watch(config, backend, progress) as watchdog:
                started = time.perf_counter()
                parts = (backend, critic, tokenizer, prompts, reward, checkpoints, watchdog, writer, progress)
                with watchdog.stage("start"):
                    trainer = _assemble(config, *parts)
                    if resume_point is not None:
                        trainer.resume(checkpoints.restore(resume_point))
                announce(trainer)
                yield trainer
                log.info(trainer.manager.summary(time.perf_counter() - started))
                checkpoints.close()
        finally:
            if trainer is not None:
                trainer.close()
            if is_main:
                report_run(folder, config_to_yaml(hub.with_names(config)))
        progress.finish(written_rows(folder) if is_main else [], folder / "report.html")
    if critic is not None:
        critic.close(preempted=checkpoints.leaves)
    backend.close()


def _read_model(config: Config):
    """Return the policy's Hugging Face config, checked against the engine and the lengths. Raises ConfigError."""
    hf_config = load_hf_config(config.model.hf_path, provider=config.model.provider)
    if config.generates:
        if config.rollout.engine == "vllm":
            check_served(config.model.hf_path, provider=config.model.provider)
        check_lengths(config, hf_config.max_position_embeddings)
    check_critic_model(config, hf_config)
    return hf_config


def _open_watch(
    config: Config, backend: MegatronBackend, progress: ProgressBar
) -> contextlib.AbstractContextManager[Watchdog]:
    say = progress.note if config.metrics.progress else log.info
    return open_watchdog(backend.topology, config.run.deadline_s, slow_stage_s=config.run.slow_stage_s, say=say)


def _open_writer(
    config: Config, num_steps: int, is_main: bool, resumed: Mapping[str, int | None] | None
) -> MetricsWriter:
    """Write config.yaml, and open the run's metrics and their sinks; all on the main rank. A collective.

    Raises ConfigError on every rank where a file cannot be written, or a sink cannot be opened.
    """
    folder = config.run.path
    with on_every_rank(folder):
        if is_main:
            replace_text(folder / "config.yaml", config_to_yaml(hub.with_names(config)))
            write_status(folder, RunState.RUNNING, num_steps)
            if resumed is not None:
                repair_records(folder)
        return MetricsWriter(folder, config.metrics, num_steps, is_main, resumed, config=config_to_dict(config))


def _load_newest(
    checkpoints: CheckpointManager, backend: MegatronBackend, config: Config, prompts: PromptDataset
) -> ResumePoint | None:
    """Load the newest good checkpoint, if there is one, and cut the run's records back to it. A collective."""

    def prepare(point: ResumePoint, broke_off: bool) -> None:
        if point.supervised_steps is not None:
            start_supervised_optimizer(backend, config)  # which takes the checkpoint's moments
        elif broke_off:
            backend.reset_optimizer(total_steps=moving_rl_steps(config, len(prompts)))

    point = checkpoints.load_newest(prepare, check_packed)
    if point is not None:
        refuse_finished(config, prompts, point.folder, point.state)
    with on_every_rank(config.run.path):
        checkpoints.cut_back(point)
    return point


def _assemble(
    config: Config,
    backend: MegatronBackend,
    critic: Critic | RemoteCritic | None,
    tokenizer,
    prompts: PromptDataset,
    reward: Reward | None,
    checkpoints: CheckpointManager,
    watchdog: Watchdog,
    writer: MetricsWriter,
    progress: ProgressBar,
) -> Trainer:
    """Build the parts that need the given ones, and the trainer of them all. Engines start here."""
    timer = StepTimer(watchdog.stage, writer.measured)
    with watchdog.own_call("loss"):  # which the rule tries at a zero advantage
        rule = signal_rule(config)
    if isinstance(backend, MegatronBackend):
        backend.objective.enter_own = watchdog.own_call
    reference = ReferencePolicy(config, backend)
    shape = backend.shape
    required = reward.required_columns if reward else ()
    evaluation = Evaluation(config, tokenizer, shape.context_tokens, shape.vocab_size, required=required)
    manager = _build_manager(config, backend, critic, tokenizer, reward, watchdog)
    rollouts = RolloutQueue(
        config,
        backend,
        manager,
        prompts,
        timer,
        passes_parts=passes_parts(config),
        passes_all=not rule.drops_logprob_passes,
        steps_per_rollout=steps_per_rollout(config),
    )
    return Trainer(
        config=config,
        backend=backend,
        critic=critic,
        tokenizer=tokenizer,
        prompts=prompts,
        reward=reward,
        manager=manager,
        rollouts=rollouts,
        rule=rule,
        reference=reference,
        teacher=build_teacher(config, backend),
        planner=UpdatePlanner(config, backend, rule, reference, timer),
        evaluation=evaluation,
        held_out=held_out_responses(
            config, prompts, tokenizer, context_tokens(config, backend.hf_config), shape.vocab_size
        ),
        checkpoints=checkpoints,
        recorder=Recorder(config, backend, resumed=checkpoints.resumes),
        watchdog=watchdog,
        timer=timer,
        writer=writer,
        progress=progress,
        watch=TrainingWatch(config.metrics.untrained_warning_steps),
        total_steps=moving_rl_steps(config, len(prompts)),
    )


def _build_manager(
    config: Config,
    backend: MegatronBackend,
    critic: Critic | RemoteCritic | None,
    tokenizer,
    reward: Reward | None,
    watchdog: Watchdog,
) -> RolloutManager:
    topology = backend.topology
    refuse_mixture(config, backend.shape.num_experts)
    rank, local_rank = topology.rank, int(os.environ.get("LOCAL_RANK", topology.rank))
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", topology.world_size))
    location = RankLocation(
        rank=rank,
        world_size=topology.world_size,
        local_rank=local_rank,
        local_world_size=local_policy_ranks(config, rank, local_rank, on_node),
    )
    engine, share, shared = _build_engine(config, location, tokenizer, backend.shape.vocab_size)
    with watchdog.own_call("environment"):  # is imported, or the agent is
        engine = with_environment(engine, config, tokenizer)
        engine = with_agents(engine, config, tokenizer, rank=rank, vocab_size=backend.shape.vocab_size)
    on_device: list[TrainableModel] = [backend, critic] if isinstance(critic, Critic) else [backend]
    bucket_bytes = config.weight_sync.bucket_bytes // 2  # the other half is the sender's
    alone = config.weight_sync.adapters == "alone"
    return RolloutManager(
        engine,
        _scorer(reward, watchdog) if reward else unscored,
        config,
        export=lambda: backend.export(bucket_bytes=bucket_bytes, merges=not alone),
        export_adapters=(lambda: backend.export_adapters(bucket_bytes=bucket_bytes)) if alone else None,
        version=lambda: backend.weight_version,
        share=share,
        offload=(lambda: [model.offload() for model in on_device]) if shared else None,
        restore=(lambda: [model.restore() for model in on_device]) if shared else None,
        score_apart=reward is not None and reward.runs_apart,
        take_counts=engine.take_counts if isinstance(engine, AgentEngine) else dict,
    )


def _build_engine(
    config: Config, location: RankLocation, tokenizer, vocab_size: int
) -> tuple[Engine, tuple[int, int] | None, bool]:
    """Return this rank's engine, its share of the prompts, and whether trainer and engine take turns on one GPU."""
    if not config.generates:
        return IdleEngine(), None, False
    return place_engine(
        config,
        tokenizer,
        location=location,
        device=HOST.device,
        dtype=DTYPES[config.model.dtype],
        vocab_size=vocab_size,
        has_trainer=True,
    )


def unscored(rollouts: Sequence[Rollout]) -> list[Score]:
    """Return a total of 0 for each rollout of a run without rewards; none for one that its environment gave up."""
    return [Score(total=None if rollout.excluded else 0.0, by_function=()) for rollout in rollouts]


def _scorer(reward: Reward, watchdog: Watchdog) -> Callable[[Sequence[Rollout]], list[Score]]:
    """Return a function that scores in any thread; the watchdog records its stage in the main thread alone.

    Calls in workers have deadlines of their own; one in this process is bounded by the watchdog.
    """
    stage = watchdog.stage if reward.runs_apart else watchdog.own_code

    def score(rollouts: Sequence[Rollout]) -> list[Score]:
        if threading.current_thread() is not threading.main_thread():
            return reward.score(rollouts)
        with stage("reward"):
            return reward.score(rollouts)

    return score
