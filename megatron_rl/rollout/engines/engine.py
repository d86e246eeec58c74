"""The interface of inference engines to the training loop, and the seed of each sample's random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from megatron_rl.errors import ConfigError
from megatron_rl.types import Prompt, Rollout

if TYPE_CHECKING:
    from megatron_rl.observability.prometheus.live import EngineReading
    from megatron_rl.rollout.engines.sampling import SampleRequest, SampleResult

# A function of a prompt's position in the call, and its whole group in the order of sample_index.
OnFinished = Callable[[int, list[Rollout]], None]
NO_WEIGHTS = -1  # an engine's weight_version before its first complete load_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Holds the result of one weight sync on this rank.

    num_tensors: the number of weight tensors.
    num_bytes: the size of all weights in bytes.
    seconds: the duration of the sync.
    sent_bytes: how many bytes of weights were sent to an engine; the maximum over this rank's
        engines.
    changed_share: the fraction of compared elements that changed since the sync before
        (docs/vllm.md). None if none were compared.
    failed: engine name → the reason of its failure. Empty if all engines now hold the version.
    lost: names of the failed engines that are gone or hang.
    """

    version: int
    num_tensors: int
    num_bytes: int
    seconds: float
    failed: dict[str, str] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    sent_bytes: int = 0
    changed_share: float | None = None


class EngineLost(RuntimeError):
    """Raised if no engine is left for the rest of a call.

    finished: a prompt's position in the call → its rollouts, for each finished group. The caller
        requests the other groups again.
    """

    def __init__(self, message: str, *, finished: Mapping[int, list[Rollout]]) -> None:
        super().__init__(message)
        self.finished = finished


class Engine(Protocol):
    """Samples completions from the trainer's weights. One owner calls it, with one call at a time.

    There are two exceptions. Under ``weight_sync.in_flight`` one thread may generate while another
    thread makes the other calls. With ``rollout.producer.straggler_share``, or under
    ``reward.on_error=retry_sample`` if ``is_elsewhere``, several threads may generate, each in its
    own call.

    Tokens that were sampled before a ``load_weights`` keep their version. Later tokens of the same
    sample carry the new version. Before the first of these, the sample's keys and values are
    computed again with the new weights.

    weight_version: the version of the loaded weights; NO_WEIGHTS before the first complete load.
    lacks_weights: whether an engine of this rank lacks the base model's weights. Then LoRA adapters
        alone do not suffice.
    lost: names of this rank's engines that are known to be gone.
    is_elsewhere: whether the samples are computed in other processes.
    progressed_at: time.monotonic() when an engine last reported that it computes; −inf: never.
    early_end: ends the samples of training early (early_end.py). Only an engine that the run itself
        starts has this field. None: all samples end by themselves.
    """

    weight_version: int
    lacks_weights: bool
    lost: Sequence[str]
    is_elsewhere: bool  # if True, ``generate`` only waits, and may do so in any thread
    progressed_at: float

    def recover(self, lost: Sequence[str]) -> Sequence[str]:
        """Wait until the engine serves, after its start or after a loss. Weights must be loaded afterwards.

        lost: names of the replicas (the single engines behind this object) that any rank knows to be
            gone.

        Returns the names of replicas that do not serve yet. The run goes on without them for now.
        Raises EngineError if the engine does not recover.
        """
        ...

    def leave_out(self, names: Collection[str]) -> None:
        """Stop using the named engines, which some rank cannot reach. Every later ``recover`` tries them again."""
        ...

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Load every weight of version ``version``: full tensors with Hugging Face names, of any device and dtype.

        Every parameter arrives exactly once. A tied alias (``lm_head.weight`` under tied
        embeddings) may be absent. Missing, doubled or unknown names and wrong shapes raise a
        ValueError that names them. After such an error the engine has no usable weights until a
        later call succeeds. Errors of an engine in another process are not raised, but returned in
        the report.
        """
        ...

    def take_report(self, version: int, failed: Collection[str], lost: Collection[str]) -> None:
        """Record the result of the weight sync that has just ended on all ranks.

        failed: names of the engines that do not hold ``version``.
        lost: names of the failed engines that are gone or hang.
        """
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int | Sequence[int],
        *,
        temperature: float | None = None,
        max_tokens: Sequence[int] | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Rollout]:
        """Return the rollouts of all prompts, prompt by prompt, sample_index 0, 1, ... within each.

        samples_per_prompt: the number of samples of every prompt, or one number for each prompt.
        temperature: None for ``rollout.temperature``. 0 for greedy sampling; all samples of a
            prompt are then equal. Only a call with None, for training, obeys ``early_end``.
        max_tokens: for each prompt the maximum of tokens of a sample, from 1 to
            ``rollout.max_response_tokens``. None: ``rollout.max_response_tokens`` for all. The
            tokens before the maximum do not depend on it.
        on_finished: a callable, called in this thread once for each prompt as soon as its group is
            whole. If EngineLost is raised, it was called exactly for the groups in
            ``EngineLost.finished``. If ``on_finished`` raises, the call ends, and no request stays
            under way.

        ``Prompt.attempt`` distinguishes repeated sampling of the same prompt with the same weights.

        Raises ConfigError for a prompt that cannot be run, RuntimeError if no weights are loaded,
        and EngineLost.
        """
        ...

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Return the result of each request, in the order of the requests. Each request has its own settings.

        No request may be longer than the engine's context. Raises RuntimeError if no weights are
        loaded, and EngineLost.
        """
        ...

    def readings(self) -> Sequence[EngineReading]:
        """Return the current state of each engine of this rank. Any thread may call this, and it does not wait."""
        ...

    def sleep(self) -> None:
        """Free the engine's device memory until ``wake``. Does nothing if the engine has no such memory of its own."""
        ...

    def wake(self, *, tags: Sequence[str]) -> None:
        """Take device memory again. ``tags``: "weights" before load_weights, "kv_cache" before generate."""
        ...

    def close(self) -> None:
        """Free all memory. The engine cannot be used afterwards. Closing twice is harmless."""
        ...


