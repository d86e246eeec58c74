"""The thin model that megatron-rl verify runs: the user's model with fewer layers and less width.

This module also makes synthetic samples, and the configuration of the thin model's run. Every rank
makes equal ones from the command line alone.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.config import Config, MegatronConfig, OptimizerConfig, ParallelConfig
from megatron_rl.errors import ConfigError
from megatron_rl.model.settings import ModelSettings
from megatron_rl.types import Sample
from megatron_rl.weights.families.register import FAMILIES
from megatron_rl.weights.fused import file_tensors

HIDDEN, FFN, VOCABULARY, EXPERTS = 64, 96, 128, 4
KEEP = ("hidden", "ffn", "vocabulary", "experts")
FFN_FIELDS = (
    "intermediate_size",
    "moe_intermediate_size",
    "intermediate_size_mlp",
    "shared_expert_intermediate_size",
)
EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")
LEARNING_RATE = 1e-4
GROUP_SAMPLES = 4
# The distances of old log-probs from the current ones: ratios 0.61, 1 and 1.65. Some are clipped, and none is at the
# edge of a clip of 0.2, where rounding would decide.
SHIFTS = np.array([-0.5, 0.0, 0.5], dtype=np.float32)
# These change how Megatron-Core computes, not its result; one process overlaps nothing and recomputes nothing.
EXECUTION_FIELDS = (
    "recompute_",
    "tp_comm_",
    "overlap_",
    "batch_p2p_",
    "cpu_offloading",
    "distribute_saved_activations",
)
# These need optimizer.distributed=true.
SHARDED_FIELDS = ("overlap_param_gather",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sets the size of the thin model.

    layers_per_stage: the number of layers of the smallest pipeline stage.
    keep: the sizes that stay as in the real model, from ``hidden``, ``ffn``, ``vocabulary`` and
        ``experts``.
    """

    layers_per_stage: int = 1
    keep: tuple[str, ...] = ()


