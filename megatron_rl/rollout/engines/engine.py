"""The interface that every inference engine offers the loop, and the seed of each sample's random numbers."""

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

# Takes a prompt's position in the call, and its whole group in the order of sample_index.
OnFinished = Callable[[int, list[Rollout]], None]
NO_WEIGHTS = -1  # an engine's weight_version before its first complete load_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Reports one weight sync on this rank.

    num_bytes: the size of the weights.
    sent_bytes: the most bytes of weights that one engine was sent.
    changed_share: of the elements compared with the sync before (docs/vllm.md); None where
        none were.
    failed:    engine → the reason of its failure; empty where all engines hold the version now.
    lost:      the failed engines that are gone or hang.
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
    """Says that no engine is left for the rest of a call.

    finished: the finished groups by their prompt's position in the call; the others are asked for
        again.
    """

    def __init__(self, message: str, *, finished: Mapping[int, list[Rollout]]) -> None:
        super().__init__(message)
        self.finished = finished


class Engine(Protocol):
    """Samples completions from the trainer's weights, for one owner and one call at a time.

    Only under ``weight_sync.in_flight`` may one thread generate while another thread makes the
    other calls, and with ``rollout.producer.straggler_share`` several threads, each a call of its
    own. Tokens that were sampled before a ``load_weights`` keep their version; later ones, from
    keys and values that are computed again, carry the new version.
    """

    weight_version: int
    lacks_weights: bool  # an engine of this rank would take no adapters alone, which belong to weights that it has
    lost: Sequence[str]  # engines of this rank that are known to be gone, by name
    is_elsewhere: bool  # samples in other processes, so that ``generate`` only waits, and may do so in any thread
    progressed_at: float  # time.monotonic() when one of them last said that it computes; −inf where none says so

    def recover(self, lost: Sequence[str]) -> Sequence[str]:
        """Wait until the engine serves, after its start or a loss; its weights must be loaded afterwards.

        lost: names of the engines that any rank knows to be gone.

        Returns the names of the engines that the run can do without for now. Raises EngineError if
        it will not recover.
        """
        ...

    def leave_out(self, names: Collection[str]) -> None:
        """Leave out the engines that some rank cannot reach for now; every later ``recover`` tries them again."""
        ...

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Take over every weight, as full tensors under their Hugging Face names, from any device and dtype.

        Every parameter arrives exactly once; a tied alias (``lm_head.weight`` under tied
        embeddings) may be absent. Missing, doubled or unknown names and wrong shapes raise
        ValueError naming them; the engine then holds no usable weights until a later call succeeds.
        For an engine in another process the report carries its errors, and nothing is raised.
        """
        ...

    def take_report(self, version: int, failed: Collection[str], lost: Collection[str]) -> None:
        """Take the reports of all ranks on the sync that just ended: the names of the failed and the lost engines."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        *,
        temperature: float | None = None,
        max_tokens: Sequence[int] | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Rollout]:
        """Return [len(prompts) * samples_per_prompt] rollouts, prompt by prompt, sample_index 0, 1, ... within each.

        temperature: None for ``rollout.temperature``; at 0 sampling is greedy, and a prompt's
            samples are all the same.
        max_tokens: the most tokens of a sample, one number per prompt, each from 1 to
            ``rollout.max_response_tokens``; None for that maximum. Tokens below the bound are those
            of a call without it.
        on_finished: called in this thread, once for each prompt as soon as its group is whole;
            before an EngineLost exactly for its finished groups. An exception from it ends the
            call, with nothing left under way.

        ``Prompt.attempt`` distinguishes repeated draws for the same prompt at the same weights. Raises ConfigError for
        a prompt that cannot be run, RuntimeError where no weights were loaded, EngineLost.
        """
        ...

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Return the result of each request, each of which has settings of its own, in their order.

        No request may be longer than the engine's context. Raises RuntimeError where no weights
        were loaded, EngineLost.
        """
        ...

    def readings(self) -> Sequence[EngineReading]:
        """Return what is known of this rank's engines now; any thread may ask, and nothing waits."""
        ...

    def sleep(self) -> None:
        """Give the engine's share of the device back until ``wake``; do nothing if it has none of its own."""
        ...

    def wake(self, *, tags: Sequence[str]) -> None:
        """Take the share again: ``weights`` before load_weights, ``kv_cache`` before generate."""
        ...

    def close(self) -> None:
        """Give the memory back; the engine cannot be used afterwards. Closing twice is harmless."""
        ...


def sample_seed(run_seed: int, prompt_id: str, sample_index: int, weight_version: int, attempt: int) -> int:
    """Return a 64-bit seed for one sample, equal on every machine and in every Python process.

    It depends on no rank and no batch position, so another layout, or a resumed run, draws the same
    rollouts.
    """
    # The id comes last: it is the only free-form field, so no two different identities share a text.
    identity = f"{run_seed}/{sample_index}/{weight_version}/{attempt}/{prompt_id}"
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little")


def token_bounds(
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    max_tokens: Sequence[int] | None,
    max_response_tokens: int,
    longest: int,
) -> list[int]:
    """Return [len(prompts)], the most tokens that each prompt's samples may have.

    max_tokens: these bounds; None for ``rollout.max_response_tokens`` each.
    longest: the positions that the model, or the engine, has.

    Raises ConfigError for a request that no engine can sample, ValueError for ``max_tokens`` that
    is not one number from 1 to ``rollout.max_response_tokens`` for each prompt.
    """
    if samples_per_prompt < 1:
        raise ConfigError(f"samples_per_prompt={samples_per_prompt} must be at least 1")
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