def sample_seed(run_seed: int, prompt_id: str, sample_index: int, weight_version: int, attempt: int) -> int:
    """Return a 64-bit seed for one sample, equal on every machine and in every Python process.

    The seed depends on no rank and no batch position. So a run on another number of ranks, or a
    resumed run, draws the same rollouts.

    attempt: distinguishes repeated sampling of the prompt with the same weights.
    """
    # prompt_id comes last because it is the only field of free form. So different samples have different texts.
    identity = f"{run_seed}/{sample_index}/{weight_version}/{attempt}/{prompt_id}"
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little")


def group_sizes(prompts: Sequence[Prompt], samples_per_prompt: int | Sequence[int]) -> list[int]:
    """Return [len(prompts)], the number of samples of each prompt.

    samples_per_prompt: the number of samples of every prompt, or one number for each prompt.

    Raises ConfigError for a number below 1, and ValueError for another count of numbers than prompts.
    """
    sizes = [samples_per_prompt] * len(prompts) if isinstance(samples_per_prompt, int) else list(samples_per_prompt)
    if min(sizes, default=1) < 1:
        raise ConfigError(f"samples_per_prompt={samples_per_prompt} must be at least 1")
    if len(sizes) != len(prompts):
        raise ValueError(
            f"samples_per_prompt has {len(sizes)} numbers for {len(prompts)} prompts; give each one number"
        )
    return sizes


def token_bounds(
    prompts: Sequence[Prompt],
    max_tokens: Sequence[int] | None,
    max_response_tokens: int,
    longest: int,
) -> list[int]:
    """Return [len(prompts)], the maximum of tokens for the samples of each prompt.

    max_tokens: the maximum for each prompt; None: ``rollout.max_response_tokens`` for all.
    longest: the maximum of tokens of a prompt and its response together, in the model or engine.

    Raises ConfigError for an empty prompt, and for a prompt that exceeds ``longest`` with its
    response. Raises ValueError unless ``max_tokens`` has one number
    from 1 to ``rollout.max_response_tokens`` for each prompt.
    """
    bounds = [max_response_tokens] * len(prompts) if max_tokens is None else [int(bound) for bound in max_tokens]
    if len(bounds) != len(prompts) or not all(1 <= bound <= max_response_tokens for bound in bounds):
        raise ValueError(
            f"max_tokens={bounds[:8]} for {len(prompts)} prompts; give each one number from 1 to "
            f"rollout.max_response_tokens={max_response_tokens}"
        )
    for prompt, bound in zip(prompts, bounds, strict=True):
        if not prompt.token_ids:
            raise ConfigError(
                f"prompt {prompt.prompt_id!r} has 0 tokens (text {prompt.text!r}); drop the row or set data.template"
            )
        num_tokens = len(prompt.token_ids) + bound
        if num_tokens > longest:
            setting = "rollout.max_response_tokens" if max_tokens is None else "max_tokens"
            raise ConfigError(
                f"prompt {prompt.prompt_id!r} of {len(prompt.token_ids)} tokens and {setting}={bound} make "
                f"{num_tokens}, above the model's max_position_embeddings={longest}; lower "
                "rollout.max_response_tokens or data.max_prompt_tokens"
            )
    return bounds
