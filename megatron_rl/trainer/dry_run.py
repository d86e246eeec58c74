"""The dry run: all that a run checks before its first step, without a world or a model, and its forecast."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys

import torch

from megatron_rl.backend.optimizer import megatron_config
from megatron_rl.backend.teacher_weights import look_at_teacher
from megatron_rl.config import Config
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.distributed.time_limit import time_limit
from megatron_rl.errors import ConfigError
from megatron_rl.model.build import refuse_bitwise
from megatron_rl.model.hf_config import read_shape
from megatron_rl.planning.num_steps import moving_rl_steps
from megatron_rl.reward import opened_reward
from megatron_rl.rollout.build import (
    RankLocation,
    adapter_arguments,
    refuse_delta,
    refuse_mixture,
    refuse_sharing,
    role_of,
    shares_device,
    weight_channel,
)
from megatron_rl.rollout.endpoint.agents import agent_of
from megatron_rl.rollout.multi_turn import environment_parts
from megatron_rl.rollout.transformers_engine import check_embedded, stop_tokens
from megatron_rl.simulator.command import simulate_job
from megatron_rl.simulator.degrees import world_size
from megatron_rl.trainer.evaluation import Evaluation
from megatron_rl.trainer.run_folder import look_at_checkpoints, look_at_run_folder
from megatron_rl.trainer.supervised import held_out_responses, next_responses
from megatron_rl.trainer.training_data import context_tokens, load_prompts
from megatron_rl.validate import check_critic_model, check_lengths
from megatron_rl.validate.critic import policy_ranks
from megatron_rl.weights.config_json import check_served, load_hf_config
from megatron_rl.weights.reader import HuggingFaceReader

MAX_PROMPTS = 4096  # whose lengths the forecast takes


def dry_run(config: Config, given: argparse.Namespace) -> None:
    """Check what a run checks before its first step, and print its forecast; join no world and build no model.

    given: the simulation's own arguments (simulator/command.py).
    Raises ConfigError as training would, and where the job does not fit on its GPUs, with what would make it fit.
    """
    num_ranks = world_size(given.nodes, given.gpus_per_node, os.environ)
    on_node = given.gpus_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", min(8, num_ranks)))
    if config.generates:
        check_engine(config, num_ranks, on_node, elsewhere=given.nodes is not None)
    prompt_lengths = check_inputs(config)
    shortfall = simulate_job(config, given, prompt_lengths=prompt_lengths)
    if shortfall is not None:
        raise ConfigError(shortfall)


def check_inputs(config: Config) -> list[int]:
    """Check folder, model, tokenizer, data, rewards and environment as a run does; return its first prompts' tokens."""
    look_at_run_folder(config)
    hf_config = load_hf_config(config.model.hf_path, provider=config.model.provider)
    shape = read_shape(hf_config, layer_spec="torch", provider=config.model.provider)
    if config.generates:
        check_lengths(config, hf_config.max_position_embeddings)
        refuse_mixture(config, shape.num_experts)
    check_critic_model(config, hf_config)
    if config.rollout.bitwise:
        refuse_bitwise(shape)
    if config.has_teacher and config.teacher.hf_path:
        look_at_teacher(config, hf_config.vocab_size)
    if config.model.init == "pretrained":
        HuggingFaceReader(config.model.hf_path)
    megatron_config(config, config.optimizer)
    tokenizer = load_tokenizer(config, hf_config.vocab_size)
    stop_tokens(config.model.hf_path, tokenizer, hf_config.vocab_size)
    if not config.generates:
        pass  # no engine is started
    elif config.rollout.engine == "transformers":
        check_embedded(config.model.hf_path, config.rollout)
    else:
        check_served(config.model.hf_path, provider=config.model.provider)
    one_worker = dataclasses.replace(config.reward, num_workers=min(1, config.reward.num_workers))  # it speaks for all
    with opened_reward(one_worker, config.run.deadline_s) as reward:
        required = reward.required_columns if reward else ()
    prompts = load_prompts(config, tokenizer, hf_config, required)
    config = dataclasses.replace(config, sft=config.sft.settled(len(prompts)))
    moving_rl_steps(config, len(prompts))
    limits = (hf_config.max_position_embeddings, hf_config.vocab_size)
    Evaluation(config, tokenizer, *limits, required=required)
    held_out_responses(config, prompts, tokenizer, context_tokens(config, hf_config), hf_config.vocab_size)
    if config.sft.is_on:
        next_responses(config, prompts, min(len(prompts), config.sft.steps * config.sft.samples_per_step))
    if config.environment.name is not None:
        with time_limit("the import of environment.name", config.run.deadline_s):
            environment_parts(config, tokenizer)
    if config.rollout.endpoint.agent is not None:
        with time_limit("the import of rollout.endpoint.agent", config.run.deadline_s):
            agent_of(config.rollout.endpoint)
    lengths = [len(prompt.token_ids) for prompt in prompts.next(min(len(prompts), MAX_PROMPTS))]
    look_at_checkpoints(config, hf_config, prompts)
    return lengths


def check_engine(config: Config, num_ranks: int, on_node: int, *, elsewhere: bool) -> None:
    """Check the rules of engines on a job of GPUs.

    num_ranks, on_node: the job's ranks, and those of each node.
    elsewhere: whether the job is to run on another machine, whose installation cannot be seen from here.
    """
    device = torch.device("cuda")
    ranks = policy_ranks(config, num_ranks)
    location = RankLocation(rank=0, world_size=ranks, local_rank=0, local_world_size=min(on_node, ranks))
    role_of(config, location)
    shared = shares_device(config, device)
    refuse_sharing(config, shared)
    refuse_delta(config, shared)
    adapter_arguments(config, on_gpu=True)
    weight_channel(config, device, {} if elsewhere else os.environ)
    own_engines = config.rollout.engine == "vllm" and not config.rollout.servers
    if own_engines and importlib.util.find_spec("vllm") is None:
        missing = "rollout.engine=vllm starts vLLM in the job's environment, and this one has none"
        if not elsewhere:
            raise ConfigError(f"{missing}; pip install 'megatron_rl[vllm]', or name running servers by rollout.servers")
        print(f"note: {missing}", file=sys.stderr)
