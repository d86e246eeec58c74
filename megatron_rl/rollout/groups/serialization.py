"""The byte format of finished groups, for a checkpoint's untrained rollouts and replayed groups.

The bytes are an .npz without pickles: ``header`` (JSON, UTF-8), ``token_ids`` int32, ``logprobs``
float32, ``loss_mask`` bool and ``experts`` int16 (those to which the model routed each token). All
arrays but the header are flat: the samples' values follow each other in the header's order. The
mask is True for all tokens of a rollout without a mask. The header holds the shape of each
rollout's experts. Files of older releases have no masks or experts. A rollout read from such a file
has None for both. A run with ``rollout.speculation=history`` adds the arrays of its history.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from megatron_rl.types import Prompt, Rollout, Score

HISTORY = "history_"  # begins the names of the arrays of earlier answers (rollout.speculation=history)
OLDER = (False, None, None, None, None)  # values of a sample's newer fields for older files that lack them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedGroup:
    """Holds all samples of a prompt.

    rollouts: one per sample.
    scores: one per rollout; None if the group is not scored yet.
    """

    prompt: Prompt
    rollouts: Sequence[Rollout]
    scores: Sequence[Score] | None


def pack_groups(groups: Mapping[str, SavedGroup], history: Mapping[str, np.ndarray] = MappingProxyType({})) -> bytes:
    """Return groups as bytes in this module's format.

    groups: key → group, for keys of the caller's choice.
    history: the state of a ``History`` (speculation/history.py); empty if the run has none.
    """
    header, token_ids, logprobs, masks = [], [np.empty(0, np.int32)], [np.empty(0, np.float32)], [np.empty(0, bool)]
    experts = [np.empty(0, np.int16)]
    for key, group in groups.items():
        samples = []
        for rollout in group.rollouts:
            token_ids.append(np.array(rollout.response_ids, dtype=np.int32))
            logprobs.append(np.array(rollout.logprobs, dtype=np.float32))
            mask = rollout.loss_mask
            masks.append(np.ones(len(rollout.response_ids), bool) if mask is None else np.array(mask, dtype=bool))
            fields = [
                rollout.sample_index,
                len(rollout.response_ids),
                rollout.text,
                rollout.finish_reason,
                rollout.weight_versions,
            ]
            routed = rollout.routed_experts
            experts += [] if routed is None else [routed.reshape(-1)]
            shape = None if routed is None else routed.shape
            fields += [mask is not None, rollout.environment_reward, rollout.excluded, shape, rollout.context_ids]
            samples.append(fields)
        scores = None if group.scores is None else [[s.total, s.by_function, s.error] for s in group.scores]
        header.append([key, group.prompt.prompt_id, group.prompt.attempt, samples, scores])
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    arrays = {"token_ids": token_ids, "logprobs": logprobs, "loss_mask": masks, "experts": experts}
    kept = {HISTORY + name: values for name, values in history.items()}
    np.savez(buffer, header=text, **{name: np.concatenate(parts) for name, parts in arrays.items()}, **kept)
    return buffer.getvalue()


def unpack_history(data: bytes) -> dict[str, np.ndarray]:
    """Return the state of the ``History`` that ``pack_groups`` packed; {} if there was none."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return {name.removeprefix(HISTORY): file[name] for name in file.files if name.startswith(HISTORY)}


def check_packed(data: bytes) -> None:
    """Raise an exception, of any class, if ``unpack_groups`` cannot unpack the bytes."""
    for group in unpack_groups(data, _any_prompt).values():
        for rollout in group.rollouts:
            if len(rollout.response_ids) != len(rollout.logprobs):
                raise ValueError(f"{len(rollout.response_ids)} tokens come with {len(rollout.logprobs)} log-probs")


def _any_prompt(prompt_id: str, attempt: int) -> Prompt:
    if not isinstance(prompt_id, str) or not isinstance(attempt, int):
        raise ValueError(f"a prompt is named by {prompt_id!r}, {attempt!r}")
    return Prompt(prompt_id=prompt_id, text="", token_ids=(0,), columns={}, attempt=attempt)


def unpack_groups(data: bytes, recall: Callable[[str, int], Prompt]) -> dict[str, SavedGroup]:
    """Return the groups that ``pack_groups`` packed, by the same keys.

    recall: called with a prompt's id and attempt; returns the prompt.
    """
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        header = json.loads(file["header"].tobytes())
        token_ids, logprobs = file["token_ids"].tolist(), file["logprobs"].tolist()
        mask = file["loss_mask"].tolist() if "loss_mask" in file.files else []
        experts = file["experts"] if "experts" in file.files else np.empty(0, np.int16)
    # Cut each sample's tokens, log-probs, mask and experts from the flat arrays.
    groups, start = {}, 0
    for key, prompt_id, attempt, samples, scores in header:
        prompt, rollouts = recall(prompt_id, attempt), []
        for index, length, text, reason, versions, *newer_fields in samples:
            masked, environment_reward, excluded, shape, context = (*newer_fields, *OLDER[len(newer_fields) :])
            routed, experts = (None, experts) if shape is None else np.split(experts, [math.prod(shape)])
            rollouts.append(
                Rollout(
                    prompt=prompt,
                    sample_index=index,
                    response_ids=tuple(token_ids[start : start + length]),
                    logprobs=tuple(logprobs[start : start + length]),
                    text=text,
                    finish_reason=reason,
                    weight_versions=tuple((version, count) for version, count in versions),
                    loss_mask=tuple(mask[start : start + length]) if masked else None,
                    environment_reward=environment_reward,
                    excluded=excluded,
                    routed_experts=None if routed is None else routed.reshape(shape),
                    context_ids=None if context is None else tuple(context),
                )
            )
            start += length
        known = None if scores is None else [_score(*fields) for fields in scores]
        groups[key] = SavedGroup(prompt=prompt, rollouts=rollouts, scores=known)
    return groups


def _score(total: float | None, values: Sequence[float | None], error: str | None = None) -> Score:
    """Return a sample's score from its saved fields, which are those of ``Score``.

    total: the total reward; None if the sample has none.
    values: the reward of each function; None if the function did not apply.
    error: the error of a failed function. Older files have none.
    """
    return Score(total=total, by_function=tuple(values), error=error)
