"""The tokens that samples run: a prompt that several samples share runs once in each micro-batch. Pure numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.types import BatchFacts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleTokens:
    """Holds the tokens of each of S samples, apart for its prompt where samples may share it.

    own:    int64 [S], tokens that run for the sample itself.
    prompt: int64 [S], tokens of its prompt, which run once for all samples of its group in a micro-batch; 0 where the
            prompt is among ``own``.
    group:  int64 [S], equal where the prompts are.

    Attention costs Σ l² of sequences that stand alone; an answer of r tokens to a shared prompt of p sees p·r keys
    besides its own triangle, so that it costs r² + 2·p·r, and the prompt p² once.
    """

    own: np.ndarray
    prompt: np.ndarray
    group: np.ndarray

    @classmethod
    def alone(cls, lengths: np.ndarray) -> SampleTokens:
        """Return samples of [S] ``lengths`` that share nothing."""
        lengths = np.asarray(lengths, dtype=np.int64)
        return cls(own=lengths, prompt=np.zeros_like(lengths), group=np.arange(len(lengths)))

    @property
    def whole(self) -> np.ndarray:
        """Return int64 [S], the tokens that each sample would run by itself."""
        return self.own + self.prompt

    @property
    def shares(self) -> bool:
        """Return whether any prompt is kept apart."""
        return bool(self.prompt.any())

    def padded(self, multiple: int) -> SampleTokens:
        """Return the same with each part rounded up to the multiple."""
        own, prompt = (padded_lengths(part, multiple) for part in (self.own, self.prompt))
        return SampleTokens(own=own, prompt=prompt, group=self.group)

    def squares(self) -> tuple[np.ndarray, np.ndarray]:
        """Return float64 [S] twice: the squared tokens of each sample's own part, and of its prompt."""
        own, prompt = self.own.astype(np.float64), self.prompt.astype(np.float64)
        return own * own + 2 * own * prompt, prompt * prompt

    def sums(self, order: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return float64 [M] twice: tokens and squared tokens of each micro-batch.

        order: int64, samples, micro-batch by micro-batch. offsets: int64 [M + 1] into it; none is empty.

        Example: two samples of one group, own [2, 3], prompt [4, 4]: 9 tokens, squared 4 + 16 + 9 + 24 + 16.
        """
        if len(order) == 0:
            return np.zeros(0), np.zeros(0)
        run = SampleTokens(own=self.own[order], prompt=self.prompt[order], group=self.group[order])
        own_squares, prompt_squares = run.squares()
        tokens = np.add.reduceat(run.own.astype(np.float64), offsets[:-1])
        squares = np.add.reduceat(own_squares, offsets[:-1])
        if run.shares:
            microbatch = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
            first = np.unique(np.stack([microbatch, run.group]), axis=1, return_index=True)[1]
            np.add.at(tokens, microbatch[first], run.prompt[first].astype(np.float64))
            np.add.at(squares, microbatch[first], prompt_squares[first])
        return tokens, squares

    def total(self, samples: np.ndarray) -> tuple[float, float]:
        """Return the tokens and the squared tokens of samples in one micro-batch."""
        tokens, squares = self.sums(samples, np.array([0, len(samples)]))
        return (float(tokens[0]), float(squares[0])) if len(samples) else (0.0, 0.0)


def padded_lengths(lengths: np.ndarray, pad_multiple: int) -> np.ndarray:
    """Return int64: each length rounded up to the multiple."""
    return -(-lengths // pad_multiple) * pad_multiple


def read_tokens(facts: BatchFacts) -> np.ndarray:
    """Return int64 [S], the response tokens that run. No number depends on those from the last loss token on."""
    return facts.response_tokens if facts.response_inputs is None else facts.response_inputs


def tokens_of(facts: BatchFacts, *, share_prompts: bool) -> SampleTokens:
    """Return the tokens that a batch's samples run, without pads: none after the last that a loss token needs."""
    responses = read_tokens(facts)
    if not share_prompts or facts.prompt_keys is None:
        return SampleTokens.alone(facts.prompt_tokens + responses)
    return SampleTokens(own=responses, prompt=facts.prompt_tokens, group=facts.prompt_keys)
