"""The engine of ``rollout.bitwise``: samples with the trainer's own layers, and so gives the trainer's log-probs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.config import RolloutConfig
from megatron_rl.config.model import ParallelConfig
from megatron_rl.distributed.topology import Grid, initialize
from megatron_rl.errors import ConfigError
from megatron_rl.model.build import build_model
from megatron_rl.model.head import head_weight
from megatron_rl.model.invariant.attention import Cache, CachedSequences
from megatron_rl.model.invariant.layers import compute_for_ranks
from megatron_rl.model.logprob.row_invariant import rank_logits, rank_logprob
from megatron_rl.model.settings import ModelSettings
from megatron_rl.rollout.engines.decoding import Decoded, Row, ends_of, uniforms_of
from megatron_rl.rollout.engines.drawing import draw
from megatron_rl.rollout.engines.embedded import TransformersEngine, check_embedded, stop_tokens
from megatron_rl.rollout.engines.engine import NO_WEIGHTS, SyncReport
from megatron_rl.rollout.engines.sampling import SampleRequest, SampleResult
from megatron_rl.weights.config_json import load_hf_config
from megatron_rl.weights.export import load_weights
from megatron_rl.weights.reader import HEAD_NAME, MemoryReader, used_names


class BitwiseEngine(TransformersEngine):
    """Samples with a second copy of the trainer's model, which gives a sample the same bits in every batch.

    The engine draws tokens as TransformersEngine does, from the same seeds. Its log-probs equal the
    trainer's for the same tokens bit by bit, whatever other samples are in the batches.

    Every rank holds the whole model, on process groups that are separate from the trainer's. The
    model computes the result of each of the trainer's tensor-parallel ranks, one after the other.
    """

    def __init__(
        self,
        settings: ModelSettings,
        tokenizer: PreTrainedTokenizerBase,
        rollout: RolloutConfig,
        *,
        deadline_s: float,
    ) -> None:
        """Build the model, without weights. A collective.

        settings: the trainer's model settings, with ``bitwise`` set and a known dtype.
        deadline_s: the time limit of collectives in seconds.
        """
        path = settings.model.hf_path
        check_embedded(path, rollout)
        hf_config = load_hf_config(path)
        self._grid, self._ranks = Grid(), settings.parallel.tensor
        alone = dataclasses.replace(settings, parallel=ParallelConfig())
        with torch.random.fork_rng(devices=[]), self._grid.active():
            self._topology = initialize(deadline_s=deadline_s, seed=settings.seed)
            (model,), self._shape = build_model(alone, hf_config, self._topology)
        self._hold(
            model.requires_grad_(False).eval(),
            tokenizer,
            rollout,
            settings.seed,
            torch.device("cpu"),
            self._shape.context_tokens,
            stop_tokens(path, tokenizer, self._shape.vocab_size),
        )

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Copy every weight into the model (see ``Engine.load_weights``). ``version``: at least 0."""
        if version < 0:
            raise ValueError(f"load_weights: version={version} must be at least 0")
        model, started = self._open_model(), time.perf_counter()
        # Collect the weights, and check that each arrives once.
        self.weight_version = NO_WEIGHTS
        weights: dict[str, torch.Tensor] = {}
        used = used_names(self._shape)
        for name, tensor in tensors:
            if name in weights:
                raise ValueError(f"load_weights: weight {name!r} arrived twice; export every weight once")
            if name not in used and not (name == HEAD_NAME and self._shape.tied_embeddings):
                raise ValueError(f"load_weights: unknown weight {name!r}; this model has no such name")
            weights[name] = tensor.clone()
        if missing := sorted(used - set(weights)):
            raise ValueError(
                f"load_weights: {len(missing)} of {len(used)} weights did not arrive: {', '.join(missing)}"
            )
        # Load them as from a checkpoint's files.
        try:
            with torch.no_grad(), self._grid.active():
                load_weights([model], self._shape, self._topology, MemoryReader(weights))
                compute_for_ranks(model, self._ranks)
        except ConfigError as error:
            raise ValueError(f"load_weights: {error}") from error
        self.weight_version = version
        return SyncReport(
            version=version,
            num_tensors=len(weights),
            num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in weights.values()),
            seconds=time.perf_counter() - started,
        )

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        raise RuntimeError(
            "rollout.bitwise=true samples rollouts alone; set rollout.bitwise=false for a server's requests"
        )

    @torch.inference_mode()
    def _decode(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row]) -> Decoded:
        """Generate the samples (rows) of one batch, as TransformersEngine does.

        All rows have the same temperature and stop tokens.
        """
        temperature, prompt_of_row = rows[0].temperature, [row.prompt for row in rows]
        limits = np.array([row.max_tokens for row in rows])
        max_steps = int(limits.max())
        uniforms = None if rows[0].greedy else torch.from_numpy(uniforms_of(rows, max_steps))
        with self._grid.active():
            # Run the prompts into the cache.
            model, weight, vocab_size = self._open_model(), head_weight(self._open_model()), self._shape.vocab_size
            width = max(map(len, prompts)) + max_steps
            cache = Cache(num_rows=len(rows) * width)
            hidden = run_prompts(model, cache, prompts, prompt_of_row, width)
            # Draw a token for each row that runs, drop the rows that end, and run the others on their tokens.
            running = np.arange(len(rows))  # numbers of the rows that are still decoded
            prompt_lengths = [len(prompts[prompt]) for prompt in prompt_of_row]
            token_ids = np.zeros((max_steps, len(rows)), dtype=np.int64)
            logprobs = np.zeros((max_steps, len(rows)), dtype=np.float32)
            for step in range(max_steps):
                logits = rank_logits(hidden, weight, vocab_size=vocab_size, ranks=self._ranks)
                numbers = None if uniforms is None else uniforms[step, running]
                tokens, _ = draw(torch.cat(logits, dim=1), temperature, numbers)
                own = rank_logprob(logits, tokens, temperature=temperature)
                token_ids[step, running], logprobs[step, running] = tokens.numpy(), own.numpy()
                goes_on = (limits[running] > step + 1) & ~np.isin(token_ids[step, running], self._stop_ids)
                running = running[goes_on]
                if not len(running):
                    break
                parts = [
                    (np.array([i]), prompt_lengths[row] + step, row * width + np.arange(width))
                    for i, row in enumerate(running)
                ]
                hidden = run(model, cache, tokens[torch.from_numpy(goes_on)], parts)
        lengths, stopped = ends_of(token_ids[: step + 1], rows)
        return Decoded(token_ids=token_ids[: step + 1], logprobs=logprobs[: step + 1], lengths=lengths, stopped=stopped)