def thin_layout(real, settings: ModelSettings, layers_per_stage: int) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage of the thin model.

    The smallest stages get ``layers_per_stage`` layers, and larger ones get one more. Stages
    without layers stay without. A single stage of a model with gated delta nets gets two at least:
    a delta net and attention.

    real: the real model's Hugging Face config.

    Raises ConfigError if the real model's layers cannot be divided among the stages.
    """
    from megatron_rl.model.costs import layout_of
    from megatron_rl.model.hf_config import read_shape

    shape = read_shape(real, layer_spec="torch")
    counts = layout_of(shape, settings, real)
    if shape.delta is not None and len(counts) == 1 < shape.num_layers:
        layers_per_stage = max(layers_per_stage, 2)
    least = min(count for count in counts if count)
    return tuple(layers_per_stage + (count > least) if count else 0 for count in counts)


def thin_hf_config(real, settings: ModelSettings, size: Size):
    """Return the real model's Hugging Face config with fewer layers and smaller widths.

    Family, heads, head size, biases, norms, tying and rotary embedding stay. The vocabulary's size
    modulo the tensor-parallel ranks stays too, so that the vocabulary is padded if the real one is.

    real: the real model's Hugging Face config.
    """
    check_real(real, settings.parallel, settings.model.hf_path)
    parallel = settings.parallel
    fields = {
        "num_hidden_layers": sum(thin_layout(real, settings, size.layers_per_stage)),
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    # The head keeps its size; the layers' types repeat over the thin depth.
    real_fields = real.to_dict()
    fields["head_dim"] = real_fields.get("head_dim") or real.hidden_size // real.num_attention_heads
    if real_fields.get("layer_types"):
        fields["layer_types"] = _thin_kinds(real_fields["layer_types"], fields["num_hidden_layers"])
    if real_fields.get("first_k_dense_replace"):  # dense layers first, and at least one mixture after them
        fields["first_k_dense_replace"] = min(real.first_k_dense_replace, fields["num_hidden_layers"] - 1)
    if real_fields.get("no_rope_layers"):  # Llama 4's lists by layer, which transformers made of the steps
        depth = fields["num_hidden_layers"]
        fields["no_rope_layers"] = (list(real.no_rope_layers) * depth)[:depth]
        fields["moe_layers"] = [layer for layer in real.moe_layers if layer < depth] or [depth - 1]
    # Widths that may shrink, each to a multiple that the topology can split.
    if "hidden" not in size.keep:
        fields["hidden_size"] = min(real.hidden_size, HIDDEN)
    if "ffn" not in size.keep:
        for name in FFN_FIELDS:
            if real_fields.get(name):
                fields[name] = min(
                    real_fields[name],
                    _multiple(FFN, math.lcm(parallel.tensor, parallel.expert_tensor or parallel.tensor)),
                )
    if "vocabulary" not in size.keep:
        tensor = parallel.tensor
        fields["vocab_size"] = min(
            real.vocab_size, _multiple(max(VOCABULARY, 16 * tensor), tensor) + real.vocab_size % tensor
        )
    if "experts" not in size.keep:
        groups = real_fields.get("n_group") or 1
        for name in EXPERT_FIELDS:
            if real_fields.get(name):
                wanted = _multiple(max(EXPERTS, 2 * real.num_experts_per_tok), math.lcm(parallel.expert, groups))
                fields[name] = min(real_fields[name], wanted)
    thin = copy.deepcopy(real)
    for name, value in fields.items():
        setattr(thin, name, value)
    return thin


def _thin_kinds(kinds: Sequence[str], depth: int) -> list[str]:
    """Return the kinds of ``depth`` layers: the first of ``kinds``, repeated, then those that would be left out.

    Example: three delta nets and an attention in turn, depth 2 → a delta net and an attention.
    """
    thin = (list(kinds) * depth)[:depth]
    missing = [kind for kind in dict.fromkeys(kinds) if kind not in thin][: depth - 1]
    return thin[: depth - len(missing)] + missing


def check_real(real, parallel: ParallelConfig, hf_path: str) -> None:
    """Raise ConfigError if the topology does not divide the real model's widths or experts.

    The thin model would hide this, since its sizes are chosen so that the topology divides them.

    real: the real model's Hugging Face config.
    hf_path: the real model's folder, for error messages.
    """
    experts = num_experts(real)
    ffn = FAMILIES[real.model_type].ffn_field
    split = {
        ffn: (real.to_dict()[ffn], "parallel.tensor", parallel.tensor),
    }
    if experts:
        split[ffn] = (
            real.to_dict()[ffn],
            "parallel.expert_tensor (parallel.tensor unless set)",
            parallel.expert_tensor or parallel.tensor,
        )
        split["num_experts"] = (experts, "parallel.expert", parallel.expert)
        fields = real.to_dict()
        if fields.get("first_k_dense_replace"):
            split["intermediate_size"] = fields["intermediate_size"], "parallel.tensor", parallel.tensor
        shared = fields.get("n_shared_experts", 0) * real.to_dict()[ffn]
        shared = shared or fields.get("shared_expert_intermediate_size", 0)
        split["the shared experts' width"] = shared, "parallel.tensor", parallel.tensor
    for name, (count, key, ranks) in split.items():
        if count % ranks:
            raise ConfigError(f"{key}={ranks} does not divide {name}={count} of {hf_path}; use a divisor")


def num_experts(hf_config) -> int:
    fields = hf_config.to_dict()
    return next((fields[name] for name in EXPERT_FIELDS if fields.get(name)), 0)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def thin_weights(hf_config, seed: int) -> Mapping[str, torch.Tensor]:
    """Return {Hugging Face name: random float32 weight}, equal on every rank.

    No norm's weight is 1 and no bias is 0, so that a topology which loses one of them gives another
    result. Matrices are scaled to keep activations near 1 at any width, so that attention weights
    are neither equal nor one-hot.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(hf_config).float()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, 0.5 / math.sqrt(parameter.shape[-1]))
        return file_tensors(model.state_dict(), hf_config.model_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Holds the synthetic samples of the measurements.

    groups: for each sample, the number of its group.
    advantages: [samples] float; in two groups of every three, all advantages are exactly 0.
    traced: one more sample, which runs alone and whose activations are compared.
    """

    samples: tuple[Sample, ...]
    groups: tuple[int, ...]
    advantages: np.ndarray
    traced: Sample

    @property
    def longest(self) -> int:
        return max(len(s.token_ids) for s in self.samples)

    def near_policy(self, flat: np.ndarray) -> Work:
        """Return a copy of the work whose samples have log-probs near the model's own.

        To each of the model's log-probs −0.5, 0 or 0.5 is added, as if an engine with slightly other
        weights had generated the samples.

        flat: [response tokens], the model's log-probs, sample after sample.
        """
        shifts = [np.resize(SHIFTS, len(s.logprobs)) for s in self.samples]
        return self.with_logprobs(flat + np.concatenate(shifts))

    def with_logprobs(self, flat: np.ndarray) -> Work:
        parts = np.split(flat, np.cumsum([len(s.logprobs) for s in self.samples])[:-1])
        samples = tuple(dataclasses.replace(s, logprobs=x) for s, x in zip(self.samples, parts, strict=True))
        return dataclasses.replace(self, samples=samples)


def data_size(parallel: ParallelConfig, world: int) -> int:
    return max(1, world // (parallel.tensor * parallel.context * parallel.pipeline))


def pad_multiple(parallel: ParallelConfig) -> int:
    return (2 * parallel.context if parallel.context > 1 else 1) * (
        parallel.tensor if parallel.sequence_parallel else 1
    )


def make_work(parallel: ParallelConfig, vocab_size: int, context_tokens: int, *, world: int, seed: int) -> Work:
    """Return synthetic samples of different lengths, enough for several micro-batches on every replica.

    context_tokens: the model's context.
    world: the number of ranks.

    If samples are padded to a multiple of some number, ``traced`` has a length that needs pads.
    Raises ConfigError if ``traced`` exceeds the context.
    """
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(3 * max(2, data_size(parallel, world))), GROUP_SAMPLES)
    values = random.normal(size=len(groups))
    traced = _sample("traced", 7, 3 * pad_multiple(parallel) + 18, vocab_size, random)
    if len(traced.token_ids) > context_tokens:
        raise ConfigError(
            f"the model's context is {context_tokens} tokens and this topology is tried with {len(traced.token_ids)}; "
            "lower parallel.context or parallel.tensor"
        )
    samples = tuple(
        _sample(f"s{i}", int(random.integers(2, 8)), int(random.integers(4, 17)), vocab_size, random)
        for i in range(len(groups))
    )
    return Work(
        samples=samples, groups=tuple(groups.tolist()), advantages=np.where(groups % 3 == 1, values, 0.0), traced=traced
    )


def _sample(name: str, prompt: int, response: int, vocab_size: int, random: np.random.Generator) -> Sample:
    mask = np.ones(response, dtype=bool)
    mask[random.integers(0, response - 1)] = False  # a tool's token within the response
    tokens = random.integers(2, vocab_size, prompt + response)
    return Sample(
        sample_id=name,
        prompt_tokens=prompt,
        token_ids=tokens,
        loss_mask=mask,
        logprobs=np.full(response, -5.0, dtype=np.float32),
    )


def user_config(config: Config, dtype: str, work: Work, world: int, layout: tuple[int, ...]) -> Config:
    """Return the user's configuration changed for the thin model; parallelism and the kind of optimizer stay.

    config: the user's configuration.
    dtype: the dtype of the thin model.
    work: the samples, which all form one mini-batch.
    world: the number of ranks.
    layout: the number of layers of each pipeline stage of the thin model.

    The learning rate is constant. The token limit of a micro-batch is lowered, so that the few
    samples form about four micro-batches or more on every replica.
    """
    lengths = np.array([len(s.token_ids) for s in work.samples])
    multiple, replicas = pad_multiple(config.parallel), data_size(config.parallel, world)
    padded = -(-lengths // multiple) * multiple
    per_replica = -(-len(lengths) // replicas)
    cap = max(int(padded.max()), int(padded.sum()) // (4 * replicas))
    plan = dataclasses.replace(config.plan, max_tokens_per_microbatch=min(config.plan.max_tokens_per_microbatch, cap))
    if plan.samples_per_microbatch is not None:
        plan = dataclasses.replace(
            plan, samples_per_microbatch=min(plan.samples_per_microbatch, max(1, per_replica // 4))
        )
    if config.model.layer_spec == "transformer_engine" and dtype == "float32":
        raise ConfigError(
            "model.layer_spec=transformer_engine has no float32 kernels for packed sequences; use --dtype bfloat16, "
            "or model.layer_spec=auto, which takes torch's layers for float32"
        )
    return dataclasses.replace(
        config,
        plan=plan,
        parallel=dataclasses.replace(config.parallel, pipeline_layout=tuple(map(str, layout))),
        model=dataclasses.replace(config.model, dtype=dtype),
        train=dataclasses.replace(config.train, samples_per_mini_batch=None),
        optimizer=dataclasses.replace(
            config.optimizer, lr=LEARNING_RATE, min_lr=0.0, schedule="constant", warmup_steps=0
        ),
    )


def whole_gradients(optimizer: OptimizerConfig, megatron: MegatronConfig) -> tuple[OptimizerConfig, MegatronConfig]:
    """Return (section ``optimizer``, section ``megatron``), changed so that every rank holds whole gradients.

    ``optimizer.distributed`` is off: its reduce-scatter would leave each rank only a shard.
    """
    whole = dataclasses.replace(megatron, ddp=_without(megatron.ddp, SHARDED_FIELDS))
    return dataclasses.replace(optimizer, distributed=False), whole


def _without(fields: Mapping[str, object], prefixes: tuple[str, ...]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if not name.startswith(prefixes)}


def reference_config(config: Config) -> Config:
    """Return the configuration of the reference run on one process, to which the run of ``config`` is compared.

    Every sample has its own micro-batch. No communication is overlapped, and nothing is sharded or
    recomputed.
    """
    optimizer, megatron = whole_gradients(config.optimizer, config.megatron)
    transformer = _without(megatron.transformer, EXECUTION_FIELDS)
    return dataclasses.replace(
        config,
        parallel=ParallelConfig(),
        plan=dataclasses.replace(config.plan, samples_per_microbatch=1),
        optimizer=optimizer,
        megatron=dataclasses.replace(megatron, ddp={}, transformer=transformer),
    )
