"""The log messages at a run's start: its devices and kernels, and the less obvious effects of its settings."""

from __future__ import annotations

import logging

from megatron_rl.algorithm.sharing import sharing_refusal
from megatron_rl.algorithm.signal import SignalRule
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.config import Config, TrainConfig
from megatron_rl.distributed.cuda_environment import added_variables
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.requirements import compiler_fault
from megatron_rl.errors import quoted
from megatron_rl.model.logprob.chunks import settled_kernel
from megatron_rl.model.parts import parts_of
from megatron_rl.model.settings import ModelSettings
from megatron_rl.reward import Reward
from megatron_rl.trainer.passes.old_logprobs import needs_old_logprobs
from megatron_rl.weights.config_json import ignored_fields

log = logging.getLogger(__name__)


def announce(
    config: Config, backend: TrainableModel, rule: SignalRule, reward: Reward | None, *, num_prompts: int
) -> None:
    """Log the chosen topology, layers and kernels, and the less obvious effects of the run's settings.

    rule: says which samples the run drops.
    reward: the reward functions; None in a run without them.
    num_prompts: the number of training prompts.
    """
    topology, shape = backend.topology, backend.shape
    # The model, and the topology and kernels that it runs on.
    if ignored := ignored_fields(config.model.hf_path):
        said = ", ".join(f"{name}={quoted(value)}" for name, value in ignored.items())
        log.warning("%s/config.json sets fields that are not read here: %s", config.model.hf_path, said)
    log.info(
        "world %d: %s on %s (%s), %s; layers by %s; log-probs by %s; Adam by %s",
        topology.world_size,
        topology.degrees,
        HOST.device_type,
        HOST.backend,
        config.model.dtype,
        shape.layer_spec,
        settled_kernel(parts_of(ModelSettings.of(config)).logprob_kernel, HOST.device_type),
        backend.optimizer.kernel,
    )
    if config.optimizer.algorithm == "muon":
        log.info("weight matrices are stepped by Muon (momentum %g), all else by AdamW", config.optimizer.momentum)
    if len(set(shape.stage_layers)) > 1:
        chosen = "parallel.pipeline_layout" if config.parallel.pipeline_layout else "chosen to balance them"
        log.info("layers of each pipeline stage: %s (%s)", ", ".join(map(str, shape.stage_layers)), chosen)
    # Settings whose effects may surprise.
    announce_gpu(config.model.dtype)
    _announce_rewards(config, reward)
    refusal = sharing_refusal(config.parallel, config.megatron, shape.layer_spec)
    if config.plan.share_prompts is None and refusal:
        log.info("plan.share_prompts=null: prompts are not shared, since %s", refusal)
    _announce_asked_again(config.train, num_prompts)
    if config.sft.steps and config.rollout.temperature != 1.0:
        log.warning(
            "rollout.temperature=%g divides the logits of supervised steps too: log-probs are taken at the "
            "sampling temperature; set it to 1 to imitate the data as they are",
            config.rollout.temperature,
        )
    for term in rule.approximated:
        log.warning("skip.mode=approximate: a dropped sample gets no gradient from %s", term)
    if rule.kl_in_reward and rule.drops and config.skip.logprob_passes:
        log.warning("skip.logprob_passes turns itself off: reference.kl_in=reward needs every sample's log-probs")
    if (needed := needs_old_logprobs(config)) and config.correction.old_logprobs == "auto":
        log.info("every sample that is trained is passed for its old log-probs, the first step's too: %s", needed)
    if config.correction.old_logprobs == "rollout":
        log.warning("correction.old_logprobs=rollout: the trainer-engine gap is measured on the dense samples alone")
    if config.rollout.producer.ahead or config.weight_sync.interval_steps > 1:
        log.info(
            "rollouts may come from older weights: rollout.max_logprob_gap guards those of the trainer's own, the "
            "first among them"
        )
    if config.advantage.whiten == "center_and_scale" and config.advantage.estimator in ("reinforce_plus_plus", "gdpo"):
        log.warning("advantage.whiten=center_and_scale moves every group off zero: nothing will be dropped")


def _announce_rewards(config: Config, reward: Reward | None) -> None:
    """Log how the user's functions are called; warn of settings under which early ends change the expected gradient."""
    for sentence in reward.recognised if reward is not None else ():
        log.info("%s", sentence)
    if config.reward.decided is not None:
        from megatron_rl.algorithm.early_ends import changed_terms

        for term in changed_terms(config):
            log.warning("reward.decided ends samples early, which changes the expected gradient under %s", term)


def _announce_asked_again(train: TrainConfig, num_prompts: int) -> None:
    """Warn if a rollout asks for more prompts than the data has."""
    per_rollout = train.prompts_per_rollout
    if train.num_rollouts != 0 and per_rollout > num_prompts:
        log.warning(
            "WARNING: train.prompts_per_rollout=%d and data.train has %d prompts: each rollout asks prompts %.3g "
            "times, as groups of their own; lower it to %d at most, or give more data",
            per_rollout,
            num_prompts,
            per_rollout / num_prompts,
            num_prompts,
        )


def announce_gpu(dtype: str) -> None:
    """Log the environment variables that were set for a GPU; warn of a missing compiler and of float32.

    Both make a GPU slower. On a CPU it logs nothing.

    dtype: ``model.dtype``.
    """
    if not HOST.is_cuda:
        return
    if added := added_variables():
        log.info("added to the environment: %s", " ".join(f"{name}={value}" for name, value in added.items()))
    if fault := compiler_fault():
        log.warning(
            "%s, so that log-probs and SwiGLU run by torch's plain operations, slower; install triton, a C compiler "
            "(gcc) and Python's headers (python3-dev)",
            fault,
        )
    if dtype == "float32":
        log.warning(
            "model.dtype=float32: matrix products run on an H100 at a tenth and less of bfloat16's speed, and without "
            "Transformer Engine; set model.dtype=bfloat16 unless you compare numbers"
        )
