"""A run's standing parts, wired: backend, engine, prompts, rewards, metrics. What the loop in train.py calls by name."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.algorithm.signal import signal_rule
from megatron_rl.backend.trainable_model import Batch, TrainableModel
from megatron_rl.checkpoint.manager import CheckpointManager, ResumePoint
from megatron_rl.config import Config, config_to_yaml
from megatron_rl.config.num_steps import critic_steps_per_rollout, moving_rl_steps, steps_per_rollout, total_rl_steps
from megatron_rl.critic import Critic, RemoteCritic, build_critic
from megatron_rl.critic.link import PolicyCriticLink, local_policy_ranks
from megatron_rl.data.prompt_dataset import PromptDataset, load_rows
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.watchdog import Watchdog, open_watchdog
from megatron_rl.model.build import DTYPES
from megatron_rl.observability.metrics import MetricsWriter, add_sums, divide, read_metrics, step_metrics
from megatron_rl.observability.progress_bar import ProgressBar
from megatron_rl.observability.report import write_report
from megatron_rl.observability.throughput import performance
from megatron_rl.observability.timer import StepTimer
from megatron_rl.reward import Reward
from megatron_rl.rollout.build import RankLocation, build_engine, refuse_sharing, role_of, shares_device
from megatron_rl.rollout.manager import RolloutManager, guard_logprob_gap
from megatron_rl.rollout.multi_turn import with_environment
from megatron_rl.rollout.queue import RolloutQueue
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.rollout.worker import to_sample
from megatron_rl.simulator.record import Recorder, TimedBackend
from megatron_rl.trainer.advantages import AdvantageResult, KLPenalty, critic_estimate, group_estimate, kl_penalty
from megatron_rl.trainer.corrections import CorrectedSignal, apply_corrections
from megatron_rl.trainer.evaluation import Evaluation
from megatron_rl.trainer.reference_policy import ReferencePolicy
from megatron_rl.types import Advantages, BatchPlan, Rollout, Sample, Score, StepPlan, StepResult
from megatron_rl.validate import check_critic_model, check_lengths

log = logging.getLogger(__name__)


class Trainer:
    """Everything a run holds. Methods are collectives unless they say otherwise."""

    def __init__(
        self, config: Config, backend: TimedBackend, tokenizer, writer: MetricsWriter, progress: ProgressBar, watch: Watchdog,
        checkpoints: CheckpointManager, found: ResumePoint | None, prompts: PromptDataset, critic: Critic | RemoteCritic | None = None,
    ):  # fmt: skip
        self.config = config
        self.backend = backend
        self.critic = critic
        self.tokenizer = tokenizer
        self.writer = writer
        self.progress = progress
        self.watch = watch
        self.clock = StepTimer(watch.stage)
        self.rule = signal_rule(config)
        self.reference = ReferencePolicy(config, backend)
        self.reward = Reward(config.reward) if config.reward.functions else None
        self.prompts = prompts
        self.evaluation = Evaluation(config, tokenizer, backend.shape.context_tokens)
        self.generation = self._generation()
        self.total_steps = moving_rl_steps(config, len(self.prompts))
        self.feed = RolloutQueue(
            config, backend, self.generation, self.prompts, passes_parts=config.correction.old_logprobs == "recompute",
            passes_all=not self.rule.drops_logprob_passes, steps_per_rollout=steps_per_rollout(config),
        )  # fmt: skip
        self.recorder = Recorder(config, backend, resumed=found is not None)
        self.checkpoints = checkpoints
        self.rollouts_done = checkpoints.restore(self, found)

    def _generation(self) -> RolloutManager:
        config, backend, spot = self.config, self.backend, self.backend.topology
        local = RankLocation(
            rank=spot.rank, world_size=spot.world_size, local_rank=int(os.environ.get("LOCAL_RANK", spot.rank)),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", spot.world_size)),
        )  # fmt: skip
        local = replace(local, local_world_size=local_policy_ranks(config, local.rank, local.local_rank, local.local_world_size))
        place = role_of(config, local)
        shared = shares_device(config, HOST.device)
        refuse_sharing(config, shared)
        engine = build_engine(
            config, self.tokenizer, seat=local, place=place, device=HOST.device, dtype=DTYPES[config.model.dtype],
            vocab_size=backend.shape.vocab_size,
        )  # fmt: skip
        engine = with_environment(engine, config, self.tokenizer)
        bucket_bytes = config.weight_sync.bucket_bytes // 2  # the other half is the sender's
        return RolloutManager(
            engine, self._score if self.reward else None, config, export=lambda: backend.export(bucket_bytes=bucket_bytes),
            version=lambda: backend.weight_version, share=place.share, offload=self._offload if shared else None,
            restore=self._restore if shared else None, score_apart=self.reward is not None and self.reward.runs_apart,
        )  # fmt: skip

    def _offload(self) -> None:
        for model in self._models():
            model.offload()

    def _restore(self) -> None:
        for model in self._models():
            model.restore()

    def _models(self) -> list[TrainableModel]:
        """Those whose memory is on this rank's device."""
        return [self.backend, self.critic] if isinstance(self.critic, Critic) else [self.backend]

    def _score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """In the main thread, or in one of its own; the watch tells of the main one's stages alone."""
        if threading.current_thread() is not threading.main_thread():
            return self.reward.score(rollouts)
        with self.watch.stage("reward"):
            return self.reward.score(rollouts)

    # ---- samples ---------------------------------------------------------------------------------------------------

    def supervised_samples(self, count: int) -> tuple[list[Sample], list[int], list[int]]:
        """This rank's share of ``count`` solutions, as rows, their groups and their places. Not a collective."""
        place = self.backend.topology
        drawn = self.prompts.next_solutions(count)
        mine = list(range(place.rank, count, place.world_size))
        samples = []
        for i in mine:
            given, tokens = drawn[i], len(drawn[i].response_ids)
            rollout = Rollout(
                prompt=given.prompt, sample_index=0, response_ids=given.response_ids, logprobs=(0.0,) * tokens, text="",
                finish_reason="stop", weight_versions=((self.backend.weight_version, tokens),), loss_mask=given.loss_mask,
            )  # fmt: skip
            samples.append(to_sample(rollout, included=True))
        return samples, mine, mine

    # ---- advantages ------------------------------------------------------------------------------------------------

    def kl_penalty(self, intake: TrainingBatch, index: int) -> KLPenalty | None:
        """The KL in the reward, after passes over every sample; None where it is not asked for."""
        if not self.reference.is_needed or self.reference.in_loss:
            return None
        everything = np.ones(intake.batch.facts.num_samples, dtype=bool)
        with self.clock.measure("logprob"):
            old, metrics = self.old_logprobs(intake, everything, index)
            reference = self.reference.logprobs(intake.batch, everything)
        found = kl_penalty(
            old, reference, self.backend.gather_loss_mask(intake.batch), estimator=self.config.loss.kl_estimator,
            coefficient=self.reference.coefficient, num_samples=len(everything), metrics=metrics,
        )  # fmt: skip
        if not self.holds_policy(index):  # β moves by what the policy is trained with
            self.reference.count(found.kl, found.tokens)
        return found

    def estimate(self, intake: TrainingBatch, paid: KLPenalty | None) -> AdvantageResult:
        """Advantages of a rollout: those of its rewards alone, where nothing else is asked for."""
        if self.critic is None and paid is None:
            return AdvantageResult(advantages=Advantages(of_sample=intake.advantages))
        mask, penalties = self.backend.gather_loss_mask(intake.batch), None if paid is None else paid.penalties
        if self.critic is None:
            return group_estimate(self.config, intake.batch.facts, intake.totals, penalties, mask)
        with self.clock.measure("critic"):
            values = self.critic.values(intake.batch)
        return critic_estimate(self.config, intake.batch.facts, intake.totals, values, penalties, mask)

    def holds_policy(self, index: int) -> bool:
        """Whether rollout ``index`` trains the critic alone. Not a collective."""
        return self.critic is not None and index < self.config.critic.warmup_rollouts

    def train_critic(self, batch: Batch, estimate: AdvantageResult) -> dict[str, float]:
        """The critic's steps of a rollout; {} without one."""
        if self.critic is None:
            return {}
        with self.clock.measure("critic"):
            return self.critic.train(batch, estimate.returns.astype(np.float32), estimate.values)

    # ---- log-probs and the loss ------------------------------------------------------------------------------------

    def old_logprobs(self, intake: TrainingBatch, trained: np.ndarray, index: int) -> tuple[np.ndarray, dict[str, float]]:
        """(π_old flat [T], metrics), after a pass over what is not known yet.

        trained: [S] bool, what the training plan runs; all samples are passed where the skip does not cover these passes.
        Every ``metrics.dense_every_rollouts`` rollouts a few dropped samples are passed too, for the metrics alone. Under
        ``correction.old_logprobs=rollout`` only those are passed, and π_old is the engine's own; so it is for replayed groups without
        ``replay.recompute_logprobs``.
        """
        config, batch = self.config, intake.batch
        from_engine = np.full_like(trained, config.correction.old_logprobs == "rollout")
        if not config.replay.recompute_logprobs:
            from_engine |= intake.replayed
        wanted = (trained if self.rule.drops_logprob_passes else np.ones_like(trained)) & ~from_engine
        if config.metrics.dense_every_rollouts and index % config.metrics.dense_every_rollouts == 0:
            wanted[np.flatnonzero(~wanted)[: config.metrics.dense_samples]] = True
        covered = wanted | intake.known
        passed = self.backend.logprobs(batch, wanted & ~intake.known)
        sums = add_sums(intake.sums, passed.sums)
        self.guard_logprob_gap(sums, fresh=intake.is_fresh)
        metrics = {"logprob/coverage": float(covered.mean()), **divide(sums)}
        old = np.where(np.repeat(intake.known, batch.facts.response_tokens), intake.old, passed.flat)
        if from_engine.any():
            old = np.where(np.repeat(from_engine, batch.facts.response_tokens), self.backend.gather_rollout_logprobs(batch), old)
        return old, metrics

    def guard_logprob_gap(self, sums: Mapping[str, float], *, fresh: bool) -> None:
        """See generation.guard_logprob_gap; the sums are those of all ranks. Not a collective."""
        guard_logprob_gap(sums, self.config.rollout, self.config.model.dtype, fresh=fresh)

    def reference_logprobs(self, batch: Batch, trained: np.ndarray) -> np.ndarray | None:
        """log π_ref, flat, of the samples that the training plan will run; None without a KL."""
        if not self.reference.is_needed:
            return None
        return self.reference.logprobs(batch, trained if self.rule.drops_logprob_passes else np.ones_like(trained))

    def apply_corrections(self, batch: Batch, advantages: Advantages, signal: np.ndarray, passed: np.ndarray, old: np.ndarray | None) -> CorrectedSignal:
        """See verdict.decide. passed bool [S]: the samples whose ``old`` log-probs are known."""
        return apply_corrections(
            self.config.correction, self.backend, batch, advantages=advantages, signal=signal, passed=passed, old_logprobs=old,
            advantage_epsilon=self.rule.advantage_epsilon,
        )  # fmt: skip

    # ---- evaluation and export -------------------------------------------------------------------------------------

    def evaluate(self, *, suffix: str = "") -> dict[str, float]:
        """The held-out sets under the current weights, as metrics; {} without a set, or without rewards."""
        if not self.evaluation.sets or self.reward is None:
            return {}
        with self.watch.stage("eval"):
            return self.evaluation.run(self.generation, step=self.backend.step_index, suffix=suffix)

    def export(self, index: int, *, last: bool) -> None:
        """Writes the policy as a Hugging Face directory under checkpoints/step_<n>/hf where the configuration asks for it."""
        given = self.config.train
        if (last and given.export_last) or (given.export_every_rollouts and index % given.export_every_rollouts == 0):
            path = self.config.run.path / "checkpoints" / f"step_{self.backend.step_index}" / "hf"
            with self.watch.stage("export"):
                self.backend.save_hugging_face(path, self.tokenizer)
            log.info("policy written to %s", path)

    # ---- what is written -------------------------------------------------------------------------------------------

    def write(self, phase: str, result: StepResult, values: Mapping[str, float]) -> None:
        """One row of metrics.jsonl per optimizer step, and coefficients.json as of it."""
        row = {"step": self.backend.step_index, "step_kind": result.kind, "phase": phase, **step_metrics(result), **values}
        row["weight_version"] = self.backend.weight_version
        if self.reference.is_needed:
            row["train/kl_coefficient"] = self.reference.coefficient
        unmeasured = ["train/clip_ratio", "train/ratio", "train/kl", "train/kl_coefficient"] if phase == "warmup" else []
        if not self.reference.is_needed:
            unmeasured.append("train/kl")
        row = {name: value for name, value in row.items() if name not in unmeasured}
        self.progress.update(self.writer.write(row))
        self.recorder.fit()

    def save_plan(self, plan: BatchPlan, index: int) -> None:
        if self.config.metrics.save_plans and self.backend.topology.is_main:
            folder = self.config.run.path / "plans"
            folder.mkdir(exist_ok=True)
            (folder / f"rollout_{index + 1}.json").write_text(plan.to_json())

    def performance(self, batch: Batch, mini_batch: StepPlan) -> dict[str, float]:
        """``perf/*`` and ``cost/*`` of the step in progress. Not a collective."""
        return performance(self.backend, batch.facts, mini_batch, self.clock.seconds["update"])


