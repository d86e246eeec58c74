"""The embedded engine: a Hugging Face model in the trainer's own process, for small models, laptops and CI."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from megatron_rl.config import RolloutConfig
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.engine import NO_WEIGHTS, OnFinished, SyncReport, sample_seed, token_bounds
from megatron_rl.rollout.expert_notes import ExpertNotes
from megatron_rl.rollout.prefill import counts_pads, cut_batches, run_prompts
from megatron_rl.rollout.sampling import SampleRequest, SampleResult
from megatron_rl.rollout.transformers_sampling import sample_requests
from megatron_rl.types import Prompt, Rollout
from megatron_rl.weights.config_json import parse_hf_config, settle_tying, stop_ids, transformers_model
from megatron_rl.weights.fused import file_tensors

MAX_EMBEDDED_PARAMETERS = 1_000_000_000
# Compacting copies the cache of the rows that stay, about the cost of one decode step's torch.cat; below a
# quarter finished, the rows it saves do not pay for that copy within a few steps.
COMPACT_FRACTION = 0.25


class TransformersEngine:
    """Samples with a Hugging Face causal LM that is built from its config; weights come by ``load_weights``.

    It is an ``Engine`` (rollout/engine.py). A row's draws come from a generator of its own (``sample_seed``), so its
    tokens do not depend on the rows that share its batch, beyond float rounding of the logits.

    Example: ``TransformersEngine(path, tokenizer, RolloutConfig(), seed=0, dtype=torch.float32,
    device=torch.device("cpu"))``
    """

    def __init__(
        self,
        hf_path: str,
        tokenizer: PreTrainedTokenizerBase,
        rollout: RolloutConfig,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Build the model, without weights. ``seed``: the run's seed.

        Raises ConfigError for a directory that does not exist, a model too large, or an impossible stop token.
        """
        model = _build_model(hf_path, rollout, dtype, device)
        text_config = model.config.get_text_config()
        stop_ids = stop_tokens(hf_path, tokenizer, text_config.vocab_size)
        self._hold(model, tokenizer, rollout, seed, device, int(text_config.max_position_embeddings), stop_ids)
        self._alike = counts_pads(model)

    def _hold(
        self,
        model: torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        rollout: RolloutConfig,
        seed: int,
        device: torch.device,
        max_positions: int,
        stop_ids: Sequence[int],
    ) -> None:
        """Take over what every embedded engine has, before any weights."""
        self.weight_version = NO_WEIGHTS
        self._tokenizer, self._rollout, self._seed, self._device = tokenizer, rollout, seed, device
        self._model: torch.nn.Module | None = model
        self._max_positions, self._stop_ids = max_positions, stop_ids
        self._notes = ExpertNotes(model) if rollout.routing_replay == "rollout" else None

    lost = ()
    lacks_weights = True  # it takes no adapters apart from the weights
    is_elsewhere, progressed_at, _alike = False, -math.inf, False

    def recover(self, lost: Sequence[str]) -> Sequence[str]:
        """Do nothing: the engine is in this process, and lives and dies with it."""
        return ()

    def leave_out(self, names: Collection[str]) -> None:
        """Do nothing: no rank can fail to reach it (see ``recover``)."""

    def take_report(self, version: int, failed: Collection[str], lost: Collection[str]) -> None:
        """Do nothing: ``load_weights`` has raised every error."""

    def sleep(self) -> None:
        """Do nothing: the weights and caches are this process's own."""

    def wake(self, *, tags: Sequence[str]) -> None:
        """Do nothing: ``sleep`` gave nothing back."""

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Copy every weight into the model, as ``Engine.load_weights`` does; rollouts carry ``version`` >= 0.

        Names are those of checkpoint files; a mixture's fused experts take them in part by part.
        """
        if version < 0:
            raise ValueError(f"load_weights: version={version} must be at least 0")
        model = self._open_model()
        # Targets are parameters and persistent buffers, tied aliases under each of their names.
        targets = file_tensors(model.state_dict(keep_vars=True), model.config.get_text_config().model_type)
        owners: dict[int, str] = {}
        for name, target in targets.items():
            owners.setdefault(id(target), name)
        started, num_bytes = time.perf_counter(), 0
        self.weight_version = NO_WEIGHTS  # a load that fails halfway leaves mixed weights, which must not be sampled
        seen: set[str] = set()
        filled: set[int] = set()
        # Each name may arrive once; a tied alias only with the values that its target has already.
        with torch.no_grad():
            for name, tensor in tensors:
                if name not in targets:
                    raise ValueError(
                        f"load_weights: unknown weight {name!r}; this {type(model).__name__} has no such name"
                    )
                if name in seen:
                    raise ValueError(f"load_weights: weight {name!r} arrived twice; export every weight once")
                target = targets[name]
                if tensor.shape != target.shape:
                    raise ValueError(
                        f"load_weights: weight {name!r} has shape {tuple(tensor.shape)}, the model needs "
                        f"{tuple(target.shape)}; export full tensors (gathered over tensor parallel ranks, vocabulary "
                        "padding removed)"
                    )
                if id(target) in filled and not torch.equal(target, tensor.to(target)):
                    raise ValueError(
                        f"load_weights: {name!r} is tied to {owners[id(target)]!r} in the model and arrived with "
                        "other values; set tie_word_embeddings=false in the model's config, or tie them in the trainer"
                    )
                target.copy_(tensor)
                num_bytes += tensor.numel() * tensor.element_size()
                seen.add(name)
                filled.add(id(target))
        missing = sorted(set(owners.values()) - seen)
        if missing:
            raise ValueError(
                f"load_weights: {len(missing)} of {len(owners)} weights did not arrive: {', '.join(missing)}"
            )
        self.weight_version = version
        return SyncReport(
            version=version, num_tensors=len(seen), num_bytes=num_bytes, seconds=time.perf_counter() - started
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        *,
        temperature: float | None = None,
        max_tokens: Sequence[int] | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Rollout]:
        """Return rollouts as ``Engine.generate`` does.

        Log-probs are at the temperature of the call; greedy ones at ``rollout.temperature``.
        """
        bounds = self._check(prompts, samples_per_prompt, max_tokens)
        greedy, logprob_temperature = temperature == 0.0, temperature or self._rollout.temperature
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].token_ids))  # like lengths pad least
        max_rows = self._rollout.max_batch_samples
        rollouts: list[list[Rollout]] = [[] for _ in prompts]
        # A group larger than the batch limit is sampled in slices, at one more prefill of its prompt for each.
        for first in range(0, samples_per_prompt, max_rows):
            samples = range(first, min(first + max_rows, samples_per_prompt))
            num_prompts = max_rows // len(samples)
            for batch in cut_batches(order, lambda i: len(prompts[i].token_ids), num_prompts, alike=self._alike):
                rows = [(prompts[index], sample) for index in batch for sample in samples]
                limits = np.repeat([bounds[index] for index in batch], len(samples))
                uniforms = None if greedy else self._uniforms(rows, int(limits.max()))
                token_ids, logprobs = self._sample(
                    [prompts[index].token_ids for index in batch], len(samples), uniforms, logprob_temperature, limits
                )
                sampled = self._to_rollouts(rows, token_ids, logprobs, limits)
                for position, index in enumerate(batch):
                    rollouts[index] += sampled[position * len(samples) : (position + 1) * len(samples)]
                    if on_finished is not None and len(rollouts[index]) == samples_per_prompt:
                        on_finished(index, rollouts[index])
        return [rollout for group in rollouts for rollout in group]

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        model = self._ready_model()
        return sample_requests(model, self._tokenizer.decode, requests, max_rows=self._rollout.max_batch_samples)

    def close(self) -> None:
        self._model = None
        self.weight_version = NO_WEIGHTS

    def _open_model(self) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError("TransformersEngine was closed; build a new one")
        return self._model

    def _ready_model(self) -> PreTrainedModel:
        if self.weight_version == NO_WEIGHTS:
            self._open_model()
            raise RuntimeError("TransformersEngine: no complete set of weights was loaded; call load_weights first")
        return self._open_model()

    def _check(self, prompts: Sequence[Prompt], samples_per_prompt: int, max_tokens: Sequence[int] | None) -> list[int]:
        self._ready_model()
        return token_bounds(
            prompts, samples_per_prompt, max_tokens, self._rollout.max_response_tokens, self._max_positions
        )

    def _uniforms(self, rows: Sequence[tuple[Prompt, int]], num_positions: int) -> torch.Tensor:
        """Return [positions, rows] float64 in [0, 1): each row's own random stream, drawn ahead for every position."""
        raw = np.empty((len(rows), num_positions), dtype=np.uint64)
        for row, (prompt, sample) in enumerate(rows):
            seed = sample_seed(self._seed, prompt.prompt_id, sample, self.weight_version, prompt.attempt)
            # random_raw, not Generator.random: NumPy keeps bit generators' streams fixed across versions (NEP 19).
            raw[row] = np.random.Philox(key=seed).random_raw(num_positions)
        return torch.from_numpy((raw >> np.uint64(11)).T * 2.0**-53).to(self._device)

    @torch.inference_mode()
    def _sample(
        self,
        prompts: Sequence[tuple[int, ...]],
        repeats: int,
        uniforms: torch.Tensor | None,
        temperature: float,
        limits: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sample one batch; return token ids, int64, and their log-probs, float32, both [steps, rows].

        uniforms: float64 [positions, rows] in [0, 1); None for greedy.
        limits: [rows], the most tokens of each row. Values after them, or after a row's first stop token, are
            meaningless.
        """
        model, max_steps = self._open_model(), int(limits.max())
        num_rows = len(prompts) * repeats
        cache, logits, position, mask, padded = self._run_prompts(prompts, repeats, max_steps)
        prompt_width = mask.shape[1] - max_steps
        if self._notes is not None:
            self._notes.begin(len(prompts), num_rows, max_steps)

        rows = torch.arange(num_rows, device=self._device)  # the rows still running, as the caller numbers them
        done = torch.zeros(num_rows, dtype=torch.bool, device=self._device)
        bound = torch.from_numpy(limits).to(self._device)
        uneven = int(limits.min()) < max_steps
        token_ids = torch.zeros(max_steps, num_rows, dtype=torch.long, device=self._device)
        logprobs = torch.zeros(max_steps, num_rows, dtype=torch.float32, device=self._device)
        for step in range(max_steps):
            # Draw each row's token, and note the rows that it ends.
            tokens, token_logprobs = draw(logits, temperature, None if uniforms is None else uniforms[step, rows])
            token_ids[step, rows], logprobs[step, rows] = tokens, token_logprobs
            for stop_id in self._stop_ids:
                done |= tokens == stop_id
            if uneven:
                done |= bound <= step + 1
            num_done = int(done.sum()) if self._stop_ids or uneven else 0  # the loop's one wait for the device
            if num_done == len(rows) or step + 1 == max_steps:
                break
            # Drop finished rows from the batch, then run the model on the others' tokens.
            if num_done >= COMPACT_FRACTION * len(rows):
                kept = torch.nonzero(~done).squeeze(1)
                cache.batch_select_indices(kept)
                rows, tokens, position, mask, done, bound = (
                    tensor[kept] for tensor in (rows, tokens, position, mask, done, bound)
                )
            output = model(
                input_ids=tokens[:, None],
                attention_mask=mask[:, : prompt_width + step + 1] if padded else None,
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
            )
            logits, position = output.logits[:, -1], position + 1
            if self._notes is not None:
                self._notes.note(step, rows)
        return token_ids[: step + 1].cpu().numpy(), logprobs[: step + 1].cpu().numpy()

    def _run_prompts(
        self, prompts: Sequence[tuple[int, ...]], repeats: int, max_steps: int
    ) -> tuple[DynamicCache, torch.Tensor, torch.Tensor, torch.Tensor, bool]:
        """Run each prompt once, and repeat its outputs for its samples.

        Returns what ``run_prompts`` does, for each row, with a mask [rows, width + max_steps].
        """
        cache, logits, position, mask, padded = run_prompts(self._open_model(), prompts)
        if repeats > 1:
            cache.batch_repeat_interleave(repeats)
        logits, position = (tensor.repeat_interleave(repeats, dim=0) for tensor in (logits, position))
        mask = torch.cat([mask, mask.new_ones(len(prompts), max_steps)], dim=1).repeat_interleave(repeats, dim=0)
        return cache, logits, position, mask, padded

    def _to_rollouts(
        self, rows: Sequence[tuple[Prompt, int]], token_ids: np.ndarray, logprobs: np.ndarray, limits: np.ndarray
    ) -> list[Rollout]:
        """Make rollouts of ids and log-probs [steps, rows], cut after each row's first stop token or at its limit."""
        num_steps = len(token_ids)
        is_stop = np.isin(token_ids, self._stop_ids) & (np.arange(num_steps)[:, None] < limits)
        stopped = is_stop.any(axis=0)
        lengths = np.where(stopped, is_stop.argmax(axis=0) + 1, np.minimum(num_steps, limits))
        within = np.arange(num_steps)[:, None] < lengths
        if not np.isfinite(logprobs[within]).all():
            prompt, sample = rows[int(np.argmin((np.isfinite(logprobs) | ~within).all(axis=0)))]
            raise RuntimeError(
                f"sample {prompt.prompt_id}#{sample} has a log-prob that is not finite at weight version "
                f"{self.weight_version}; the weights are broken (a step with a non-finite gradient?) or overflow in "
                "this dtype"
            )
        experts: list[np.ndarray | None] = [None] * len(rows)
        if self._notes is not None:
            experts = self._notes.of([len(prompt.token_ids) for prompt, _ in rows], lengths.tolist())
        texts: dict[tuple[int, ...], str] = {}  # short answers repeat within a group, and decoding is slow
        rollouts = []
        parts = token_ids.T.tolist(), logprobs.T.tolist(), lengths.tolist(), stopped.tolist(), experts
        for (prompt, sample), row_ids, row_logprobs, length, stop, routed in zip(rows, *parts, strict=True):
            body = tuple(row_ids[: length - stop])
            if body not in texts:
                texts[body] = self._tokenizer.decode(list(body), skip_special_tokens=True)
            rollouts.append(
                Rollout(
                    prompt=prompt,
                    sample_index=sample,
                    response_ids=tuple(row_ids[:length]),
                    logprobs=tuple(row_logprobs[:length]),
                    text=texts[body],
                    finish_reason="stop" if stop else "length",
                    weight_versions=((self.weight_version, length),),
                    routed_experts=routed,
                )
            )
        return rollouts


def _build_model(hf_path: str, rollout: RolloutConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build the model of ``hf_path``'s config in eval mode, its weights not yet set. Raises ConfigError.

    Its attention is torch's (sdpa) where transformers has it for the family; one with sinks has none.
    """
    config = parse_hf_config(hf_path)
    settle_tying(config, hf_path)
    check_embedded(hf_path, rollout)
    # Modules draw their initial values from torch's global generator, which belongs to the trainer.
    accelerators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=accelerators), torch.device(device):
        model = transformers_model(config, hf_path, dtype=dtype)
    return model.requires_grad_(False).eval()


def check_embedded(hf_path: str, rollout: RolloutConfig) -> None:
    """Raise ConfigError for a model too large to be held whole on every rank; no weights are made."""
    if rollout.allow_large_embedded_model:
        return
    config = parse_hf_config(hf_path)
    settle_tying(config, hf_path)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # shapes without storage
        num_parameters = transformers_model(config, hf_path, dtype=torch.float32).num_parameters()
    if num_parameters > MAX_EMBEDDED_PARAMETERS:
        raise ConfigError(
            "rollout.engine=transformers holds a whole copy of the model on every rank that samples, and "
            f"{hf_path!r} has {num_parameters:,} parameters, above {MAX_EMBEDDED_PARAMETERS:,}; take a "
            "smaller model, or set rollout.allow_large_embedded_model=true if the memory is there"
        )


def stop_tokens(hf_path: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[int]:
    """Return the stop tokens of tokenizer and generation_config.json, ascending.

    Raises ConfigError for a token outside the vocabulary.
    """
    # Chat models list their second stop token in generation_config.json.
    found = {*stop_ids(hf_path)} | ({tokenizer.eos_token_id} - {None})
    outside = sorted(stop_id for stop_id in found if not 0 <= stop_id < vocab_size)
    if outside:
        raise ConfigError(
            f"stop token ids {outside} of the tokenizer or of {hf_path!r} lie outside the model's "
            f"vocab_size={vocab_size}; check model.tokenizer_path and eos_token_id in generation_config.json"
        )
    return sorted(found)


def draw(logits: torch.Tensor, temperature: float, uniforms: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row; return ids, int64 [R], and their log-probs at ``temperature``, float32 [R].

    logits: [R, vocab].
    uniforms: float64 [R] in [0, 1); None for greedy.

    Inverse CDF: a row's token is the first whose cumulative probability exceeds the row's number, so a token of
    probability 0 is never drawn.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    if uniforms is None:
        tokens = logits.argmax(dim=-1)
    else:
        # float64: over 150,000 tokens a float32 sum is off by more than a rare token's probability. Scaled by the
        # row's own total, which rounding keeps from being exactly 1.
        cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        total = cumulative[:, -1]
        target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)  # NaN logits: reported by the caller, once, not per step
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)
