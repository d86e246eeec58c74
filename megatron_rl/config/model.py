"""The sections of the model: its weights, its degrees of parallelism, and fields for Megatron-Core's configurations."""

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
    """Builder of layers: `native`: this package, for its families; `bridge`: NVIDIA Megatron-Bridge, for others."""
    tokenizer_path: str | None = None
    """Directory, or name on the hub, of another tokenizer; null: the tokenizer of `model.hf_path`."""
    allow_unread_tensors: bool = False
    """For tensors in the files that the model does not use: true leaves them out with a warning; false refuses them."""
    dtype: str = "auto"
    """`float32`; `bfloat16`: float32 masters and gradient sums; `auto`: the files' dtype on a GPU, float32 on a CPU."""
    init: str = "pretrained"
    """`pretrained`: the weights of `model.hf_path`; `random`: random weights in the shape of its config."""
    layer_spec: str = "auto"
    """`transformer_engine`, `torch` or `auto`: Transformer Engine in bfloat16 if it can be built, else `torch`."""
    logprob_kernel: str = "auto"
    """Log-probs of logits: `torch`'s operations, `triton`'s kernels, or `auto`: triton on a GPU, if installed."""

    def __post_init__(self) -> None:
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
    """Ranks that share each sequence, two chunks each (zig-zag); a micro-batch's cap counts all ranks' tokens."""
    expert: Annotated[int, Range(1, 10**5)] = 1
    """Ranks that share a mixture's experts; in other layers they are tensor, context or data parallel."""
    expert_tensor: Annotated[int, Range(1, 10**5)] | None = None
    """Ranks that share each expert; null: as many as `parallel.tensor`."""
    sequence_parallel: bool = False
    """Megatron's sequence parallelism; it needs `parallel.tensor` >= 2."""

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
    """Passes fields to Megatron-Core's own configurations; fields that the token sum depends on are refused."""

    transformer: dict[str, Any] = field(default_factory=dict)
    """Any fields of Megatron-Core's TransformerConfig, by name."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Any fields of Megatron-Core's DistributedDataParallelConfig, by name."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Any fields of Megatron-Core's OptimizerConfig, by name."""
