"""The number of tokens that a model computes for samples, where samples of one prompt may share it. Pure numpy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from megatron_rl.types import BatchFacts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleTokens:
    """Holds the numbers of tokens of S samples: each sample's own tokens, and the tokens of a shared prompt.

    own:    int64 [S], tokens that are computed for the sample alone.
    prompt: int64 [S], tokens of the sample's prompt, which are computed once for all samples of its
            group in a micro-batch. 0 if the prompt is not shared and counts in ``own``.
    group:  int64 [S], equal for samples whose prompts are equal.
    windows: for each layer the number of tokens that a token attends to, 0 for all earlier ones.
        Empty if no layer has a window.

    Attention over a sequence of l tokens costs l², called its squared tokens. It is twice the number
    of query-key pairs. A response of r tokens to a shared prompt of p tokens has p·r pairs with the
    prompt and r²/2 within itself, so it costs r² + 2·p·r. The prompt costs p² once. With windows,
    the cost is ``window_squares`` instead of l².
    """

    own: np.ndarray
    prompt: np.ndarray
    group: np.ndarray
    windows: tuple[int, ...] = ()

    @classmethod
    def alone(cls, lengths: np.ndarray, windows: tuple[int, ...] = ()) -> SampleTokens:
        """Return a SampleTokens of samples of ``lengths`` [S] tokens each that share no prompt.

        windows: as in SampleTokens.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        return cls(own=lengths, prompt=np.zeros_like(lengths), group=np.arange(len(lengths)), windows=windows)

    @property
    def whole(self) -> np.ndarray:
        """Return int64 [S], each sample's number of tokens if it shares its prompt with no other."""
        return self.own + self.prompt

    @property
    def shares(self) -> bool:
        """Return whether any sample's prompt may be shared with other samples."""
        return bool(self.prompt.any())

    def padded(self, multiple: int) -> SampleTokens:
        """Return a copy in which ``own`` and ``prompt`` are each rounded up to a multiple of ``multiple``."""
        own, prompt = (padded_lengths(part, multiple) for part in (self.own, self.prompt))
        return dataclasses.replace(self, own=own, prompt=prompt)

    def squares(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (own, prompt), float64 [S] each: the attention costs of a sample's own tokens and its shared prompt.

        Without windows they are r² + 2·p·r and p², for r own tokens and p prompt tokens.
        """
        whole, prompt = (window_squares(lengths, self.windows) for lengths in (self.whole, self.prompt))
        return whole - prompt, prompt

    def sums(self, order: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, squares), float64 [M] each: every micro-batch's number of tokens, and its attention cost.

        The cost is in squared tokens (see the class). A prompt that samples share counts once.

        order: int64, the samples' indices, micro-batch by micro-batch.
        offsets: int64 [M + 1], the index in ``order`` at which each micro-batch begins, then the
            length of ``order``. No micro-batch is empty.

        Example: two samples of one group in one micro-batch, own [2, 3], prompt [4, 4] → 2 + 3 + 4 = 9
        tokens, (2² + 2·2·4) + (3² + 2·3·4) + 4² = 69 squared tokens.
        """
        if len(order) == 0:
            return np.zeros(0), np.zeros(0)
        run = dataclasses.replace(self, own=self.own[order], prompt=self.prompt[order], group=self.group[order])
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
        """Return (tokens, squares) of one micro-batch of the samples: its number of tokens, and its attention cost.

        The cost is in squared tokens (see the class).

        samples: int64, the samples' indices.
        """
        tokens, squares = self.sums(samples, np.array([0, len(samples)]))
        return (float(tokens[0]), float(squares[0])) if len(samples) else (0.0, 0.0)


def window_squares(lengths: np.ndarray, windows: tuple[int, ...]) -> np.ndarray:
    """Return float64 [S]: twice the number of query-key pairs in each sequence, averaged over the layers.

    For a sequence of l tokens a layer without a window counts l². A layer whose tokens attend to w
    tokens counts l² − (l − w)² if l is above w, else l².

    lengths: [S], the number of tokens of each sequence.
    windows: the window of each layer, as in SampleTokens.

    Example: length 10, windows (4, 0): (100 − 36 + 100) / 2.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    left_out = sum(np.maximum(lengths - window, 0.0) ** 2 for window in windows if window)
    return lengths**2 - left_out / max(len(windows), 1)


def padded_lengths(lengths: np.ndarray, pad_multiple: int) -> np.ndarray:
    """Return int64, of the shape of ``lengths``: each length rounded up to a multiple of ``pad_multiple``."""
    return -(-lengths // pad_multiple) * pad_multiple


def read_tokens(facts: BatchFacts) -> np.ndarray:
    """Return int64 [S]: the number of response tokens that the model reads for each of S samples.

    It reads those before the sample's last loss token, since a token is predicted from the tokens
    before it. It reads the whole response if ``facts.response_inputs`` is None.
    """
    return facts.response_tokens if facts.response_inputs is None else facts.response_inputs


def tokens_of(facts: BatchFacts, *, share_prompts: bool, windows: tuple[int, ...] = ()) -> SampleTokens:
    """Return the numbers of tokens that the model computes for a batch's samples, without pads.

    Of a response only the tokens before the last loss token are counted (``read_tokens``).

    share_prompts: whether equal prompts of a micro-batch are computed once.
    windows: each layer's attention window, as in SampleTokens. It changes the cost of attention, and
        no number of tokens.
    """
    responses = read_tokens(facts)
    if not share_prompts or facts.prompt_keys is None:
        return SampleTokens.alone(facts.prompt_tokens + responses, windows)
    return SampleTokens(own=responses, prompt=facts.prompt_tokens, group=facts.prompt_keys, windows=windows)
