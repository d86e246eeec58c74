"""The settings under which a micro-batch may run a prompt once for all its samples, without changing any result."""

from __future__ import annotations

from megatron_rl.algorithm.signal import COUPLING_FIELDS
from megatron_rl.config import MegatronConfig, ParallelConfig, PlanConfig
from megatron_rl.errors import ConfigError


def token_coupling(megatron: MegatronConfig) -> str | None:
    """Return, as ``key=value``, the first setting that makes a token's activations depend on other samples' tokens.

    Returns None if no setting does.
    """
    fields = megatron.transformer
    for name, harmless in COUPLING_FIELDS.items():
        if name in fields and fields[name] not in harmless:
            return f"megatron.transformer.{name}={fields[name]}"
    return None


def sharing_refusal(parallel: ParallelConfig, megatron: MegatronConfig, layer_spec: str) -> str | None:
    """Return the reason why samples cannot share their prompt under these settings; None if they can.

    Samples of a micro-batch that share their prompt run its tokens once, not once each.

    layer_spec: the kind of the model's layers, "torch" or "transformer_engine".
    """
    if setting := token_coupling(megatron):
        return f"{setting} makes a token's numbers depend on the others that run, and a shared prompt runs once"
    if layer_spec == "transformer_engine":
        return _engine_refusal(parallel, megatron)
    return None


def _engine_refusal(parallel: ParallelConfig, megatron: MegatronConfig) -> str | None:
    if parallel.context > 1:
        return (
            f"parallel.context={parallel.context}: Transformer Engine splits whole sequences over context "
            "ranks, and a response to a shared prompt is a part of one"
        )
    if megatron.transformer.get("apply_rope_fusion"):
        return "megatron.transformer.apply_rope_fusion=true: its kernel has the positions of every segment start at 0"
    return None


def shares_prompts(plan: PlanConfig, parallel: ParallelConfig, megatron: MegatronConfig, layer_spec: str) -> bool:
    """Return whether a micro-batch's samples of one prompt share it, that is, run its tokens once.

    Raises ConfigError if `plan.share_prompts` is true and sharing is impossible.
    """
    wanted = plan.share_prompts
    refusal = None if wanted is False else sharing_refusal(parallel, megatron, layer_spec)
    if wanted and refusal:
        raise ConfigError(f"plan.share_prompts=true: {refusal}; set plan.share_prompts=null or false")
    return wanted is not False and refusal is None
