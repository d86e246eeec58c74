"""The embedded engine: a Hugging Face model in the trainer's own process, for small models, laptops and CI."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from megatron_rl.config import RolloutConfig
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.engines.decoding import Decoded, Row, counts_pads, cut_batches, decode_rows
from megatron_rl.rollout.engines.engine import (
    NO_WEIGHTS,
    OnFinished,
    SyncReport,
    group_sizes,
    sample_seed,
    token_bounds,
)
from megatron_rl.types import Prompt, Rollout
from megatron_rl.weights.config_json import parse_hf_config, settle_tying, stop_ids, transformers_model
from megatron_rl.weights.fused import file_tensors

if TYPE_CHECKING:
    from megatron_rl.observability.prometheus.live import EngineReading
    from megatron_rl.rollout.engines.early_end import EarlyEnd
    from megatron_rl.rollout.engines.sampling import SampleRequest, SampleResult

MAX_EMBEDDED_PARAMETERS = 1_000_000_000


class TransformersEngine:
    """Samples with a Hugging Face causal LM in this process. The model is built from its config, without weights.

    It is an ``Engine`` (rollout/engines/engine.py). ``load_weights`` brings the weights. Rollouts
    and requests are decoded by the same loop (decoding.py). The seed of a rollout comes from
    ``sample_seed``.

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

        Raises ConfigError if the directory does not exist, the model is too large, or a stop token
        lies outside the vocabulary.
        """
        model = _build_model(hf_path, rollout, dtype, device)
        text_config = model.config.get_text_config()
        stop_ids = stop_tokens(hf_path, tokenizer, text_config.vocab_size)
        self._hold(model, tokenizer, rollout, seed, device, int(text_config.max_position_embeddings), stop_ids)
        self._alike = counts_pads(model)
        if rollout.speculation != "off":
            from megatron_rl.rollout.speculation.embedded import Speculation

            self.speculation = Speculation(model, lambda: self.weight_version)
            self._decode_rows = self.speculation.decode_rows

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
        """Set the fields that every embedded engine has. The model's weights are not loaded yet.

        max_positions: the most tokens of a prompt and its response.
        """
        self.weight_version = NO_WEIGHTS
        self._tokenizer, self._rollout, self._seed, self._device = tokenizer, rollout, seed, device
        self._model: torch.nn.Module | None = model
        self._max_positions, self._stop_ids = max_positions, tuple(stop_ids)
        self._routers = None
        if rollout.routing_replay == "rollout":
            from megatron_rl.rollout.engines.router_records import RouterRecords

            self._routers = RouterRecords(model)

    lost = ()
    lacks_weights = True  # so every sync sends the weights, never adapters alone
    is_elsewhere, progressed_at, _alike = False, -math.inf, False
    _decode_rows = staticmethod(decode_rows)
    num_running = 0  # samples that are being decoded
    early_end: EarlyEnd | None = None

    def recover(self, lost: Sequence[str]) -> Sequence[str]:
        """Do nothing: the engine is part of this process, and is lost only with the process."""
        return ()

    def leave_out(self, names: Collection[str]) -> None:
        """Do nothing: ``names`` are engines that some rank cannot reach, and this engine is in the rank's process."""

    def take_report(self, version: int, failed: Collection[str], lost: Collection[str]) -> None:
        """Do nothing: ``load_weights`` has raised every error."""

    def readings(self) -> Sequence[EngineReading]:
        """Return one reading: the weight version, and the number of samples that are being decoded."""
        from megatron_rl.observability.prometheus.live import EngineReading

        version = self.weight_version
        return (EngineReading(number=None, is_up=True, weight_version=version, restarts=0, running=self.num_running),)

    def sleep(self) -> None:
        """Do nothing: the weights and caches stay in this process."""

    def wake(self, *, tags: Sequence[str]) -> None:
        """Do nothing: ``sleep`` freed nothing."""

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Copy every weight into the model (see ``Engine.load_weights``). ``version``: at least 0.

        The names are the names in checkpoint files. If the model fuses experts into one tensor,
        each arriving tensor fills a slice of it.
        """
        if version < 0:
            raise ValueError(f"load_weights: version={version} must be at least 0")
        model = self._open_model()
        # Targets are parameters and persistent buffers. A tied tensor appears under each of its names.
        targets = file_tensors(model.state_dict(keep_vars=True), model.config.get_text_config().model_type)
        owners: dict[int, str] = {}
        for name, target in targets.items():
            owners.setdefault(id(target), name)
        started, num_bytes = time.perf_counter(), 0
        self.weight_version = NO_WEIGHTS  # nothing may be sampled from the mixed weights of a load that fails halfway
        seen: set[str] = set()
        filled: set[int] = set()
        # Each name may arrive once. A tied alias must bring the values that its target already has.
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
        samples_per_prompt: int | Sequence[int],
        *,
        temperature: float | None = None,
        max_tokens: Sequence[int] | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Rollout]:
        """Return rollouts (see ``Engine.generate``).

        Their log-probs are taken at the temperature of the call. For greedy samples they are taken
        at ``rollout.temperature``.
        """
        self._ready_model()
        sizes = group_sizes(prompts, samples_per_prompt)
        bounds = token_bounds(prompts, max_tokens, self._rollout.max_response_tokens, self._max_positions)
        greedy, logprob_temperature = temperature == 0.0, temperature or self._rollout.temperature
        rollouts: list[list[Rollout]] = [[] for _ in prompts]
        for batch in self._batches(prompts, sizes):
            rows = [
                Row(
                    prompt=number,
                    seed=self._seed_of(prompts[index], sample),
                    max_tokens=bounds[index],
                    temperature=logprob_temperature,
                    greedy=greedy,
                    stop_ids=self._stop_ids,
                    **self._looks(prompts[index], sample, temperature),
                )
                for number, (index, samples) in enumerate(batch)
                for sample in samples
            ]
            self.num_running = len(rows)
            decoded = self._decode([prompts[index].token_ids for index, _ in batch], rows)
            self.num_running = 0
            named = [(prompts[index], sample) for index, samples in batch for sample in samples]
            sampled = iter(self._to_rollouts(named, rows, decoded))
            for index, samples in batch:
                rollouts[index] += itertools.islice(sampled, len(samples))
                if on_finished is not None and len(rollouts[index]) == sizes[index]:
                    on_finished(index, rollouts[index])
        return [rollout for group in rollouts for rollout in group]

    def _batches(self, prompts: Sequence[Prompt], sizes: Sequence[int]) -> Iterator[Sequence[tuple[int, range]]]:
        """Yield the batches of a call, each a list of (index of a prompt, its samples in the batch).

        A group larger than the batch limit is sampled in slices. Each slice runs the prompt again.

        sizes: the number of samples of each prompt.
        """
        most = self._rollout.max_batch_samples
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].token_ids))  # for the fewest pads
        slices = [
            (index, range(first, min(first + most, sizes[index])))
            for first in range(0, max(sizes, default=0), most)
            for index in order
            if first < sizes[index]
        ]
        return cut_batches(
            slices,
            lambda piece: len(prompts[piece[0]].token_ids),
            most,
            alike=self._alike,
            rows_of=lambda piece: len(piece[1]),
        )

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        from megatron_rl.rollout.engines.embedded_sampling import sample_requests

        model = self._ready_model()
        most = self._rollout.max_batch_samples
        return sample_requests(model, self._tokenizer.decode, requests, self._decode_rows, max_rows=most)

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

    def _seed_of(self, prompt: Prompt, sample: int) -> int:
        return sample_seed(self._seed, prompt.prompt_id, sample, self.weight_version, prompt.attempt)

    def _looks(self, prompt: Prompt, sample: int, temperature: float | None) -> dict[str, object]:
        """Return the fields of a sample's ``Row`` by which it may end early; none at a call's own temperature."""
        early_end = self.early_end
        if early_end is None or temperature is not None:
            return {}
        return {
            "ends_early": lambda token_ids: early_end.ends(prompt, sample, token_ids),
            "look_every_tokens": early_end.every_tokens,
        }

    def _decode(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row]) -> Decoded:
        """Generate the samples (rows) of one batch, and return their tokens and log-probs.

        The rows are in the order of their prompts.
        """
        return self._decode_rows(self._open_model(), prompts, rows, self._tokenizer.decode, self._routers)

    def _to_rollouts(
        self, samples: Sequence[tuple[Prompt, int]], rows: Sequence[Row], decoded: Decoded
    ) -> list[Rollout]:
        """Return the rollouts of decoded samples. ``samples``: each row's prompt and sample index.

        Raises RuntimeError for a log-prob that is not finite.
        """
        # Refuse log-probs that are not finite.
        token_ids, logprobs, lengths = decoded.token_ids, decoded.logprobs, decoded.lengths
        within = np.arange(len(token_ids))[:, None] < lengths
        if not np.isfinite(logprobs[within]).all():
            prompt, sample = samples[int(np.argmin((np.isfinite(logprobs) | ~within).all(axis=0)))]
            raise RuntimeError(
                f"sample {prompt.prompt_id}#{sample} has a log-prob that is not finite at weight version "
                f"{self.weight_version}; the weights are broken (a step with a non-finite gradient?) or overflow in "
                "this dtype"
            )
        experts: list[np.ndarray | None] = [None] * len(samples)
        if self._routers is not None:
            prompt_lengths = [len(prompt.token_ids) for prompt, _ in samples]
            experts = self._routers.of([row.prompt for row in rows], prompt_lengths, lengths.tolist())
        # Cut each row at its length, and decode its text without the stop token.
        texts: dict[tuple[int, ...], str] = {}  # a cache: short answers repeat in a group, and decoding is slow
        rollouts = []
        early = ["decided" if number in decoded.ended_early else "length" for number in range(len(samples))]
        parts = token_ids.T.tolist(), logprobs.T.tolist(), lengths.tolist(), decoded.stopped.tolist(), early, experts
        for (prompt, sample), row_ids, row_logprobs, length, stop, end, routed in zip(samples, *parts, strict=True):
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
                    finish_reason="stop" if stop else end,
                    weight_versions=((self.weight_version, length),),
                    routed_experts=routed,
                )
            )
        return rollouts


def _build_model(hf_path: str, rollout: RolloutConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build the model of ``hf_path``'s config in eval mode. Its weights are loaded later.

    Attention runs by torch's scaled_dot_product_attention if transformers offers it for the model's
    family. transformers does not offer it for families with attention sinks. On a CPU query heads that
    share a key head are one head's queries (grouped_queries.py).

    Raises ConfigError if the config cannot be read, or if the model is too large.
    """
    config = parse_hf_config(hf_path)
    settle_tying(config, hf_path)
    check_embedded(hf_path, rollout)
    # Modules draw initial values from torch's global generator. The fork keeps the trainer's state of it.
    accelerators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=accelerators), torch.device(device):
        model = transformers_model(config, hf_path, dtype=dtype)
    if device.type == "cpu" and _shares_keys(model):
        from megatron_rl.rollout.engines.grouped_queries import use_grouped_queries

        use_grouped_queries(model)
    # run_prompts keeps one position of each prompt. torch would copy the head's weights for every row of such a view.
    model.get_output_embeddings().register_forward_pre_hook(lambda _, given: (given[0].contiguous(),))
    return model.requires_grad_(False).eval()


