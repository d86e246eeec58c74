"""The data classes that the stages of training pass to each other; all are frozen, and each array's shape is stated.

Suffixes: _P prompts, _G samples of one prompt's group, _S samples, _T tokens, _M micro-batches, _D
data-parallel ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np


class StepKind(Enum):
    """Names the three kinds of the policy's optimizer steps.

    REAL:  forward and backward passes, gradient reduction and an optimizer step.
    GHOST: no sample runs, since none has a gradient. The optimizer steps on a zero gradient, or under
           ``skip.ghost=freeze`` not at all.
    HELD:  the critic's warm-up. The step is counted, and the policy does not change.
    """

    REAL = "REAL"
    GHOST = "GHOST"
    HELD = "HELD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Holds one row of the dataset, tokenized.

    prompt_id: the identity across the run, ``"<row>@<epoch>"``. Seeds derive from it, so it never
        contains a rank.
    token_ids: the prompt's tokens, as the model reads them.
    columns:   every column of the dataset's row; reward functions receive them all.
    attempt:   the number of earlier times that the prompt was answered. Seeds depend on it, so that
               equal weights give new answers.
    messages:  the chat messages that the text was rendered from; None if the row holds plain text.

    Example: ``Prompt(prompt_id="17@0", text="3+4=", token_ids=(5, 13, 6, 14), columns={"prompt":
    "3+4=", "answer": "7"})``
    """

    prompt_id: str
    text: str
    token_ids: tuple[int, ...]
    columns: Mapping[str, object]
    attempt: int = 0
    messages: Sequence[Mapping[str, object]] | None = None

    @property
    def name(self) -> str:
        """Return a name that is unique in the run: the prompt's id, then a dot and ``attempt`` if that is above 0.

        Example: ``17@0.2`` is attempt 2 of prompt ``17@0``.
        """
        return f"{self.prompt_id}.{self.attempt}" if self.attempt else self.prompt_id

    @property
    def row(self) -> str:
        """Return the name of the prompt's data row: its id without the epoch."""
        return self.prompt_id.partition("@")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Holds one completion of one prompt, or one episode: the policy's turns and the environment's messages.

    sample_index:   the sample's index among the samples of its prompt.
    response_ids:   [T] the response's tokens. A turn that ended by a stop token includes it.
    logprobs:       [T] float32, log-probs under the engine's policy at the sampling temperature;
                    0.0 at tokens that the policy did not sample.
    text:           the whole response as text, without special tokens.
    finish_reason:  "stop" (a stop token or the episode's own end), "length"
                    (``rollout.max_response_tokens``) or "decided" (``reward.decided``).
    weight_versions: pairs (version of the trainer's weights, number of consecutive tokens that they
        sampled), in the order of the tokens. An environment's tokens count with the turn before
        them.
    loss_mask:      [T] True at tokens that carry loss: the policy's own tokens, never the
                    environment's. None: all tokens carry loss.
    environment_reward: the sum of the environment's rewards; None without an environment, or if it
                    failed.
    excluded:       the environment's error, because of which the completion does not count in its group
                    (``environment.on_error``: drop or retry_sample); None without an error.
    routed_experts: [prompt + T, layers, top_k] int16, as in Sample; None if they are not recorded.
    context_ids:    the tokens before the response, if an agent made them (docs/agents.md); None: the
                    prompt's tokens.

    Example: the stop token is 0, and the episode is a call (8, 9, 0), its result (4, 2) and the
    answer (4, 2, 0). Then ``response_ids=(8, 9, 0, 4, 2, 4, 2, 0)``, ``loss_mask=(True, True, True,
    False, False, True, True, True)`` and ``logprobs[3:5] == (0.0, 0.0)``.
    """

    prompt: Prompt
    sample_index: int
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    weight_versions: tuple[tuple[int, int], ...]
    loss_mask: tuple[bool, ...] | None = None
    environment_reward: float | None = None
    excluded: str | None = None
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    context_ids: tuple[int, ...] | None = None

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that the policy sampled; the environment wrote the others."""
        return len(self.response_ids) if self.loss_mask is None else sum(self.loss_mask)

    @property
    def num_turns(self) -> int:
        """Return the number of the policy's turns, counted as unbroken sequences of its tokens.

        Two turns with an empty message of the environment between them count as one.
        """
        mask = (True,) if self.loss_mask is None else self.loss_mask
        return sum(own and not before for before, own in zip((False, *mask), mask, strict=False))

    @property
    def weight_version(self) -> int:
        """Return the version of the oldest weights that sampled a token of the response."""
        return min(version for version, _ in self.weight_versions)

    @property
    def sample_id(self) -> str:
        return f"{self.prompt.name}#{self.sample_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Holds the rewards of one sample.

    total:       the weighted sum over the functions that applied. None if none applied, or if one
                 failed under ``reward.on_error`` drop or retry_sample.
    by_function: one value per configured function; None for a function that did not apply.
    error:       the last line of the error of a function that failed on the sample; None if none
                 failed.
    """

    total: float | None
    by_function: tuple[float | None, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Holds the tokens of one sample to train on; only the rank that produced it has them.

    sample_id:     the sample's name, unique in the run.
    prompt_tokens: the number of the prompt's tokens, which come first in ``token_ids``.
    token_ids:     [prompt + response] int64.
    loss_mask:     [response] bool, True where a response token carries loss.
    logprobs:      [response] float32, the engine's log-probs; zeros for a supervised sample.
    routed_experts: [prompt + response, layers, top_k] int16, the experts of each token in each layer,
                   for ``rollout.routing_replay``. −1 is an unknown expert, as of the last token,
                   which the engine samples but does not run. None if they are not recorded.
    weight_version: the version of the oldest weights that sampled a token of the response.

    Example: 3 tokens, one layer, 2 of 4 experts each: ``routed_experts=[[[0, 3]], [[2, 1]], [[-1,
    -1]]]``.
    """

    sample_id: str
    prompt_tokens: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    routed_experts: np.ndarray | None = None
    weight_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchFacts:
    """Holds what every rank knows of a batch's S samples; each field is an array [S] unless stated.

    sample_ids:      names, for messages and metrics.
    groups:          int64, index of the sample's prompt in the batch.
    prompt_tokens, response_tokens: int64, numbers of tokens; masked response tokens count too.
    loss_tokens:     int64, numbers of response tokens that carry loss. A sample with 0 counts in no
                     denominator of the loss.
    owners, owner_rows: int64, the global rank that holds the sample's tokens, and the sample's index
        in the rank's list of samples.
    places:          int64, ascending, each sample's number in the rollout; None in batches that were
                     not gathered from ranks.
    weight_versions: int64, the version of the oldest weights that sampled a token; None if
        ``places`` is None.
    routed_shapes:   int64 [S, 2], (layers, top_k) of the sample's ``routed_experts``, or (0, 0); None
                     if no sample has any.
    prompt_keys:     int64, equal for samples whose prompts are equal, token for token; None if not
                     known.
    response_inputs: int64, numbers of response tokens that the model reads: those before the last
        loss token, or 0 without a loss token. None: it reads the whole responses.
    sample_keys:     int64, equal for samples that are equal in tokens, loss mask, experts, weight
                     version, and the engine's log-probs if the loss may read them. None if not known.

    Example: two groups of two samples on two ranks: ``groups=[0,0,1,1], owners=[0,0,1,1],
    owner_rows=[0,1,0,1]``.
    """

    sample_ids: tuple[str, ...]
    groups: np.ndarray
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    loss_tokens: np.ndarray
    owners: np.ndarray
    owner_rows: np.ndarray
    routed_shapes: np.ndarray | None = None
    places: np.ndarray | None = None
    weight_versions: np.ndarray | None = None
    prompt_keys: np.ndarray | None = None
    response_inputs: np.ndarray | None = None
    sample_keys: np.ndarray | None = None

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    @property
    def total_tokens(self) -> np.ndarray:
        """Return int64 [S]: each sample's number of prompt and response tokens together, without pads."""
        return self.prompt_tokens + self.response_tokens

    @property
    def response_offsets(self) -> np.ndarray:
        """Return int64 [S + 1]: each response's start among all response tokens; the last entry is their total."""
        return np.concatenate([[0], np.cumsum(self.response_tokens)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """Holds the advantages of a batch, per sample and, if they differ within a sample (``gae``), per token.

    of_sample: float64 [S], the advantage of a sample's loss tokens; their mean if they differ.
    of_token: float64 [T], flat over response tokens and 0 at tokens without loss. None if all loss
        tokens of a sample have the same advantage.
    """

    of_sample: np.ndarray
    of_token: np.ndarray | None = None

    def largest(self, response_tokens: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Return float64 [S], the largest |weight · advantage| among the response tokens of each sample.

        response_tokens: int64 [S], the number of response tokens of each sample.
        weights: [T] flat, ≥ 0, the importance weight of each token; None: 1.
        """
        starts = np.cumsum(response_tokens) - response_tokens
        if not len(starts) or (self.of_token is None and weights is None):
            return np.abs(self.of_sample)
        if self.of_token is None:
            return np.abs(self.of_sample) * np.maximum.reduceat(weights, starts)
        return np.maximum.reduceat(np.abs(self.of_token) * (1.0 if weights is None else weights), starts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """Holds the float32 inputs of the policy's loss, per sample [S] or per response token [T].

    Arrays [T] are flat, sample after sample (BatchFacts.response_offsets).

    advantages: [S], each sample's advantage times its entry of ``weights``.
    weights: [S], the weight that ``loss.reduction`` gives each sample's tokens (docs/semantics.md §1).
    old_logprobs, reference_logprobs: [T], log π_old and the reference policy's; None if no pass gave
        them.
    importance_weights: [T], factors of the tokens' advantages (algorithm/importance.py); None: 1.
    token_advantages: [T], each token's advantage times its sample's entry of ``weights``, in place of
        ``advantages`` (``gae``); None: ``advantages`` are used.
    kl_coefficient: β of the KL to the reference in the loss; at 0 the KL is only measured. None:
        ``loss.kl_coefficient``.
    measured: [S], how often the step's metrics count each token of a sample; None: once for all
        samples in its micro-batches.
    """

    advantages: np.ndarray
    weights: np.ndarray
    old_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    importance_weights: np.ndarray | None = None
    token_advantages: np.ndarray | None = None
    kl_coefficient: float | None = None
    measured: np.ndarray | None = None

    def gather(self, samples: np.ndarray, flat: np.ndarray) -> dict[str, np.ndarray | float]:
        """Return {name of the loss's input: its value [N] at N loss tokens}; an input that is None is left out.

        ``kl_coefficient``, if given, is a single number. Each token's advantage is multiplied by its
        importance weight.

        samples: [N], the sample of each token.
        flat: [N], the position of each token in the flat arrays [T].
        """
        importance = 1.0 if self.importance_weights is None else self.importance_weights[flat]
        advantages = self.advantages[samples] if self.token_advantages is None else self.token_advantages[flat]
        inputs = {"advantages": advantages * importance, "weights": self.weights[samples]}
        logprobs = {"old_logprobs": self.old_logprobs, "reference_logprobs": self.reference_logprobs}
        inputs |= {} if self.kl_coefficient is None else {"kl_coefficient": self.kl_coefficient}
        inputs |= {} if self.measured is None else {"measured": self.measured[samples]}
        return inputs | {name: values[flat] for name, values in logprobs.items() if values is not None}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueInputs:
    """Holds the float32 inputs of the critic's loss.

    weights: [S], the weight that ``loss.reduction`` gives each sample's tokens (docs/semantics.md §1).
    returns: [T], flat over response tokens, the returns that values are fitted to.
    old_values: [T], flat, the critic's values before the update.
    """

    weights: np.ndarray
    returns: np.ndarray
    old_values: np.ndarray

    def gather(self, samples: np.ndarray, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return {name of the loss's input: its value [N] at N loss tokens}; arguments as in ``LossInputs.gather``."""
        return {"weights": self.weights[samples], "returns": self.returns[flat], "old_values": self.old_values[flat]}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Holds the samples that one forward pass runs, packed one after the other without padding between (THD).

    samples: int64 [K], indices into the arrays [S] of BatchFacts.
    filler:  True if the micro-batch trains nothing, and only gives its rank as many micro-batches as
             other ranks have. It holds one sample of the mini-batch, with every loss weight 0.
    """

    samples: np.ndarray
    filler: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """Describes one optimizer step: the samples of each data-parallel rank's micro-batches, in CSR layout.

    CSR layout is one flat array with the offsets at which its parts begin, here micro-batches and ranks.

    members:             int64 [B], the samples of the mini-batch before any is dropped.
    dropped:             int64, the members that are dropped; no pass runs them, except in a filler.
    order:               int64 [K], the samples that run, rank by rank and micro-batch by
                         micro-batch.
    microbatch_offsets:  int64 [M + 1]: micro-batch m is order[microbatch_offsets[m] :
                         microbatch_offsets[m + 1]].
    rank_offsets:        int64 [D + 1]: data-parallel rank d runs micro-batches rank_offsets[d] to
                         rank_offsets[d + 1] − 1.
    filler_microbatches: bool [M], True for a filler, a micro-batch without a loss that only evens the
        ranks' numbers of micro-batches. Its sample may be dropped, or run in another micro-batch
        too.
    microbatches_dropped: the number of micro-batches in a plan without drops, less the number in
        this plan; both numbers count fillers.

    Example: two ranks; rank 0 runs [3, 1] and [4], rank 1 nothing:
    ``order=[3,1,4], microbatch_offsets=[0,2,3], rank_offsets=[0,2,2]``.
    """

    kind: StepKind
    members: np.ndarray
    dropped: np.ndarray
    order: np.ndarray
    microbatch_offsets: np.ndarray
    rank_offsets: np.ndarray
    filler_microbatches: np.ndarray
    microbatches_dropped: int = 0

    @property
    def num_microbatches(self) -> np.ndarray:
        """Return int64 [D], the number of micro-batches of each data-parallel rank, fillers included."""
        return np.diff(self.rank_offsets)

    @property
    def ran(self) -> np.ndarray:
        """Return int64 indices of the mini-batch's samples that are not dropped: those that run and add to the loss."""
        return np.setdiff1d(self.members, self.dropped)

    @property
    def silent_ranks(self) -> int:
        """Return the number of data-parallel ranks that run no micro-batch in a REAL step, not even a filler.

        Other kinds of step have 0.
        """
        return int((self.num_microbatches == 0).sum()) if self.kind is StepKind.REAL else 0

    @property
    def num_fillers(self) -> int:
        """Return the number of fillers (micro-batches without a loss, added so that all ranks run equally many)."""
        return int(self.filler_microbatches.sum())

    def microbatches(self, data_parallel_rank: int) -> Iterator[MicroBatch]:
        for m in range(self.rank_offsets[data_parallel_rank], self.rank_offsets[data_parallel_rank + 1]):
            start, stop = self.microbatch_offsets[m], self.microbatch_offsets[m + 1]
            yield MicroBatch(samples=self.order[start:stop], filler=bool(self.filler_microbatches[m]))

    def rank_samples(self, data_parallel_rank: int) -> np.ndarray:
        """Return int64 indices of the samples that a data-parallel rank runs, in order, fillers' samples included."""
        first, last = self.rank_offsets[data_parallel_rank : data_parallel_rank + 2]
        return self.order[self.microbatch_offsets[first] : self.microbatch_offsets[last]]


_PLAN_ARRAYS = ("members", "dropped", "order", "microbatch_offsets", "rank_offsets", "filler_microbatches")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchPlan:
    """Holds the plans of a batch's optimizer steps, in order; has conversions to JSON, and digests that ranks compare.

    purpose: "train" or "logprob"; the digests depend on it.
    mini_batches: one plan per optimizer step.
    details: JSON-able values that are kept in the JSON form; the digests do not depend on them.
    """

    purpose: str
    mini_batches: tuple[StepPlan, ...]
    details: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> str:
        def encode(mini_batch: StepPlan) -> dict:
            arrays = {name: [int(x) for x in getattr(mini_batch, name)] for name in _PLAN_ARRAYS}
            return {"kind": mini_batch.kind.value, "microbatches_dropped": mini_batch.microbatches_dropped, **arrays}

        entries = [encode(x) for x in self.mini_batches]
        return json.dumps({"purpose": self.purpose, "mini_batches": entries, "details": dict(self.details)})

    @staticmethod
    def from_json(text: str) -> BatchPlan:
        content = json.loads(text)

        def decode(entry: dict) -> StepPlan:
            arrays = {name: np.asarray(entry[name], dtype=np.int64) for name in _PLAN_ARRAYS}
            arrays["filler_microbatches"] = arrays["filler_microbatches"].astype(bool)
            return StepPlan(kind=StepKind(entry["kind"]), microbatches_dropped=entry["microbatches_dropped"], **arrays)

        mini_batches = tuple(decode(x) for x in content["mini_batches"])
        return BatchPlan(purpose=content["purpose"], mini_batches=mini_batches, details=content["details"])

    def held(self) -> BatchPlan:
        """Return a copy whose steps all have kind HELD: they are counted, and the policy does not change.

        Raises ValueError if a step has samples to run.
        """
        if any(len(step.order) for step in self.mini_batches):
            raise ValueError("a plan that runs samples cannot be held; plan it without signal")
        return replace(self, mini_batches=tuple(replace(step, kind=StepKind.HELD) for step in self.mini_batches))

    def fingerprints(self) -> tuple[bytes, ...]:
        """Return one 32-byte digest per optimizer step, over the purpose, the step's kind and the step's arrays.

        Equal plans have equal digests.
        """
        digests = []
        for mini_batch in self.mini_batches:
            digest = hashlib.sha256(f"{self.purpose}/{mini_batch.kind.value}".encode())
            for name in _PLAN_ARRAYS:
                digest.update(name.encode() + np.ascontiguousarray(getattr(mini_batch, name), dtype=np.int64).tobytes())
            digests.append(digest.digest())
        return tuple(digests)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Holds the results of one optimizer step.

    applied: whether the optimizer changed the weights.
    sums: sums and counts over all ranks, by name (``loss``, ``tokens``, ``entropy``, ``clipped``
          ...), undivided; observability/metrics.py divides them.
    """

    kind: StepKind
    grad_norm: float
    learning_rate: float
    applied: bool
    sums: Mapping[str, float]
