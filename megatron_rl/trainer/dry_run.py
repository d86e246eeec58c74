"""The dry run: a run's checks before its first step, and its forecast, without process groups and without a model."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import logging
import os
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.algorithm.signal import refuse_uncounted_losses
from megatron_rl.backend.optimizer import megatron_config
from megatron_rl.backend.teacher_weights import look_at_teacher
from megatron_rl.checkpoint.foresight import foresee_resume
from megatron_rl.checkpoint.resume import identity_of_shape
from megatron_rl.config import Config, LoraConfig, MetricsConfig, RolloutConfig, WeightSyncConfig, config_to_dict
from megatron_rl.data.columns import RequiredColumn
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.solution import Solution
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.distributed.time_limit import time_limit
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.hub.fetch import lacks_weights
from megatron_rl.model.build import settled_shape, transformer_config
from megatron_rl.model.hf_config import model_shape, read_shape
from megatron_rl.model.parts import parts_of
from megatron_rl.model.routing_replay import check_routing_replay
from megatron_rl.model.settings import ModelSettings
from megatron_rl.observability.sinks import require_prometheus
from megatron_rl.planning.num_steps import moving_rl_steps, total_rl_steps
from megatron_rl.reward import opened_reward
from megatron_rl.rollout.endpoint.agents import agent_of
from megatron_rl.rollout.engines.embedded import check_embedded, stop_tokens
from megatron_rl.rollout.engines.multi_turn import environment_parts
from megatron_rl.rollout.engines.placement import (
    RankLocation,
    refuse_delta,
    refuse_mixture,
    refuse_sharing,
    role_of,
    shares_device,
)
from megatron_rl.rollout.vllm.arguments import adapter_arguments, delta_arguments
from megatron_rl.rollout.vllm.build import weight_channel
from megatron_rl.simulator.command import simulate_job
from megatron_rl.simulator.degrees import Degrees, degrees_of
from megatron_rl.simulator.job_size import JobSize, job_size, say_if_assumed
from megatron_rl.simulator.workload import Workload, of_responses
from megatron_rl.trainer.evaluation import Evaluation
from megatron_rl.trainer.run_folder import look_at_run_folder, refuse_finished
from megatron_rl.trainer.supervised import held_out_responses, next_responses
from megatron_rl.trainer.training_data import context_tokens, load_prompts
from megatron_rl.validate import beyond_the_end, check_critic_model, check_lengths, check_profile
from megatron_rl.validate.critic import critic_config, policy_ranks, teacher_config
from megatron_rl.weights.config_json import check_served, load_hf_config
from megatron_rl.weights.model_dtype import settle_dtype
from megatron_rl.weights.reader import HuggingFaceReader, check_tensors

log = logging.getLogger(__name__)

MAX_PROMPTS = 4096  # the forecast takes the lengths of so many prompts
ONLY_ON_GPUS = ("attention_dropout", "hidden_dropout")  # fields that a start on a host without a GPU refuses


def dry_run(config: Config, arguments: argparse.Namespace) -> None:
    """Make the checks of a run before its first step, and print the forecast of its optimizer steps.

    It joins no process group and builds no model.

    arguments: the command-line arguments of the simulator (simulator/arguments.py).

    Raises ConfigError as training would, and if the job does not fit on its GPUs. That error names
    what would make it fit.
    """
    nodes, gpus_per_node = arguments.nodes, arguments.gpus_per_node
    size = say_if_assumed(job_size(config, nodes, gpus_per_node, host_gpus=torch.cuda.device_count()))
    checks = DryRun(config=config, size=size, elsewhere=arguments.nodes is not None)
    if config.generates:
        checks.check_engine()
    prompt_lengths, responses = checks.check_inputs()
    checks.check_models()
    if config.generates and config.rollout.engine == "transformers":
        check_embedded(config.model.hf_path, config.rollout)
    shortfall = simulate_job(config, arguments, size=size, prompt_lengths=prompt_lengths, responses=responses)
    if shortfall is not None:
        raise ConfigError(shortfall)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Makes the checks that a run makes at its start; each raises ConfigError for a fault. None is a collective.

    size:      the job's number of GPUs, in all and on each node.
    elsewhere: whether the job is to run on another machine, whose installation cannot be seen from
               here.
    """

    config: Config
    size: JobSize
    elsewhere: bool

    def check_engine(self) -> None:
        """Raise ConfigError if the inference engine's settings do not fit the job's GPUs."""
        config = self.config
        ranks = policy_ranks(config.separate_critic_ranks, self.size.gpus)
        on_node, dtype = min(self.size.on_node, ranks), config.model.dtype
        check_engine(config.rollout, config.weight_sync, config.lora, dtype, ranks, on_node, elsewhere=self.elsewhere)

    def check_inputs(self) -> tuple[list[int], list[Workload]]:
        """Check folder, model, tokenizer, data, rewards and environment as a run does; raise ConfigError for a fault.

        Returns two lists for the forecast: the token counts of the run's first prompts, and one
        Workload (its responses' token counts) for each supervised step. Each list ends after one
        pass over the data.
        """
        config = self.config
        look_at_run_folder(config.run.path)
        if not isinstance(root := config.checkpoint.root(config.run.path), pathlib.Path):
            from megatron_rl.checkpoint.remote_lock import look_at_store

            look_at_store(root)
        if config.metrics.prometheus_port is not None and not self.elsewhere:
            check_port(config.metrics)
        hf_config = load_hf_config(config.model.hf_path, provider=config.model.provider)
        shape = read_shape(hf_config, layer_spec="torch", provider=config.model.provider)
        if config.generates:
            check_lengths(config.data, config.rollout, hf_config.max_position_embeddings)
            refuse_mixture(config.weight_sync, shape.num_experts)
        check_critic_model(config.trained_critic, config.data, config.rollout, hf_config, config.model.hf_path)
        parts_of(ModelSettings.of(config)).require_shown(shape)
        if config.has_teacher and config.teacher.hf_path:
            look_at_teacher(config.teacher.hf_path, config.data, config.rollout, hf_config.vocab_size)
        megatron_config(config.optimizer, config.megatron, config.model.dtype)
        tokenizer = load_tokenizer(config.model, hf_config.vocab_size)
        stop_tokens(config.model.hf_path, tokenizer, hf_config.vocab_size)
        if config.generates and config.rollout.engine == "vllm":
            check_served(config.model.hf_path, provider=config.model.provider)
            delta_arguments(config.model, config.rollout, config.weight_sync, torch.device("cuda"))
        # One reward worker stands for all of them.
        one_worker = dataclasses.replace(config.reward, num_workers=min(1, config.reward.num_workers))
        with opened_reward(one_worker, config.run.deadline_s, episodes=config.plays_episodes) as reward:
            required, recognised = (reward.required_columns, reward.recognised) if reward else ((), ())
        for sentence in recognised:
            log.info("%s", sentence)
        prompts = load_prompts(
            config.data,
            config.sft,
            config.preference,
            config.environment,
            config.run.seed,
            tokenizer,
            hf_config,
            required,
        )
        config = dataclasses.replace(config, data=prompts.data, sft=config.sft.settled(len(prompts)))
        return dataclasses.replace(self, config=config)._check_data(prompts, tokenizer, hf_config, required)

    def _check_data(
        self, prompts: PromptDataset, tokenizer, hf_config, required: Sequence[RequiredColumn]
    ) -> tuple[list[int], list[Workload]]:
        """Check the training data, and the settings that depend on its rows.

        required: the columns that the reward functions need in every row.

        Returns the same as ``check_inputs``.
        """
        config = self.config
        moving_rl_steps(config.train, config.rollout, config.skip, config.trained_critic, len(prompts))
        rl_steps = total_rl_steps(config.train, config.rollout, config.skip, len(prompts))
        if warning := beyond_the_end(config.profile, config.sft.steps + rl_steps):
            log.warning("%s", warning)
        limits = (hf_config.max_position_embeddings, hf_config.vocab_size)
        Evaluation(config, tokenizer, *limits, required=required)
        of_pairs = config.preference
        most_tokens, seed = context_tokens(of_pairs, hf_config), config.run.seed
        held_out_responses(
            config.sft, of_pairs, config.data, seed, prompts, tokenizer, most_tokens, hf_config.vocab_size
        )
        responses: list[Solution] = []
        if config.sft.is_on:
            rows = min(len(prompts), config.sft.steps * config.sft.samples_per_step)
            responses = next_responses(prompts, rows, config.preference)
        if config.environment.name is not None:
            with time_limit("the import of environment.name", config.run.deadline_s):
                environment_parts(config.environment, config.data, tokenizer)
        if config.rollout.endpoint.agent is not None:
            with time_limit("the import of rollout.endpoint.agent", config.run.deadline_s):
                agent_of(config.rollout.endpoint)
        lengths = [len(prompt.token_ids) for prompt in prompts.next(min(len(prompts), MAX_PROMPTS))]
        self._look_at_checkpoints(hf_config, prompts)
        return lengths, of_responses(responses, config.sft.samples_per_step, pairs=config.preference.is_on)

    def _look_at_checkpoints(self, hf_config, prompts: PromptDataset) -> None:
        """Raise ConfigError if the run could not start from its checkpoints; log which checkpoint it would resume from.

        prompts: the training data; the call moves its reading position to the checkpoint's.
        """
        config = self.config
        shape = read_shape(hf_config, layer_spec="torch", provider=config.model.provider).with_adapters(config.lora)
        identity, hf_path = identity_of_shape(shape), config.model.hf_path
        try:
            point = foresee_resume(
                config.run.path, config.checkpoint, identity, hf_path=hf_path, has_critic=config.has_critic
            )
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        if point is None:
            return
        log.info("%s is there: the run would resume from it", point.folder)
        prompts.load_state(point.state["prompts"])
        asked = config_to_dict(config)
        refuse_finished(config.run.path, config.train, asked, prompts, point.folder, point.state)

    def check_models(self) -> None:
        """Raise ConfigError if the policy, the critic or the teacher could not be built on the job's GPUs."""
        config, elsewhere = self.config, self.elsewhere
        ranks = policy_ranks(config.separate_critic_ranks, self.size.gpus)
        check_profile(config.profile, ranks, on_gpu=True)
        degrees = degrees_of(config.parallel, ranks)
        check_model(config, degrees, value_head=config.trains_reward_model, elsewhere=elsewhere)
        if config.has_critic:
            critic = critic_config(config)
            of_critic = degrees_of(critic.parallel, config.critic.ranks or ranks)
            check_model(critic, of_critic, value_head=True, elsewhere=elsewhere)
        if config.has_teacher and config.teacher.hf_path:
            teacher = dataclasses.replace(teacher_config(config), lora=LoraConfig())
            model = dataclasses.replace(teacher.model, init="pretrained")
            check_model(dataclasses.replace(teacher, model=model), degrees, elsewhere=elsewhere)


