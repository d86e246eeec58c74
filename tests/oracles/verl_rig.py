"""verl's own Megatron engine on a thin model, without a GPU, and the batches that its trainer would hand it.

Replaced is only what cannot exist here: ``initialize``, which asks for Megatron-Bridge, a checkpoint manager and
Transformer Engine's attention. The model is Megatron-Core's GPTModel with this package's attention over packed
sequences. Cutting, schedule, forward step, log-probs, losses, reduction and optimizer step are verl's and Megatron's.
"""

import functools
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from tensordict import TensorDict

import megatron_rl.distributed.platform  # noqa: F401  (before megatron.core)
from megatron_rl.integrations.verl_engine import SkippingEngine
from megatron_rl.model.attention.layout import Layout
from megatron_rl.model.attention.packed import TorchAttention, pack
from megatron_rl.model.layer_spec import block_spec

from verl.utils import tensordict_utils as tu  # isort: skip
from verl.utils.metric import Metric  # isort: skip
from verl.utils.megatron_utils import register_megatron_training_hooks  # isort: skip
from verl.workers.config import ActorConfig, McoreEngineConfig  # isort: skip
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead  # isort: skip
from verl.workers.engine_workers import TrainingWorker  # isort: skip
from verl.workers.utils.losses import ppo_loss  # isort: skip
from verl.workers.utils.padding import left_right_2_no_padding  # isort: skip

from megatron.core import parallel_state  # isort: skip
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

VOCABULARY = 96
PROMPT_TOKENS, RESPONSE_TOKENS = 6, 10  # at most
LAYERS = 4


class PackedAttention(TorchAttention):
    """Attends over the packed sequences of verl's micro-batches, whose bounds are in Megatron-Core's own fields."""

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None, **_):
        lengths = tuple(packed_seq_params.cu_seqlens_q_padded.diff().tolist())
        return super().forward(query, key, value, None, packed_seq_params=pack(Layout.of(lengths), query.device))


class OnHost:
    """Builds verl's engine from a thin model, and counts the micro-batches that run."""

    num_forwards = 0

    def initialize(self) -> None:
        sizes, fields = self.engine_config, self.engine_config.override_transformer_config
        torch.manual_seed(7)
        model = dict(num_layers=LAYERS, hidden_size=32, num_attention_heads=2, normalization="RMSNorm")
        model |= dict(add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True)
        self.tf_config = TransformerConfig(
            **model, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall",
            tensor_model_parallel_size=sizes.tensor_model_parallel_size,
            pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=sizes.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=sizes.expert_model_parallel_size,
            overlap_p2p_comm=bool(sizes.virtual_pipeline_model_parallel_size),
            batch_p2p_comm=not sizes.virtual_pipeline_model_parallel_size, pipeline_dtype=torch.float32, **fields,
        )  # fmt: skip
        chunks = [self._chunk(chunk) for chunk in range(sizes.virtual_pipeline_model_parallel_size or 1)]
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **sizes.override_ddp_config)
        self.module = [DistributedDataParallel(self.tf_config, ddp, chunk, disable_bucketing=i > 0)
                       for i, chunk in enumerate(chunks)]
        rates = dict(optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=1.0)
        rates |= {name: vars(ddp)[name] for name in ("use_distributed_optimizer", "overlap_param_gather")}
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**rates), self.module)
        register_megatron_training_hooks(self.module, self.optimizer)
        self.peft_cls = None

    def _chunk(self, chunk: int) -> GPTModel:
        stages = self.engine_config.virtual_pipeline_model_parallel_size or 1
        pipeline = parallel_state.get_pipeline_model_parallel_world_size()
        stage = chunk * pipeline + parallel_state.get_pipeline_model_parallel_rank()
        here = LAYERS // (pipeline * stages)
        spec = block_spec(self.tf_config, "torch", range(stage * here, (stage + 1) * here))
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = PackedAttention
        model = GPTModel(
            self.tf_config, spec, vocab_size=VOCABULARY, max_sequence_length=64, pre_process=stage == 0,
            post_process=stage == pipeline * stages - 1, parallel_output=True, position_embedding_type="rope",
            vp_stage=chunk if stages > 1 else None,
        )  # fmt: skip
        model.register_forward_pre_hook(self._count)
        return model

    def _count(self, *_) -> None:
        self.num_forwards += 1

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for i, chunk in enumerate(self.module):
            yield from ((f"{i}.{name}", parameter) for name, parameter in chunk.module.named_parameters())

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return this rank's reduced gradients by name."""
        return {name: parameter.main_grad.clone() for name, parameter in self.parameters()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters()}


class Own(OnHost, MegatronEngineWithLMHead):
    """verl's engine as it is: the oracle."""


class Skipping(OnHost, SkippingEngine):
    """verl's engine with the plug-in."""


