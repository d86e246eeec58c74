"""slime's and miles' own sources, from the folders that SLIME_SOURCE and MILES_SOURCE name; no index has them.

Their conversions stand in modules that import Ray and sglang: ``conversions`` runs those functions' text alone.
"""

import ast
import importlib
import os
import pathlib
import sys
import types
from types import SimpleNamespace
from typing import Any

import torch

from megatron_rl.integrations import slime as plugin

FOLDERS = {"slime": "SLIME_SOURCE", "miles": "MILES_SOURCE"}
MODULES = {"slime": "slime.ray.rollout", "miles": "miles.ray.rollout.train_data_conversion"}
VOCABULARY = 17
# slime's arguments that are False, None and 0 by default
OFF = ("use_dynamic_global_batch_size", "calculate_per_token_loss", "balance_by_flops", "balance_data", "use_kl_loss")
OFF += ("recompute_loss_function", "allgather_cp", "use_opd", "normalize_advantages", "get_mismatch_metrics")
OFF += ("use_tis", "use_opsm", "use_unbiased_kl")
NONE = ("custom_reward_post_process_path", "reward_key", "custom_advantage_function_path", "custom_tis_function_path")
NONE += ("custom_pg_loss_reducer_function_path", "eps_clip_c")
ZERO = ("kl_coef", "kl_loss_coef", "entropy_coef", "tis_clip_low")


def missing(package: str) -> str:
    """Return why a package's sources cannot be read; empty where they can."""
    folder = os.environ.get(FOLDERS[package], "")
    if (pathlib.Path(folder) / package).is_dir() and folder:
        sys.path[:] = [*(path for path in sys.path if path != folder), folder]
        return ""
    return f"{FOLDERS[package]} names no checkout of {package}: no package index has it"


def module_of(package: str) -> types.ModuleType:
    """Return a module of the conversion's name with the functions of its source that make train data."""
    path = pathlib.Path(os.environ[FOLDERS[package]], *MODULES[package].split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted = ("_post_process_rewards", "_convert_samples_to_train_data")
    body = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "RolloutManager":
            node.decorator_list = []
            node.body = [part for part in node.body if getattr(part, "name", None) in wanted]
            body.append(node)
        elif isinstance(node, ast.FunctionDef) and package == "miles":
            body.append(node)
    module = types.ModuleType(MODULES[package])
    types_of = importlib.import_module(f"{package}.utils.types")
    vars(module).update(Sample=types_of.Sample, torch=torch, Any=Any, get_source=lambda sample: "unknown")
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *body], []), str(path), "exec"), vars(module))
    return module


def samples_of(package: str, rewards: list[list[float]], seed: int = 0) -> list:
    """Return one sample for each reward, its group's by the first index; the last two are one rollout."""
    sample_class = importlib.import_module(f"{package}.utils.types").Sample
    random = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, num: int) -> list[int]:
        return torch.randint(low, high, (num,), generator=random).tolist()

    found = []
    for group, members in enumerate(rewards):
        for reward in members:
            prompt, response = draw(1, 6, 1)[0], draw(4, 30, 1)[0]
            index = len(found)
            drawn = dict(tokens=draw(0, VOCABULARY, prompt + response), response_length=response, reward=reward)
            drawn["loss_mask"] = [1, *draw(0, 2, response - 1)] if index % 3 else None
            drawn["rollout_log_probs"] = [-2.0 - 0.01 * t for t in range(response)]
            names = dict(group_index=group, index=index, rollout_id=index, remove_sample=index == 1)
            found.append(sample_class(**names, **drawn))
    return found


def arguments(rewards: list[list[float]], **changes) -> SimpleNamespace:
    """Return the arguments that conversion, schedule, advantages and loss read; slime's defaults but for the sizes."""
    settled = dict(
        advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True,
        n_samples_per_prompt=len(rewards[0]), rollout_batch_size=len(rewards),
        global_batch_size=sum(map(len, rewards)), use_dynamic_batch_size=True, max_tokens_per_gpu=48,
        micro_batch_size=2, loss_type="policy_loss", use_rollout_logprobs=True, kl_loss_type="k1", tis_clip=2.0,
        opsm_delta=1e-4, eps_clip=0.2, eps_clip_high=0.28, rollout_temperature=1.0, rollout_top_p=1.0,
        log_probs_chunk_size=-1, **dict.fromkeys(OFF, False) | dict.fromkeys(NONE) | dict.fromkeys(ZERO, 0.0),
    )  # fmt: skip
    return SimpleNamespace(**settled | changes)


