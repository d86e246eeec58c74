"""The layout of a micro-batch: the order of its samples' tokens, in which samples can share one copy of a prompt.

A segment is a run of tokens of one sequence, and the segments lie end to end. A sample that shares
no prompt is one segment: prompt and response. Samples that share a prompt are a segment of the
prompt, followed by a segment for each response. A response's queries see the prompt's keys and its
own, at positions that continue from the prompt. The prompt's last hidden state predicts the
response's first token. So each sample's log-probs are the same as without sharing: attention gives
it the same keys, and everything else is computed token by token.

A response's last loss token and all later tokens are left out of the micro-batch, since no loss
token is predicted from them. A response that has no token left has no segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.model.attention.spans import WHOLE, ContextShard, Span, causal_spans
from megatron_rl.planning.tokens import window_squares


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompt:
    """Identifies a prompt that several samples share.

    segment: the index of the prompt's segment. The next ``num_responses`` segments are the
        responses to the prompt.
    tokens: the number of the prompt's tokens, without pads.
    """

    segment: int
    tokens: int
    num_responses: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Holds where the tokens of K samples lie in a micro-batch.

    A segment is a run of tokens of one sequence: a whole sample, a shared prompt, or a response to
    one.

    lengths: the number of tokens of each segment, pads included.
    offsets: the sequence position of each segment's first token: 0, or for a response to a shared
        prompt the number of the prompt's tokens.
    prompts: int64 [K], the index in the micro-batch of each sample's first prompt token.
    responses: int64 [K], the index in the micro-batch of each sample's first response token; not to
        be read if the micro-batch has no token of the response.
    shared: the prompts that several samples share.
    """

    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    prompts: np.ndarray
    responses: np.ndarray
    shared: tuple[SharedPrompt, ...] = ()

    @classmethod
    def of(cls, lengths: tuple[int, ...]) -> Layout:
        """Return the layout of sequences of these lengths, without shared prompts.

        The layout does not divide a sequence into prompt and response. So do not read the field
        ``responses``.
        """
        starts = np.cumsum([0, *lengths])[:-1]
        return cls(lengths=lengths, offsets=(0,) * len(lengths), prompts=starts, responses=starts)

    @property
    def starts(self) -> np.ndarray:
        """Return int64 [segments + 1], the index of each segment's first token, then the number of all tokens."""
        return np.cumsum([0, *self.lengths])

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest sequence; a response's sequence includes the shared prompt."""
        return max(length + offset for length, offset in zip(self.lengths, self.offsets, strict=True))

    def squares(self, windows: tuple[int, ...]) -> float:
        """Return the sum of l² over sequences of l tokens, a measure of attention's cost.

        It is twice the number of query-key pairs. A response of r tokens to a shared prompt of p
        tokens counts r² + 2·p·r. If layers have windows, the result is the mean over all layers.

        windows: each layer's attention window in tokens, 0 for none; () if no layer has one. Fewer
            pairs are counted in a layer with a window.
        """
        offsets = np.array(self.offsets)
        whole, prompts = (window_squares(x, windows) for x in (offsets + np.array(self.lengths), offsets))
        return float((whole - prompts).sum())

    def positions(self) -> np.ndarray:
        """Return int64 [T], the position of each token in its sequence, from 0."""
        return np.concatenate([np.arange(n) + offset for n, offset in zip(self.lengths, self.offsets, strict=True)])

    def spans(self, context: ContextShard = WHOLE) -> list[Span]:
        """Return the spans (query ranges with the key ranges that they see) of this context rank's queries.

        Causal triangles (spans in which query i sees keys 0 to i) come first. Each query is in
        exactly one of them.
        """
        starts, spans = self.starts, causal_spans(self.lengths, context)
        for prompt in self.shared:
            responses = self.responses_of(prompt)
            first = int(starts[responses.start]) // context.size
            stop = int(starts[responses.stop]) // context.size
            if stop > first:
                spans.append(Span(first, stop - first, int(starts[prompt.segment]), prompt.tokens, False))
        return spans

    @staticmethod
    def responses_of(prompt: SharedPrompt) -> range:
        """Return the indices of the segments that hold the responses to a shared prompt."""
        return range(prompt.segment + 1, prompt.segment + 1 + prompt.num_responses)


def lay_out(
    prompt_tokens: np.ndarray,
    response_tokens: np.ndarray,
    groups: np.ndarray | None,
    pad_multiple: int = 1,
    row_multiple: int = 1,
) -> Layout:
    """Return the layout of K samples in their order, except that samples that share a prompt lie together.

    prompt_tokens, response_tokens: int64 [K], the number of tokens of each prompt and of each
        response; a response may have none.
    groups: int64 [K]; samples with equal numbers share their prompt. None if no sample shares a
        prompt.
    pad_multiple: the length of each segment (see ``Layout``) is padded to a multiple of this
        number.
    row_multiple: the length of the whole micro-batch is padded to a multiple of this number, by
        pads in the last segment.

    Example: two samples of one group, with a prompt of 3 tokens and responses of 2 and 1, have
    segments of 3, 2 and 1 tokens. The responses begin at the indices 3 and 5.
    """
    count = len(prompt_tokens)
    keys = np.arange(count) if groups is None else groups
    lengths: list[int] = []
    offsets: list[int] = []
    shared: list[SharedPrompt] = []
    prompts, responses = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    start = 0

    def lay(tokens: int, offset: int) -> int:
        nonlocal start
        first = start
        lengths.append(-(-tokens // pad_multiple) * pad_multiple)
        offsets.append(offset)
        start += lengths[-1]
        return first

    # a prompt and its responses at a time
    for key in dict.fromkeys(keys.tolist()):
        slots = np.flatnonzero(keys == key)
        tokens = int(prompt_tokens[slots[0]])
        if len(slots) == 1:
            prompts[slots] = lay(tokens + int(response_tokens[slots[0]]), 0)
            responses[slots] = prompts[slots] + tokens
            continue
        with_own = slots[response_tokens[slots] > 0]
        if len(with_own):
            shared.append(SharedPrompt(segment=len(lengths), tokens=tokens, num_responses=len(with_own)))
        prompts[slots] = lay(tokens, 0)
        responses[slots] = start
        for slot in with_own:
            responses[slot] = lay(int(response_tokens[slot]), tokens)
    lengths[-1] += -start % row_multiple
    return Layout(
        lengths=tuple(lengths), offsets=tuple(offsets), prompts=prompts, responses=responses, shared=tuple(shared)
    )