def check_port(metrics: MetricsConfig) -> None:
    """Raise ConfigError if metrics cannot be served here.

    It checks the prometheus package, the access keys, and whether the address and port are free. It
    does not keep the port.
    """
    require_prometheus(metrics.prometheus_port)
    from prometheus_client import CollectorRegistry

    from megatron_rl.observability.prometheus.sink import server_of

    server_of(metrics, CollectorRegistry()).close()


def check_model(config: Config, degrees: Degrees, *, value_head: bool = False, elsewhere: bool) -> None:
    """Raise ConfigError if settings do not fit a model's layers or its files' tensors, or if Megatron-Core refuses one.

    degrees: the parallel degrees of the model's ranks.
    value_head: whether the model gives one number per token in place of logits, as a critic does.
    elsewhere: whether the job is to run on another machine; what is installed here is then ignored.
    """
    hf_config = load_hf_config(config.model.hf_path, provider=config.model.provider)
    config = dataclasses.replace(config, model=settle_dtype(config.model, hf_config, on_gpu=True))
    refuse_uncounted_losses(config.megatron, config.skip)
    if elsewhere:
        fields = {name: value for name, value in config.megatron.transformer.items() if name not in ONLY_ON_GPUS}
        config = dataclasses.replace(config, megatron=dataclasses.replace(config.megatron, transformer=fields))
        shape = model_shape(hf_config, ModelSettings.of(config), degrees, layer_spec="torch", value_head=value_head)
    else:
        shape = settled_shape(ModelSettings.of(config), hf_config, degrees, value_head=value_head)
    if config.rollout.routing_replay != "off" and not value_head:
        check_routing_replay(config.rollout.routing_replay, config.megatron.transformer, shape)
    if config.model.init == "pretrained" and not lacks_weights(config.model.hf_path):
        reader = HuggingFaceReader(config.model.hf_path)
        check_tensors(reader, shape, allow_unread=config.model.allow_unread_tensors)
    if config.model.provider == "native":  # another provider's configuration is finished within process groups
        transformer_config(shape, hf_config, ModelSettings.of(config), degrees)