def conversions(package: str, rewards: list[list[float]], **changes) -> tuple[dict, dict]:
    """Return the train data of the package's own conversion and of the plug-in's."""
    args, name = arguments(rewards, **changes), MODULES[package]
    before, module = sys.modules.get(name), module_of(package)
    sys.modules[name] = module
    try:
        plugin_gives = plugin.convert_samples(args, samples_of(package, rewards))
        own = samples_of(package, rewards)
        if package == "miles":
            return module.convert_samples_to_train_data(args, own, {}, None, None), plugin_gives
        manager = module.RolloutManager()
        manager.args, manager.custom_reward_post_process_func = args, None
        manager.custom_convert_samples_to_train_data_func = None
        return manager._convert_samples_to_train_data(own), plugin_gives
    finally:
        sys.modules.pop(name) if before is None else sys.modules.update({name: before})


def schedule(package: str, data: dict, args: SimpleNamespace, ranks: int = 2, chunks: int = 1) -> tuple:
    """Return what the package's ``build_dp_schedule`` makes of the train data."""
    build = importlib.import_module(f"{package}.utils.dp_schedule").build_dp_schedule
    sizes = {"dp_size": ranks, "cp_size": 1, "vpp_size": chunks, "microbatch_group_size_per_vp_stage": 2}
    lengths = list(map(len, data["tokens"]))
    return build(args, sizes, lengths, global_batch_size=args.global_batch_size, rollout_indices=data["rollout_ids"])


def gradients(data: dict, args: SimpleNamespace) -> list[torch.Tensor]:
    """Return each step's gradient by slime's own schedule, advantages and loss function, all ranks in this process.

    Megatron-Core divides each micro-batch by their number and averages over ranks; under the sum over tokens it
    divides by the tokens of all. The caller's world has one rank, so that ``loss_function`` multiplies by 1 for them.
    """
    loss = importlib.import_module("slime.backends.megatron_utils.loss")
    partitions, micro_batches, counts, rollouts = schedule("slime", data, args)
    random = torch.Generator().manual_seed(5)
    embedding = torch.randn(VOCABULARY, 6, generator=random).requires_grad_()
    head = torch.randn(6, VOCABULARY, generator=random).requires_grad_()
    shards = [shard_of(data, rows) for rows in partitions]
    for shard in shards:
        loss.compute_advantages_and_returns(args, shard)
    found, starts = [], [0] * len(shards)
    for num_microbatches, num_rollouts in zip(counts, rollouts, strict=True):
        total, tokens = torch.zeros(()), 0
        for rank, shard in enumerate(shards):
            for rows in micro_batches[rank][starts[rank] : starts[rank] + num_microbatches]:
                batch = {key: [values[row] for row in rows] for key, values in shard.items()}
                batch["unconcat_tokens"] = batch["tokens"]
                logits = torch.cat([seen(embedding[ids]) for ids in batch["tokens"]])[None] @ head
                part, number, _ = loss.loss_function(args, batch, num_microbatches, num_rollouts, logits)
                total = total + part / (1 if args.calculate_per_token_loss else num_microbatches)
                tokens += int(number)
            starts[rank] += num_microbatches
        if args.calculate_per_token_loss:
            total = total / tokens
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(total, (embedding, head))]))
    return found


def seen(tokens: torch.Tensor) -> torch.Tensor:
    """Return [T, H], of each position the mean of those up to it: a model in which the context matters."""
    return tokens.cumsum(0) / torch.arange(1, len(tokens) + 1)[:, None]


def shard_of(data: dict, rows: list[int]) -> dict:
    """Return one rank's part as tensors, as ``_split_train_data_by_dp`` and the actor leave it."""
    shard = {key: [values[row] for row in rows] for key, values in data.items()}
    shard["total_lengths"] = list(map(len, shard["tokens"]))
    shard["tokens"] = list(map(torch.tensor, shard["tokens"]))
    shard["loss_masks"] = [torch.tensor(mask, dtype=torch.int) for mask in shard["loss_masks"]]
    shard["rollout_log_probs"] = list(map(torch.tensor, shard["rollout_log_probs"]))
    shard["rollout_mask_sums"] = list(torch.tensor(shard["rollout_mask_sums"], dtype=torch.float32))
    if "log_probs" in shard:
        shard["log_probs"] = list(map(torch.tensor, shard["log_probs"]))
    return shard
