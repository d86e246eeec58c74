"""The conversion of vLLM's completions to training rollouts, or to a ``SampleResult``, with checks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_rl.errors import EngineError
from megatron_rl.rollout.engines.replica import Completion, GenerateRequest
from megatron_rl.rollout.engines.sampling import SEED_BITS, SampledSequence, SampleRequest, SampleResult
from megatron_rl.rollout.vllm.routed_experts import sample_rows
from megatron_rl.types import Prompt, Rollout


def generate_request(name: str, request: SampleRequest) -> GenerateRequest:
    """Return a ``SampleRequest`` in the form of a request to vLLM. ``name``: the id of the vLLM request.

    The vLLM request has no stop texts, since the engine has no tokenizer. ``Answers.result``
    applies them afterwards.

    Raises EngineError if log-probs of the most likely tokens are requested, which vLLM engines do
    not serve here.
    """
    if request.top or request.prompt_top:
        raise EngineError(
            "log-probs of the most likely tokens are not served by rollout.engine=vllm; ask for none, or set "
            "rollout.engine=transformers"
        )
    return GenerateRequest(
        request_id=name,
        token_ids=request.token_ids,
        n=request.num_samples if request.temperature else 1,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        stop_token_ids=request.stop_ids,
        top_k=request.top_k,
        top_p=request.top_p,
        prompt_logprobs=request.prompt_logprobs,
    )


def rollout_request(
    name: str,
    prompt: Prompt,
    samples: int,
    *,
    seed: int,
    temperature: float,
    max_tokens: int,
    stop_ids: tuple[int, ...],
) -> GenerateRequest:
    """Return the request to vLLM for a prompt's group of samples. Greedy samples are equal, so one is requested.

    name: the id of the vLLM request.
    """
    return GenerateRequest(
        request_id=name,
        token_ids=prompt.token_ids,
        n=samples if temperature else 1,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed & ((1 << SEED_BITS) - 1),
        stop_token_ids=stop_ids,
    )


class Answers:
    """Converts vLLM's completions to rollouts, or to a ``SampleResult``, and checks them.

    vocab_size: the number of token ids. A completion with an id of this size or above is refused.
    needs_experts: whether each rollout must hold the experts to which vLLM routed its tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, needs_experts: bool = False) -> None:
        self._tokenizer, self._vocab_size, self._needs_experts = tokenizer, vocab_size, needs_experts

    def rollouts(
        self, prompt: Prompt, completions: Sequence[Completion], samples: int, stop_ids: tuple[int, ...]
    ) -> list[Rollout]:
        """Return the rollouts of a prompt, one for each completion. Raises EngineError for an invalid completion.

        samples: the number of rollouts. A single completion, from greedy sampling, is repeated for
            all of them.
        stop_ids: the tokens that end a response. No other token ends one, since vLLM's
            ``ignore_eos`` is set.
        """
        if len(completions) == 1:
            completions = [completions[0]] * samples
        return [self._rollout(prompt, index, completion, stop_ids) for index, completion in enumerate(completions)]

    def _rollout(self, prompt: Prompt, index: int, completion: Completion, stop_ids: tuple[int, ...]) -> Rollout:
        name, experts = f"{prompt.prompt_id}#{index}", None
        token_ids = self._checked(name, completion, stop_ids)
        if self._needs_experts:
            experts = sample_rows(name, completion.routed_experts, len(prompt.token_ids), len(token_ids))
        versions = completion.weight_versions
        if sum(count for _, count in versions) != len(token_ids):
            raise EngineError(f"sample {name} of {len(token_ids)} tokens came with weight versions {versions}")
        body = token_ids[:-1] if completion.finish_reason == "stop" else token_ids
        return Rollout(
            prompt=prompt,
            sample_index=index,
            response_ids=token_ids,
            logprobs=tuple(completion.logprobs.tolist()),
            text=self._tokenizer.decode(list(body), skip_special_tokens=True),
            finish_reason=completion.finish_reason,
            weight_versions=versions,
            routed_experts=experts,
        )

    def _checked(self, name: str, completion: Completion, stop_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return a completion's token ids. Raises EngineError for an unknown id or a wrong finish_reason.

        An id is known if it is from 0 to ``vocab_size`` − 1. The finish_reason must be "stop" if
        the last token is in ``stop_ids``, and only then.

        name: the sample's name, for the error.
        """
        token_ids = tuple(completion.token_ids.tolist())
        if max(token_ids) >= self._vocab_size or min(token_ids) < 0:
            raise EngineError(
                f"sample {name} holds token {max(token_ids)}; the vocabulary ends at {self._vocab_size - 1}"
            )
        if (token_ids[-1] in stop_ids) != (completion.finish_reason == "stop"):
            raise EngineError(
                f"sample {name} ended by {completion.finish_reason!r} with token {token_ids[-1]}, and the stop tokens "
                f"are {list(stop_ids)}"
            )
        return token_ids

    def result(self, request: SampleRequest, completions: Sequence[Completion]) -> SampleResult:
        """Return the result of a sampling request. Each sample is cut after the first stop text in it.

        Raises EngineError for an invalid completion, or if requested log-probs of the prompt are
        missing.
        """
        prompt = None
        if request.prompt_logprobs:
            prompt = completions[0].prompt_logprobs
            if prompt is None or len(prompt) != len(request.token_ids):
                raise EngineError(f"request {request.request_id}: the engine gave no log-probs of the prompt's tokens")
        if len(completions) == 1:
            completions = [completions[0]] * request.num_samples
        sequences = [self._sequence(request, i, completion) for i, completion in enumerate(completions)]
        return SampleResult(sequences=sequences, prompt_logprobs=prompt)

    def _sequence(self, request: SampleRequest, index: int, completion: Completion) -> SampledSequence:
        token_ids = self._checked(f"{request.request_id}#{index}", completion, request.stop_ids)
        length, reason = len(token_ids), completion.finish_reason
        reach = max((len(stop.encode()) for stop in request.stop_texts), default=0) + 1  # most tokens in a stop
        for end in range(1, length + 1) if request.stop_texts else ():
            text = self._tokenizer.decode(list(token_ids[max(0, end - reach) : end]))
            if any(stop in text for stop in request.stop_texts):
                length, reason = end, "stop"
                break
        return SampledSequence(
            token_ids=np.array(token_ids[:length], dtype=np.int32),
            logprobs=completion.logprobs[:length],
            finish_reason=reason,
        )
