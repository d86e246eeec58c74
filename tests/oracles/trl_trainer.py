"""TRL's trainers without a model, over given log-probs and rewards."""

from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.oracles.batch import Batch

trl = pytest.importorskip("trl", reason="TRL is not installed; `make test-oracles` installs it")


def one_process(**attributes) -> SimpleNamespace:
    """Return accelerate's Accelerator of one process, as far as the trainers read it."""
    return SimpleNamespace(
        num_processes=1, process_index=0, device=torch.device("cpu"), gather=lambda x: x,
        gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True, **attributes,
    )  # fmt: skip


def generating_trainer(batch: Batch, rewards: np.ndarray, **changed) -> SimpleNamespace:
    """Return the part of a trainer that _generate_and_score_completions reads, of given completions and rewards."""
    lengths = batch.response_tokens.tolist()
    completions = [[1] * n for n in lengths]
    tools = [row[:n].long().tolist() for row, n in zip(batch.mask, lengths, strict=True)]
    sampled = [row[:n].tolist() for row, n in zip(batch.rollout, lengths, strict=True)]
    grpo = ([[1]] * len(lengths), completions, tools, [""] * len(lengths), sampled, None, None, None)
    size = int((batch.groups == batch.groups[0]).sum())
    args = SimpleNamespace(per_device_train_batch_size=size, gradient_checkpointing_kwargs=None)
    args.steps_per_generation = args.gradient_accumulation_steps = 1
    none = ("environment_factories", "tools", "environments", "pad_to_multiple_of", "reward_clip_range")
    none += ("vllm_importance_sampling_clip_min",)
    off = ("mask_truncated_completions", "log_multimodal", "normalize_advantages")
    trainer = dict(
        **dict.fromkeys(none) | dict.fromkeys(off, False), accelerator=one_process(),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        _tokenizer=SimpleNamespace(pad_token_id=0), args=args, num_iterations=1, beta=0.0, num_generations=size,
        multi_objective_aggregation="sum_then_normalize", scale_rewards="group",
        reward_weights=torch.ones(rewards.shape[1], dtype=torch.float64), reward_funcs=[None] * rewards.shape[1],
        reward_func_names=[str(i) for i in range(rewards.shape[1])], use_vllm=True,
        vllm_importance_sampling_correction=True, vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0, _metrics=defaultdict(lambda: defaultdict(list)),
        _logs=defaultdict(lambda: defaultdict(list)), _pending_extra_logs={}, _pending_metrics={},
        _generate=lambda prompts: grpo, _calculate_rewards=lambda *args: torch.from_numpy(rewards),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (batch.old, None, None),
    )  # fmt: skip
    trainer["_logs"].update({name: [] for name in ("prompt", "completion", "advantages")})
    return SimpleNamespace(**trainer | changed)


@contextmanager
def double_by_default():
    """Make double the default dtype, in which TRL makes tensors of the engine's log-probs."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def trl_scored(batch: Batch, rewards: np.ndarray, **changed) -> dict[str, torch.Tensor]:
    with double_by_default():
        trainer = generating_trainer(batch, rewards, **changed)
        return trl.GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": ""}] * len(batch.groups))
