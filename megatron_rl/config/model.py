"""The sections of the model: its weights, its layout over ranks, and fields for Megatron-Core's own configurations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_rl.config.checks import Range, choose
from megatron_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Names the Hugging Face directory of the policy, and how its layers and weights are held here."""

    hf_path: str = ""
    """Folder of config, safetensors and tokenizer, or `owner/name@revision` (docs/object-storage.md); required."""
    provider: str = "native"
    """`native`: layers and names of this package's families; `bridge`: NVIDIA Megatron-Bridge's, for other families."""
    tokenizer_path: str | None = None
    """Another directory, or name on the hub, for the tokenizer; null: `model.hf_path`."""
    allow_unread_tensors: bool = False
    """True leaves out tensors of the files that the model is not made of, with a warning; false refuses them."""
    dtype: str = "auto"
    """`float32`; `bfloat16`, with float32 masters and gradient sums; `auto`: the files' on a GPU, float32 on a CPU."""
    init: str = "pretrained"
    """`pretrained`: the weights of `model.hf_path`; `random`: random ones, of its config's shape only."""
    layer_spec: str = "auto"
    """`transformer_engine`, `torch`, or `auto`: the first if it can be built and dtype is bfloat16, else `torch`."""
    logprob_kernel: str = "auto"
    """`torch`'s operations for log-probs of logits, `triton`'s kernels, or `auto`: these on a GPU, if installed."""

    def __post_init__(self) -> None:
        choose("model.provider", self.provider, ("native", "bridge"))
        choose("model.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        choose("model.logprob_kernel", self.logprob_kernel, ("auto", "torch", "triton"))
        choose("model.init", self.init, ("pretrained", "random"))
        choose("model.layer_spec", self.layer_spec, ("auto", "transformer_engine", "torch"))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sets the degrees of parallelism; the data-parallel one is the world size over tensor · pipeline · context."""

    tensor: Annotated[int, Range(1, 10**5)] = 1
    """Tensor-parallel degree: ranks that share each layer."""
    pipeline: Annotated[int, Range(1, 10**5)] = 1
    """Pipeline-parallel degree: stages that the layers are divided into."""
    virtual_pipeline: Annotated[int, Range(1, 10**5)] = 1
    """Model chunks per stage: Megatron's interleaved schedule; above 1 it needs `parallel.pipeline` >= 2."""
    pipeline_layout: tuple[str, ...] = ()
    """Layers of each stage, `[3, 2, 2]`, or Megatron-Core's `Et*3|(tt|)*2L`; `[]`: such that the stages balance."""
    context: Annotated[int, Range(1, 10**5)] = 1
    """Ranks that share each sequence, two chunks each (zig-zag); a micro-batch's cap counts the tokens of them all."""
    expert: Annotated[int, Range(1, 10**5)] = 1
    """Ranks that share a mixture's experts; elsewhere they are tensor, context or data parallel."""
    expert_tensor: Annotated[int, Range(1, 10**5)] | None = None
    """Ranks that share each expert; null: as `parallel.tensor`."""
    sequence_parallel: bool = False
    """Megatron's sequence parallelism; it needs `parallel.tensor` >= 2."""

    def __post_init__(self) -> None:
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ConfigError(
                f"parallel.virtual_pipeline={self.virtual_pipeline} interleaves pipeline stages and parallel.pipeline "
                "is 1; raise that one"
            )
        if self.sequence_parallel and self.tensor == 1:
            raise ConfigError(
                "parallel.sequence_parallel=true needs parallel.tensor >= 2 and it is 1; raise it or turn it off"
            )


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Passes fields through to Megatron-Core's own configurations; those that the token sum depends on are refused."""

    transformer: dict[str, Any] = field(default_factory=dict)
    """Any fields of Megatron-Core's TransformerConfig, by name."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Any fields of Megatron-Core's DistributedDataParallelConfig, by name."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Any fields of Megatron-Core's OptimizerConfig, by name."""