def check_engine(
    rollout: RolloutConfig,
    weight_sync: WeightSyncConfig,
    lora: LoraConfig,
    dtype: str,
    num_ranks: int,
    on_node: int,
    *,
    elsewhere: bool,
) -> None:
    """Raise ConfigError if the inference engine's settings do not fit a job on GPUs.

    num_ranks, on_node: the number of ranks that hold the policy, and how many of them the first
        node has.
    elsewhere: whether the job is to run on another machine, whose installation cannot be seen from
        here.
    """
    device = torch.device("cuda")
    location = RankLocation(rank=0, world_size=num_ranks, local_rank=0, local_world_size=on_node)
    role_of(rollout, location)
    shared = shares_device(rollout, device)
    refuse_sharing(rollout, weight_sync, shared)
    refuse_delta(rollout, weight_sync, shared)
    adapter_arguments(weight_sync, lora, dtype, on_gpu=True)
    weight_channel(rollout, weight_sync, device, {} if elsewhere else os.environ)
    own_engines = rollout.engine == "vllm" and not rollout.servers
    if own_engines and importlib.util.find_spec("vllm") is None:
        missing = "rollout.engine=vllm starts vLLM in the job's environment, and this one has none"
        if not elsewhere:
            raise ConfigError(
                f"{missing}; pip install 'megatron_rl[vllm]', name running servers by rollout.servers, or say by "
                "--nodes N that the job runs on other machines"
            )
        print(f"note: {missing}", file=sys.stderr)
