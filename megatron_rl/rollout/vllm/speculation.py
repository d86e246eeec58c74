"""Speculative decoding in vLLM's engines: their arguments, the counts of drafts, and the history that outlives them."""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import threading
from collections.abc import Sequence

import numpy as np

from megatron_rl.config import RolloutConfig
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.engines.replica import Completion, Replica, RequestRefused
from megatron_rl.rollout.speculation.counts import Counts
from megatron_rl.rollout.speculation.history import History, key_of
from megatron_rl.rollout.vllm.draft_weights import frozen_arguments
from megatron_rl.weights.config_json import read_fields

log = logging.getLogger(__name__)
DRAFTER = "megatron_rl.rollout.vllm.drafter.HistoryDrafter"
# The policy's own load_format is dummy, since its weights come by sync.
FROM_FILES: dict[str, object] = {"draft_load_config": {"load_format": "auto"}}
# rollout.speculation → fields of vLLM's SpeculativeConfig (0.32.0)
FIELDS: dict[str, dict[str, object]] = {
    "off": {},
    "history": {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": 8},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "ngram_gpu": {"method": "ngram_gpu", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4} | FROM_FILES,
    "eagle": {"method": "eagle", "num_speculative_tokens": 3} | FROM_FILES,
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3} | FROM_FILES,
    "mtp": {"method": "mtp", "num_speculative_tokens": 1} | FROM_FILES,
}


def speculative_arguments(
    rollout: RolloutConfig, hf_path: str, longest: int, *, on_gpu: bool, sleeps: bool
) -> dict[str, object]:
    """Return {field: value} of vllm.EngineArgs for an engine that drafts tokens.

    The fields of ``rollout.vllm.speculative_config`` replace those of ``rollout.speculation``. vLLM
    drafts only if the longest request leaves room for a draft (v1/worker/gpu_model_runner.py,
    ``_input_fits_in_drafter``; on a CPU the engine would die), so ``max_model_len`` has it.

    hf_path: the model's folder.
    longest: the maximum of tokens of a prompt and its response together.
    sleeps: whether the engine shares its GPU with the trainer.

    Raises ConfigError for a method that cannot run here, and for a model without that room.
    """
    fields = FIELDS[rollout.speculation] | dict(rollout.vllm.get("speculative_config") or {})
    method = fields["method"]
    if method == "ngram_gpu" and not on_gpu:
        raise ConfigError("rollout.speculation=ngram_gpu drafts on a GPU, and this run has none; take ngram")
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        raise ConfigError(
            "rollout.speculation=suffix needs the package arctic-inference, which is not installed here; install it, "
            "or take history"
        )
    room = longest + int(fields.get("num_speculative_tokens") or 0) + 1
    keys = "data.max_prompt_tokens, rollout.max_response_tokens or rollout.vllm.speculative_config's tokens"
    given = rollout.vllm.get("max_model_len", room)
    if given < room:
        raise ConfigError(f"rollout.vllm.max_model_len={given} leaves no room for drafts; set {room}, or lower {keys}")
    config = read_fields(hf_path)
    most = config.get("max_position_embeddings")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if most is not None and most < room and rope.get("rope_type", "default") == "default":
        raise ConfigError(
            f"{hf_path} has max_position_embeddings={most}, and drafts of requests of {longest} tokens need {room}; "
            f"lower {keys}, or set rollout.speculation=off"
        )
    frozen = frozen_arguments(rollout, hf_path, room, sleeps=sleeps)
    if not on_gpu:  # prompts are not cut there, so a step takes the longest request, and a draft model's slot
        frozen["max_num_batched_tokens"] = rollout.vllm.get("max_num_batched_tokens", max(4096, room))
    return frozen | {
        "speculative_config": fields,
        "per_request_spec_decode_metrics": "summary",
        "max_model_len": given,
    }


class Speculation:
    """Counts what this rank's engines drafted, and keeps their answers for checkpoints and for engines that start.

    An engine's drafter has a history of its own, which ends with the engine's process. Requests may end
    in several threads at once (rollout/endpoint/agents.py).

    keeps_answers: whether the engines draft from earlier answers.
    """

    def __init__(self, *, keeps_answers: bool) -> None:
        self.history = History() if keeps_answers else None
        self._counts, self._lock = Counts(), threading.Lock()

    def note(self, prompt: Sequence[int], completions: Sequence[Completion]) -> None:
        """Add the samples of an answered request. A step gives a sample its accepted tokens and one more.

        The first token comes from the prompt's step, which does not count.

        prompt: the request's token ids.
        """
        with self._lock:
            for completion in completions:
                drafted, accepted = completion.drafts
                self._counts.drafted += drafted
                self._counts.accepted += accepted
                self._counts.passes += max(0, len(completion.token_ids) - 1 - accepted)
            if self.history is not None:
                versions = [x.weight_versions[-1][0] for x in completions if x.weight_versions]
                answers = [x.token_ids for x in completions]
                self.history.add(key_of(prompt), answers, visit=max(versions, default=None))

    def hand_over(self, replica: Replica, timeout_s: float) -> None:
        """Give the answers to an engine that was just started, in a file that its workers read.

        An engine that does not take them begins without, since drafts decide no token. Raises ReplicaLost
        if the engine is gone.
        """
        if self.history is None or not len(self.history):
            return
        with self._lock:
            state = self.history.state()
        try:
            with tempfile.NamedTemporaryFile(prefix="megatron_rl-answers-", suffix=".npz") as file:
                np.savez(file, **state)
                file.flush()
                replica.control("load_history", {"path": file.name}, timeout_s)
        except (RequestRefused, OSError) as error:
            log.warning("%s begins without earlier answers to draft from: %s", replica.name, error)
        else:
            log.info("%s drafts from the earlier answers to %d prompts", replica.name, len(self.history))

    def take_counts(self) -> dict[str, int]:
        """Return metric name → count since the last call."""
        with self._lock:
            return self._counts.take()
