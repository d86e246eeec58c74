"""Sampling parameters for vLLM. All are set, so that no default of an engine or of generation_config.json applies."""

from __future__ import annotations

from megatron_rl.rollout.engines.engine import NO_WEIGHTS
from megatron_rl.rollout.engines.replica import GenerateRequest


def sampling_parameters(request: GenerateRequest) -> dict[str, object]:
    """Return {field: value} of vllm.SamplingParams (0.32.0) for a request, as JSON-able values."""
    prompt = {"prompt_logprobs": 0} if request.prompt_logprobs else {}  # 0: of the prompt's tokens alone
    return {
        "n": request.n,
        "temperature": request.temperature,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "min_tokens": 0,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,  # only the trainer's stop tokens end a sample
        "logprobs": 0,  # 0: of the sampled token alone
        "flat_logprobs": True,
        "detokenize": False,
        **prompt,
    }


def parse_version(label: str) -> int:
    """Return the weight version that vLLM reports as the text ``label``; NO_WEIGHTS for a text such as "default"."""
    return int(label) if label.isdecimal() else NO_WEIGHTS
