"""Our side of the comparisons with TRL's own trainers: the rows of a file, and the gradient of their one step.

It takes the run's own way from the JSONL to the gradient: configuration, data set, tokens, passes, plan and schedule.
"""

import contextlib
import pathlib

import torch

from megatron_rl.algorithm.signal import signal_rule
from megatron_rl.backend import MegatronBackend
from megatron_rl.config import load_config
from megatron_rl.critic import RewardModel
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.distributed import topology
from megatron_rl.trainer.preference import HALVES, compare_pairs, prepare_pairs
from megatron_rl.trainer.supervised import imitate, next_responses, response_batch
from megatron_rl.trainer.training_data import load_prompts
from megatron_rl.weights.config_json import load_hf_config
from megatron_rl.weights.export import load_weights
from megatron_rl.weights.reader import HuggingFaceReader

DEFAULTS = (
    "train.num_rollouts=0", "sft.steps=1", "data.shuffle=false", "plan.max_tokens_per_microbatch=24",
    "optimizer.distributed=false", "run.deadline_s=60", "data.max_prompt_tokens=200", "rollout.max_response_tokens=8",
)  # fmt: skip


def response_gradient(rank: int, world: int, model: pathlib.Path, rows: pathlib.Path, reference: pathlib.Path | None,
                      *given: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradient of one step on all rows of a file; reference: the folder of its policy's weights."""
    config = load_config(None, [f"model.hf_path={model}", f"data.train={rows}", *DEFAULTS, *given])
    hf_config = load_hf_config(str(model))
    tokenizer = load_tokenizer(config.model, hf_config.vocab_size)
    sections = config.data, config.sft, config.preference, config.environment, config.run.seed
    prompts = load_prompts(*sections, tokenizer, hf_config, ())
    with contextlib.ExitStack() as held:
        held.callback(topology.destroy)
        backend = (RewardModel if config.trains_reward_model else MegatronBackend)(config, hf_config=hf_config)
        if reference is not None:
            fill(backend, reference)
            backend.keep_reference()
            fill(backend, model)
        responses = next_responses(prompts, len(prompts), config.preference)
        if config.preference.is_on:
            batch = response_batch(backend, responses, of_row=HALVES)
            _, outcome = compare_pairs(backend, batch, config.preference)
            update, loss = prepare_pairs(backend, batch, outcome, signal_rule(config)), float(outcome.losses.mean())
            update.accumulate(backend)
        else:
            update = imitate(backend, response_batch(backend, responses))
            update.accumulate(backend)
            sums = backend._sums.values.clone()
            torch.distributed.all_reduce(sums)
            loss = float(sums[0])
        gradient = backend.gradient()
        backend.zero_grad()
        held.pop_all()
        backend.close(leave_world=False)
    return loss, gradient


def fill(backend: MegatronBackend, folder: pathlib.Path) -> None:
    load_weights([chunk.module for chunk in backend.chunks], backend.shape, backend.topology, HuggingFaceReader(folder))
    backend.optimizer.megatron.reload_model_params()