def run(
    model: torch.nn.Module, cache: Cache, tokens: torch.Tensor, parts: Sequence[tuple[np.ndarray, int, np.ndarray]]
) -> torch.Tensor:
    """Return the hidden states [T, H] of the tokens ``tokens`` [T], which continue cached sequences.

    parts: a triple for each sequence. Its elements are the indices of the sequence's tokens in
        ``tokens``, the position of the first of them, and the cache's row of every position of the
        sequence, from 0 on.
    """
    packed = CachedSequences.of(cache, parts)
    return model(tokens[None], None, None, packed_seq_params=packed)[0]


def run_prompts(
    model: torch.nn.Module, cache: Cache, prompts: Sequence[tuple[int, ...]], prompt_of_row: Sequence[int], width: int
) -> torch.Tensor:
    """Run the model on each prompt once, and copy the prompt's keys and values to all its samples.

    prompt_of_row: for each sample the index of its prompt, ascending.
    width: the number of the cache's rows that each sample has, one per token. Sample r has the rows
        from r · width to (r + 1) · width − 1.

    Returns [samples, H], the hidden state of each sample's last prompt token.
    """
    starts, first_row = np.cumsum([0, *map(len, prompts)]), np.searchsorted(prompt_of_row, np.arange(len(prompts)))
    parts = [
        (np.arange(starts[i], starts[i + 1]), 0, first_row[i] * width + np.arange(width)) for i in range(len(prompts))
    ]
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    hidden = run(model, cache, tokens, parts)
    for row, prompt in enumerate(prompt_of_row):
        if row != first_row[prompt]:
            place = np.arange(len(prompts[prompt]))
            cache.copy(first_row[prompt] * width + place, row * width + place)
    return hidden[torch.from_numpy(starts[1:] - 1)][torch.tensor(prompt_of_row)]