def announce(run: Trainer) -> None:
    """What was chosen, in the log: Adam's kernel, layer spec, topology, and what the skip approximates."""
    place, shape = run.backend.topology, run.backend.shape
    log.info(
        "world %d: %s on %s (%s); layers by %s; Adam by %s", place.world_size, place.degrees, HOST.device_type, HOST.backend,
        shape.layer_spec, run.backend.optimizer.kernel,
    )  # fmt: skip
    for term in run.rule.approximated:
        log.warning("skip.mode=approximate: dropped samples lose what %s would have given them", term)
    if run.rule.kl_in_reward and run.rule.drops and run.config.skip.logprob_passes:
        log.warning("reference.kl_in=reward makes advantages of log-probs: skip.logprob_passes turns itself off, every sample is passed")
    if run.config.correction.old_logprobs == "rollout":
        log.warning("correction.old_logprobs=rollout: the trainer-engine gap is measured on the dense samples alone")
    if run.config.rollout.producer.ahead or run.config.weight_sync.interval_steps > 1:
        log.info("rollouts may come from older weights: rollout.max_logprob_gap guards those of the trainer's own, the first among them")
    if run.config.advantage.whiten == "center_and_scale" and run.config.advantage.estimator in ("reinforce_plus_plus", "gdpo"):
        log.warning("advantage.whiten=center_and_scale moves every group off zero: nothing will be dropped")