def build(kind: type, *, tensor: int = 1, pipeline: int = 1, virtual: int | None = None, expert: int = 1, **more):
    """Return an engine with the same fresh weights for both kinds; more: fields of ``ddp`` and ``transformer``."""
    model = SimpleNamespace(model_type="language_model", lora={}, tokenizer=SimpleNamespace(pad_token_id=0))
    model.hf_config = SimpleNamespace(architectures=["Qwen2ForCausalLM"])
    model.mtp = SimpleNamespace(enable=False, enable_train=False)
    sizes = McoreEngineConfig(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual, expert_model_parallel_size=expert, expert_tensor_parallel_size=1,
        sequence_parallel=False, override_ddp_config=more.get("ddp", {}),
        override_transformer_config=more.get("transformer", {}),
    )  # fmt: skip
    engine = kind(model, sizes, None, None)
    engine.initialize()
    return engine


def actor_config(**changes) -> ActorConfig:
    settings = dict(strategy="megatron", rollout_n=4, use_dynamic_bsz=True, clip_ratio_low=0.2, clip_ratio_high=0.3)
    return ActorConfig(**settings | changes)


def loss_of(**changes) -> functools.partial:
    """Return the closure that verl's ActorRolloutRefWorker gives its engine."""
    return functools.partial(ppo_loss, config=actor_config(**changes))


def padded_rows(num_rows: int, dead: set[int], seed: int = 0) -> TensorDict:
    """Return rows as verl's trainer has them; the ``dead`` have advantage 0, and row 1 one at masked tokens alone."""
    random = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, VOCABULARY, (num_rows, PROMPT_TOKENS), generator=random)
    responses = torch.randint(2, VOCABULARY, (num_rows, RESPONSE_TOKENS), generator=random)
    prompt_tokens = torch.randint(2, PROMPT_TOKENS + 1, (num_rows, 1), generator=random)
    response_tokens = torch.randint(2, RESPONSE_TOKENS + 1, (num_rows, 1), generator=random)
    before = torch.arange(PROMPT_TOKENS) >= PROMPT_TOKENS - prompt_tokens
    after = torch.arange(RESPONSE_TOKENS) < response_tokens
    attention = torch.cat([before, after], 1).long()
    mask = after & (torch.rand(after.shape, generator=random) < 0.8)
    mask[:, 0] = True
    advantages = torch.randn(num_rows, 1, generator=random) * after
    advantages[sorted(dead)] = 0.0
    if dead and 1 not in dead:
        advantages[1] = advantages[1] * ~mask[1] + (~mask[1] & after[1])
    old = torch.randn(after.shape, generator=random) * 0.3 - 4.5
    rows = {"input_ids": torch.cat([prompts, responses], 1), "prompts": prompts, "responses": responses}
    rows |= {"attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp(min=0)}
    rows |= {"response_mask": mask.long(), "advantages": advantages, "old_log_probs": old}
    return TensorDict(rows, batch_size=num_rows)


def mini_batch(rows: TensorDict, *, dynamic: bool, jagged: bool = False, **more) -> TensorDict:
    """Return this rank's share of ``rows`` as the engine gets it; jagged: as verl's second trainer has them."""
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    here = len(rows) // size
    data = left_right_2_no_padding(rows[rank * here : (rank + 1) * here].clone())
    if jagged:
        mask = data["attention_mask"].bool()
        for key in ("response_mask", "advantages", "old_log_probs", "responses", "prompts"):
            kept = mask[:, :PROMPT_TOKENS] if key == "prompts" else mask[:, PROMPT_TOKENS:]
            rows_of_key = [x[k] for x, k in zip(data[key], kept, strict=True)]
            data[key] = torch.nested.as_nested_tensor(rows_of_key, layout=torch.jagged)
        data["loss_mask"] = data["response_mask"]
        del data["attention_mask"], data["max_response_len"]
    settings = dict(temperature=1.0, calculate_entropy=False, global_batch_size=len(rows), use_dynamic_bsz=dynamic)
    tu.assign_non_tensor(data, **settings, max_token_len_per_gpu=24, micro_batch_size_per_gpu=2, **more)
    return data


def largest_difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def reported(engine: OnHost, output: dict) -> dict[str, float]:
    """Return what verl's TrainingWorker makes of a training batch's output, over all data-parallel ranks."""
    worker = SimpleNamespace(engine=engine, device_name="cpu", flops_counter=None)
    given = dict(global_token_num=None, delta_time=1.0, forward_only=False, images_seqlens=None)
    del output["model_output"]
    metrics = tu.get(TrainingWorker._postprocess_output(worker, output, **given), "metrics")
    lists = {name for name, value in metrics.items() if isinstance(value, list) and isinstance(value[0], Metric)}
    return {name: Metric.aggregate_dp(value) if name in lists else value for name, value in metrics.items()}
