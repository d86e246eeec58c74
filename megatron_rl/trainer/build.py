"""The construction of a run with all its objects, and their closing in order."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl import hub
from megatron_rl.algorithm.signal import signal_rule
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.run_state import ResumePoint
from megatron_rl.config import (
    Config,
    CriticConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    config_to_dict,
    config_to_yaml,
)
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.distributed.agreement import this_job
from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.watchdog import Watchdog, open_watchdog
from megatron_rl.observability.metrics import MetricsWriter
from megatron_rl.observability.progress_bar import ProgressBar
from megatron_rl.observability.run_status import RunState, kept_status, write_status
from megatron_rl.observability.timer import StepTimer
from megatron_rl.planning.num_steps import critic_steps_per_rollout, moving_rl_steps, steps_per_rollout, total_rl_steps
from megatron_rl.reward import Reward, opened_reward
from megatron_rl.trainer.announcement import announce
from megatron_rl.trainer.critic_part import joined_critic, models_here
from megatron_rl.trainer.parts import PartChooser
from megatron_rl.trainer.passes.old_logprobs import needs_old_logprobs, passes_parts
from megatron_rl.trainer.rollouts import build_manager, build_queue
from megatron_rl.trainer.run import Run
from megatron_rl.trainer.run_folder import (
    held_run_folder,
    on_every_rank,
    refuse_finished,
    repair_records,
    report_run,
    written_rows,
)
from megatron_rl.trainer.standing_parts import StandingParts
from megatron_rl.trainer.training_data import load_prompts
from megatron_rl.validate import check_critic_model, check_lengths, check_profile
from megatron_rl.weights.config_json import check_served, load_hf_config
from megatron_rl.weights.model_dtype import settle_dtype

if TYPE_CHECKING:
    from megatron_rl.critic import Critic, RemoteCritic
    from megatron_rl.critic.link import PolicyCriticLink

log = logging.getLogger(__name__)


@contextlib.contextmanager
def build_run(config: Config) -> Iterator[Run]:
    """Yield a run with all its objects, restored from the newest checkpoint if there is one; close them afterwards.

    However the run ends, its report is written from the metrics so far. Raises ConfigError if the
    run's folder cannot be written or another run uses it.
    """
    with (
        joined_critic(config.separate_critic_ranks, config.run.deadline_s) as critic_link,
        held_run_folder(config.run.path, config.run.deadline_s),
        _held_store(config),
    ):
        hf_config = _read_model(
            config.model, config.data, config.rollout, config.trained_critic, generates=config.generates
        )
        config = dataclasses.replace(config, model=settle_dtype(config.model, hf_config, on_gpu=HOST.is_cuda))
        tokenizer = load_tokenizer(config.model, hf_config.vocab_size)
        # The reward functions come first: they say which columns the data must have.
        with opened_reward(config.reward, config.run.deadline_s, episodes=config.plays_episodes) as reward:
            prompts = load_prompts(
                config.data,
                config.sft,
                config.preference,
                config.environment,
                config.run.seed,
                tokenizer,
                hf_config,
                reward.required_columns if reward else (),
            )
            config = dataclasses.replace(config, data=prompts.data, sft=config.sft.settled(len(prompts)))
            builder = RunBuilder(
                config=config, hf_config=hf_config, tokenizer=tokenizer, prompts=prompts, reward=reward
            )
            with builder.built(critic_link) as run:
                yield run


def _held_store(config: Config) -> contextlib.AbstractContextManager[None]:
    """Return a context that holds the lock of the run's object store; without such a store it does nothing."""
    root = config.checkpoint.root(config.run.path)
    if isinstance(root, pathlib.Path) or not config.saves_checkpoints:
        return contextlib.nullcontext()
    from megatron_rl.checkpoint.remote_lock import held_store

    return held_store(root, is_first=this_job(deadline_s=config.run.deadline_s).rank == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBuilder:
    """Builds a run from loaded data, after the caller locked the run's folder and started the reward workers.

    config:    the complete settings: defaults that depend on the model's files or the data are filled
               in.
    hf_config: the policy's Hugging Face config.
    reward:    the started reward functions; None without reward functions.
    """

    config: Config
    hf_config: object
    tokenizer: object
    prompts: PromptDataset
    reward: Reward | None

    @contextlib.contextmanager
    def built(self, critic_link: PolicyCriticLink | None) -> Iterator[Run]:
        """Yield the run; close it after the ``with`` block. ``critic_link``: the link to a separate critic, or None."""
        config, prompts = self.config, self.prompts
        rl_steps = total_rl_steps(config.train, config.rollout, config.skip, len(prompts))
        job = this_job(deadline_s=config.run.deadline_s)
        check_profile(config.profile, job.size, on_gpu=HOST.is_cuda)
        job.wait_for_all(config.run.deadline_s)
        backend = self._model()
        is_main, folder = backend.topology.is_main, config.run.path
        critic = self._critic(rl_steps, critic_link)
        checkpoints = CheckpointManager(
            *(backend, critic, config.checkpoint),
            run_path=folder,
            hf_path=config.model.hf_path,
            supervised_every=config.sft.save_every_steps,
            saves=config.saves_checkpoints,
            written_config=config_to_dict(config),
        )
        resume_point = self._load_newest(checkpoints, backend)
        num_steps = config.sft.steps + rl_steps
        metrics_state = resume_point.state["metrics"] if resume_point else None
        # These are closed in reverse order when the block ends.
        with (
            self._open_writer(num_steps, is_main, metrics_state) as writer,
            ProgressBar(
                num_steps,
                config.metrics.progress and is_main,
                config.metrics.untrained_warning_steps,
                done_steps=resume_point.state["backend"]["step_index"] if resume_point else 0,
                done_ghosts=metrics_state["ghost_steps"] if metrics_state else 0,
            ) as progress,
            kept_status(folder, num_steps, is_main=is_main, leaves=lambda: checkpoints.leaves),
        ):
            with self._closing(is_main=is_main) as opened, self._open_watch(backend, progress) as watchdog:
                started = time.perf_counter()
                standing = StandingParts(
                    config=config,
                    backend=backend,
                    tokenizer=self.tokenizer,
                    prompts=prompts,
                    reward=self.reward,
                    checkpoints=checkpoints,
                    resume_point=resume_point,
                    writer=writer,
                    progress=progress,
                )
                with watchdog.stage("start"):
                    run = _profiled(_assemble(standing, critic, watchdog), config, critic, num_steps)
                    opened.append(run)
                    if resume_point is not None:
                        run.checkpoints.restore(checkpoints.restore(resume_point))
                announce(config, backend, run.planner.rules.signal, self.reward, num_prompts=len(prompts))
                yield run
                log.info(run.queue.manager.summary(time.perf_counter() - started))
                checkpoints.close()
            progress.finish(written_rows(folder) if is_main else [], folder / "report.html")
        if critic is not None:
            critic.close(preempted=checkpoints.leaves)
        backend.close()

    @contextlib.contextmanager
    def _closing(self, *, is_main: bool) -> Iterator[list[Run]]:
        """Yield an empty list, to which the ``with`` block adds its run; after the block, close that run.

        The main rank then writes the run's report. Not a collective.

        is_main: whether this is the main rank.
        """
        opened: list[Run] = []
        try:
            yield opened
        finally:
            for run in opened:
                run.records.end()
                if self.reward is not None:
                    self.reward.close()
                run.queue.manager.close()
            if is_main:
                report_run(self.config.run.path, config_to_yaml(hub.with_names(self.config)))

    def _model(self) -> TrainableModel:
        """Build the model that the run trains: the policy, or a reward model. A collective."""
        total_steps = self._moving_steps()
        if not self.config.trains_reward_model:
            return MegatronBackend(self.config, hf_config=self.hf_config, total_steps=total_steps)
        from megatron_rl.critic import RewardModel

        return RewardModel(self.config, hf_config=self.hf_config, total_steps=total_steps)

    def _moving_steps(self) -> int:
        config = self.config
        return moving_rl_steps(config.train, config.rollout, config.skip, config.trained_critic, len(self.prompts))

    def _critic(self, rl_steps: int, link: PolicyCriticLink | None) -> Critic | RemoteCritic | None:
        """Build the run's critic, after its policy; return None if the estimator needs no critic. A collective.

        rl_steps: the number of RL's optimizer steps in the whole run.
        link: the link to a separate critic's ranks; None if the policy's ranks hold the critic.
        """
        config = self.config
        if not config.has_critic:
            return None
        from megatron_rl.critic import Critic, RemoteCritic

        num_rollouts = rl_steps // steps_per_rollout(config.train, config.rollout, config.skip)
        total_steps = num_rollouts * critic_steps_per_rollout(config.train, config.rollout, config.critic)
        return Critic(config, total_steps=total_steps) if link is None else RemoteCritic(link, total_steps=total_steps)

    def _open_watch(
        self, backend: TrainableModel, progress: ProgressBar
    ) -> contextlib.AbstractContextManager[Watchdog]:
        run = self.config.run
        say = progress.note if self.config.metrics.progress else log.info
        return open_watchdog(backend.topology, run.deadline_s, slow_stage_s=run.slow_stage_s, say=say)

    def _open_writer(self, num_steps: int, is_main: bool, resumed: Mapping[str, int | None] | None) -> MetricsWriter:
        """Write config.yaml; return the writer of metrics.jsonl and of trackers such as TensorBoard. A collective.

        The main rank alone opens files and trackers. Raises ConfigError on every rank if a file
        cannot be written or a tracker cannot be opened.

        num_steps: the optimizer steps of the whole run.
        resumed: the writer's state in the checkpoint; None if the run does not resume.
        """
        config, folder = self.config, self.config.run.path
        with on_every_rank(folder):
            if is_main:
                replace_text(folder / "config.yaml", config_to_yaml(hub.with_names(config)))
                write_status(folder, RunState.RUNNING, num_steps)
                if resumed is not None:
                    repair_records(folder)
            return MetricsWriter(folder, config.metrics, num_steps, is_main, resumed, config=config_to_dict(config))

    def _load_newest(self, checkpoints: CheckpointManager, backend: TrainableModel) -> ResumePoint | None:
        """Load the newest undamaged checkpoint, and remove what the run recorded after it. A collective.

        Returns the state to resume from; None if there is no checkpoint.
        """
        config, prompts = self.config, self.prompts

        def prepare(point: ResumePoint, broke_off: bool) -> None:
            if point.supervised_steps is not None:
                from megatron_rl.trainer.supervised import start_supervised_optimizer

                start_supervised_optimizer(
                    backend, config.sft, config.optimizer
                )  # its state is then loaded from the checkpoint
            elif broke_off:
                backend.reset_optimizer(total_steps=self._moving_steps())

        point = checkpoints.load_newest(prepare, _check_packed)
        if point is not None:
            asked = config_to_dict(config)
            refuse_finished(config.run.path, config.train, asked, prompts, point.folder, point.state)
        with on_every_rank(config.run.path):
            checkpoints.cut_back(point)
        return point


def _read_model(
    model: ModelConfig, data: DataConfig, rollout: RolloutConfig, critic: CriticConfig | None, *, generates: bool
):
    """Return the policy's Hugging Face config.

    generates: whether the run samples from an engine. Then the engine and the token limits of prompt
        and response are checked too.

    Raises ConfigError if the engine, these limits or the critic do not fit the model.
    """
    hf_config = load_hf_config(model.hf_path, provider=model.provider)
    if generates:
        if rollout.engine == "vllm":
            check_served(model.hf_path, provider=model.provider)
        check_lengths(data, rollout, hf_config.max_position_embeddings)
    check_critic_model(critic, data, rollout, hf_config, model.hf_path)
    return hf_config


def _check_packed(data: bytes) -> None:
    from megatron_rl.rollout.groups.serialization import check_packed

    check_packed(data)


def _profiled(run: Run, config: Config, critic: Critic | RemoteCritic | None, num_steps: int) -> Run:
    """Return a run that also records a profile of the steps ``profile.steps``; ``run`` itself if there are none.

    critic: the run's critic; None without one.
    num_steps: the optimizer steps of the whole run.
    """
    if config.profile.steps is None:
        return run
    from megatron_rl.trainer.profiled_run import profiled

    return profiled(run, config.profile, models_here(run.backend, critic), config.run.path, num_steps)


def _assemble(standing: StandingParts, critic: Critic | RemoteCritic | None, watchdog: Watchdog) -> Run:
    """Build the objects that ``standing`` lacks, start the engines, and return the run made of all of them.

    standing: the objects that exist before the engines start, such as model, data and rewards.
    watchdog: the watchdog to which each stage of the run is reported.
    """
    config, backend, reward, prompts = standing.config, standing.backend, standing.reward, standing.prompts
    tokenizer, timer = standing.tokenizer, StepTimer(watchdog.stage, standing.writer.measured)
    # The parts that the engines and the queue need.
    with watchdog.own_call("loss"):  # the signal rule tries the user's loss at a zero advantage
        rule = signal_rule(config)
    if isinstance(backend, MegatronBackend):
        backend.objective.enter_own = watchdog.own_call
    parts = PartChooser(config=config, backend=backend, rule=rule, timer=timer, watchdog=watchdog)
    reference, evaluation, live = parts.reference(), standing.evaluation(), standing.live(watchdog)
    manager = build_manager(config, backend, tokenizer, reward, watchdog, models=models_here(backend, critic))
    rollouts = build_queue(
        config,
        backend,
        manager,
        prompts,
        timer,
        passes_parts=passes_parts(
            config.correction,
            config.rollout.routing_replay,
            needs_old_logprobs(config),
            steps_per_rollout(config.train, config.rollout, config.skip),
        ),
        passes_all=not rule.drops_logprob_passes,
    )
    if live is not None:
        live.queue = rollouts
    # The parts that need the queue.
    planner, records = parts.planner(reference), standing.records(rollouts, reference)
    return Run(
        backend=backend,
        queue=rollouts,
        passes=parts.passes(critic, reference, planner.old),
        advantages=parts.advantages(reference),
        planner=planner,
        critic=parts.critic(critic),
        reference=reference,
        records=records,
        timer=timer,
        exports=standing.exports(rollouts, timer),
        evaluation=evaluation,
        checkpoints=standing.run_checkpoints(rollouts, reference, records, timer),
        start=standing.start(rule, timer),
        evaluates_first=evaluation is not None and standing.evaluates_first and evaluation.due_at_start(),
        rollouts_done=standing.rollouts_done,
    )