@contextlib.contextmanager
def build_trainer(config: Config, bridge: PolicyCriticLink | None = None) -> Iterator[Trainer]:
    """Builds everything, and takes it down in order; the report is written however the run ends, from what it has. bridge: to the ranks
    of a separate critic."""
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(config.model.hf_path)
    check_lengths(config, hf_config.max_position_embeddings)
    tokenizer = load_tokenizer(config)
    prompts = PromptDataset(load_rows(config.data.train), tokenizer, config.data, config.run.seed, hf_config.max_position_embeddings)
    rl_steps = total_rl_steps(config, len(prompts))
    check_critic_model(config, hf_config)
    backend = TimedBackend(config, hf_config=hf_config, total_steps=moving_rl_steps(config, len(prompts)))
    is_main, folder = backend.topology.is_main, config.run.path
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(config_to_yaml(config))
    critic = build_critic(config, rl_steps // steps_per_rollout(config) * critic_steps_per_rollout(config), bridge)
    checkpoints = CheckpointManager(config, backend, critic)
    found = checkpoints.find()
    checkpoints.cut_back(found)
    resumed = found.state["metrics"] if found else None
    steps = config.sft.steps + rl_steps
    metrics_path, report_path = folder / "metrics.jsonl", folder / "report.html"
    with (
        MetricsWriter(folder, config.metrics, steps, is_main, resumed) as writer,
        ProgressBar(steps - (found.state["backend"]["step_index"] if found else 0), config.metrics.progress and is_main) as progress,
    ):
        run = None
        try:
            with open_watchdog(backend.topology, config.run.deadline_s) as watch:
                started = time.perf_counter()
                run = Trainer(config, backend, tokenizer, writer, progress, watch, checkpoints, found, prompts, critic)
                announce(run)
                yield run
                log.info(run.generation.summary(time.perf_counter() - started))
                checkpoints.close()
        finally:
            if run is not None:
                if run.reward is not None:
                    run.reward.close()
                run.generation.close()
            writer.close()
            if is_main and pathlib.Path(metrics_path).stat().st_size:
                write_report(metrics_path, config_to_yaml(config), report_path)
        progress.finish(read_metrics(metrics_path) if is_main else [], report_path)
    if critic is not None:
        critic.close(preempted=checkpoints.leaves)
    backend.close()
