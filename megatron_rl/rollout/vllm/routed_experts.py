"""Conversion of the experts to which vLLM routed each token: from vLLM's answers to one array per sample.

The facts are of vLLM 0.32.0 with ``enable_return_routed_experts``
(distributed/aux_output_connector/, v1/engine/output_processor.py).
``CompletionOutput.routed_experts`` is uint8 or uint16 [prompt + response − 1, layers, top_k], with
the model's own expert numbers, before any balancing over ranks. The last token was never fed to the
model, and has no row. Every sample has the rows of the prompt's tokens, even if the prefix cache
held the prompt's keys and values. A server sends the array as base64 of a .npy file
(utils/serial_utils.py). Gate weights are not returned.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_rl.errors import EngineError

WAY_OUT = (
    "start the engine with --enable-return-routed-experts on the trainer's own model folder, or set "
    "rollout.routing_replay=off"
)


def frame_of(samples: Sequence) -> dict[str, np.ndarray]:
    """Return the samples' experts as the arrays {name: array} of one message; {} if a sample has no experts.

    samples: vLLM's CompletionOutputs.

    Example: two samples have experts for 3 and 2 tokens, in 4 layers with 2 experts per token. Then
    ``expert_rows=[3, 2]``, and ``experts`` is int16 [5, 4, 2].
    """
    of_samples = [sample.routed_experts for sample in samples]
    if any(experts is None for experts in of_samples):
        return {}
    return {
        "expert_rows": np.array([len(experts) for experts in of_samples], dtype=np.int64),
        "experts": np.concatenate([np.asarray(experts).astype(np.int16) for experts in of_samples]),
    }


def of_frame(arrays: Mapping[str, np.ndarray], samples: int) -> list[np.ndarray | None]:
    """Return each sample's experts, int16 [tokens, layers, top_k], from the arrays of ``frame_of``.

    Each is None if the arrays hold no experts. ``samples``: the number of samples.
    """
    if "experts" not in arrays:
        return [None] * samples
    return np.split(arrays["experts"], np.cumsum(arrays["expert_rows"])[:-1])


def of_choice(choice: Mapping) -> np.ndarray | None:
    """Return a sample's experts, int16 [tokens, layers, top_k], from one choice of a server's answer; None if absent.

    Raises ValueError for a text that holds no array. Nothing is unpickled.
    """
    text = choice.get("routed_experts")
    if text is None:
        return None
    return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False).astype(np.int16)


def sample_rows(name: str, experts: np.ndarray | None, prompt_tokens: int, response_tokens: int) -> np.ndarray:
    """Return a sample's experts, int16 [prompt + response, layers, top_k], with −1 for the last token.

    name: the sample's name, for messages.
    experts: [prompt + response − 1, layers, top_k], as vLLM returned them; None if it returned
        none.

    Raises EngineError if the experts are missing, or have a wrong shape.
    """
    tokens = prompt_tokens + response_tokens
    if experts is None:
        raise EngineError(
            f"sample {name} came without its experts, and rollout.routing_replay=rollout replays them; {WAY_OUT}"
        )
    if experts.ndim != 3 or len(experts) != tokens - 1:
        raise EngineError(
            f"sample {name} of {prompt_tokens} prompt and {response_tokens} response tokens came with experts of "
            f"shape {list(experts.shape)}; rollout.routing_replay=rollout wants [{tokens - 1}, layers, experts per "
            f"token]; {WAY_OUT}"
        )
    unknown = np.full((1, *experts.shape[1:]), -1, dtype=np.int16)
    return np.concatenate([experts.astype(np.int16), unknown])