def _shares_keys(model: PreTrainedModel) -> bool:
    """Return whether a model has fewer key heads than query heads."""
    fields = model.config.get_text_config().to_dict()
    heads, key_heads = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    return heads is not None and key_heads is not None and key_heads < heads


def check_embedded(hf_path: str, rollout: RolloutConfig) -> None:
    """Raise ConfigError if the model is too large to be held whole on every rank. The check allocates no weights."""
    if rollout.allow_large_embedded_model:
        return
    config = parse_hf_config(hf_path)
    settle_tying(config, hf_path)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # shapes without storage
        num_parameters = transformers_model(config, hf_path, dtype=torch.float32).num_parameters()
    if num_parameters > MAX_EMBEDDED_PARAMETERS:
        raise ConfigError(
            "rollout.engine=transformers holds a whole copy of the model on every rank that samples, and "
            f"{hf_path!r} has {num_parameters:,} parameters, above {MAX_EMBEDDED_PARAMETERS:,}; set "
            "rollout.engine=vllm, or rollout.allow_large_embedded_model=true if the memory is there"
        )


def stop_tokens(hf_path: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[int]:
    """Return the ids of the stop tokens of the tokenizer and of generation_config.json, ascending.

    Raises ConfigError for a token outside the vocabulary.
    """
    # Chat models list their second stop token in generation_config.json.
    stops = {*stop_ids(hf_path)} | ({tokenizer.eos_token_id} - {None})
    outside = sorted(stop_id for stop_id in stops if not 0 <= stop_id < vocab_size)
    if outside:
        raise ConfigError(
            f"stop token ids {outside} of the tokenizer or of {hf_path!r} lie outside the model's "
            f"vocab_size={vocab_size}; check model.tokenizer_path and eos_token_id in generation_config.json"
        )
    return sorted(stops)
