"""The sections ``model`` (weights, dtype), ``parallel`` (degrees) and ``megatron`` (Megatron-Core's own fields)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_rl.config.checks import Range, choose
from megatron_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Names the Hugging Face directory of the policy, and sets its dtype, layers and kernels."""

    hf_path: str = ""
    """Required: folder of config, safetensors, tokenizer; a URL; or `owner/name@revision` (docs/object-storage.md)."""
    provider: str = "native"
    """Builder of the model: `native`: this package, for families in docs/models.md; `bridge`: Megatron-Bridge."""
    tokenizer_path: str | None = None
    """Directory, or name on the hub, of another tokenizer; null: the tokenizer of `model.hf_path`."""
    allow_unread_tensors: bool = False
    """If the files hold tensors that the model does not use: true: ignore them with a warning; false: refuse them."""
    dtype: str = "auto"
    """Dtype: `float32`; `bfloat16` (master weights stay float32); `auto`: the files' on a GPU, float32 on a CPU."""
    init: str = "pretrained"
    """`pretrained`: the weights of `model.hf_path`; `random`: random weights in the shape of its config."""
    layer_spec: str = "auto"
    """`transformer_engine` or `torch` layers; `auto`: the former in bfloat16 if they can be built, else `torch`."""
    logprob_kernel: str = "auto"
    """Kernels for log-probs of logits: `torch`, `triton`, or `auto`: triton on a GPU, if installed."""
    delta_kernel: str = "auto"
    """Kernels of gated delta nets: `torch`, `fla` (`fla-core`), or `auto`: fla in half precision on a GPU, if there."""

    def __post_init__(self) -> None:
        choose("model.delta_kernel", self.delta_kernel, ("auto", "torch", "fla"))
        choose("model.provider", self.provider, ("native", "bridge"))
        choose("model.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        choose("model.logprob_kernel", self.logprob_kernel, ("auto", "torch", "triton"))
        choose("model.init", self.init, ("pretrained", "random"))
        choose("model.layer_spec", self.layer_spec, ("auto", "transformer_engine", "torch"))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sets the degrees of parallelism. The data-parallel degree is world size / (tensor · pipeline · context)."""

    tensor: Annotated[int, Range(1, 10**5)] = 1
    """Tensor-parallel degree: ranks that share each layer."""
    pipeline: Annotated[int, Range(1, 10**5)] = 1
    """Pipeline-parallel degree: stages that the layers are divided into."""
    virtual_pipeline: Annotated[int, Range(1, 10**5)] = 1
    """Model chunks per pipeline rank (interleaved schedule); above 1 it needs `parallel.pipeline` >= 2."""
    pipeline_layout: tuple[str, ...] = ()
    """Layers of each stage, as `[3, 2, 2]` or in Megatron-Core's notation, `Et*3|(tt|)*2L`; `[]`: balanced stages."""
    context: Annotated[int, Range(1, 10**5)] = 1
    """Context-parallel degree: ranks that split a sequence; `plan.max_tokens_per_microbatch` counts whole sequences."""
    expert: Annotated[int, Range(1, 10**5)] = 1
    """Expert-parallel degree: ranks that divide a layer's experts; other layers use these ranks for TP, CP or DP."""
    expert_tensor: Annotated[int, Range(1, 10**5)] | None = None
    """Tensor-parallel degree within each expert; null: as `parallel.tensor`."""
    sequence_parallel: bool = False
    """Whether Megatron's sequence parallelism is on; it needs `parallel.tensor` >= 2."""

    def __post_init__(self) -> None:
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ConfigError(
                f"parallel.virtual_pipeline={self.virtual_pipeline} needs parallel.pipeline >= 2, and it is 1; raise "
                "parallel.pipeline, or set virtual_pipeline=1"
            )
        if self.sequence_parallel and self.tensor == 1:
            raise ConfigError(
                "parallel.sequence_parallel=true needs parallel.tensor >= 2, and it is 1; raise parallel.tensor, or "
                "set sequence_parallel=false"
            )


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Passes fields to Megatron-Core's own configuration classes.

    Fields that this package sets itself, and fields of features that cannot work here, are refused
    with the reason.
    """

    transformer: dict[str, Any] = field(default_factory=dict)
    """Any fields of Megatron-Core's TransformerConfig, by name."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Any fields of Megatron-Core's DistributedDataParallelConfig, by name."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Any fields of Megatron-Core's OptimizerConfig, by name."""
