"""The exchange of a batch between ranks: every rank gets the facts of all samples, and the rows that it runs.

A sample's facts are its lengths, group and owner. Its row is its content, sent as int32 words:
token ids, the response's loss mask, and its log-probs as float32 bits. Routed experts follow if the
row has any, two int16 to a word. Facts take one all-gather, rows one all-to-all per plan. Both
sides know every length from the facts, so lengths are not sent. Nothing is unpickled from a peer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.backend.batch import TargetFacts, TargetSample
from megatron_rl.distributed.collectives import gather_json
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import NonFiniteAdvantage
from megatron_rl.types import BatchFacts, BatchPlan, Sample, Score

KEY_BYTES = 7  # length of a prompt's and of a sample's digest, so that it fits int64


def gather_facts(
    samples: Sequence[Sample],
    groups: Sequence[int],
    order: Sequence[int],
    *,
    num_experts: int = 0,
    trains_by_engine: bool = True,
) -> BatchFacts:
    """Return the facts (lengths, groups, owners) of every rank's samples, in the order of ``order``. A collective.

    samples: this rank's samples.
    groups: the prompt of each local sample, as an index into the batch's list of prompts.
    order: the position of each local sample in the batch, unique over ranks.
    num_experts: the model's number of experts, to check routed experts; 0 skips the check.
    trains_by_engine: whether samples of other log-probs by the engine are others (``sample_keys``).
    """
    own = _own_facts(samples, groups, order, num_experts, trains_by_engine=trains_by_engine)
    return _facts_of(gather_json(own))


def replicated_facts(samples: Sequence[Sample]) -> BatchFacts:
    """Return the facts (lengths, groups, owners) of samples that every rank holds, in their order. Not a collective.

    Each sample is a group of one.
    """
    facts = _facts_of([_own_facts(samples, range(len(samples)), range(len(samples)))])
    if not any(isinstance(sample, TargetSample) for sample in samples):
        return facts
    widths = [sample.targets.shape[1] if isinstance(sample, TargetSample) else 1 for sample in samples]
    fields = {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}
    return TargetFacts(**fields, targets_per_token=np.array(widths, dtype=np.int64))


def _facts_of(parts: Sequence[dict[str, list]]) -> BatchFacts:
    """Return the facts of a batch, sorted by the samples' positions in it.

    parts: for each rank, the facts of its samples (``_own_facts``).
    """
    columns = {name: [x for part in parts for x in part[name]] for name in parts[0]}
    columns["owners"] = [rank for rank, part in enumerate(parts) for _ in part["places"]]
    columns["owner_rows"] = [i for part in parts for i in range(len(part["places"]))]
    order_by_place = np.argsort(np.array(columns["places"], dtype=np.int64), kind="stable").tolist()
    columns = {name: [values[i] for i in order_by_place] for name, values in columns.items()}
    _check_facts(columns)
    sample_ids, routed_shapes = columns.pop("sample_ids"), columns.pop("routed_shapes")
    del columns["faults"]
    arrays = {name: np.array(values, dtype=np.int64) for name, values in columns.items()}
    shapes = np.array(routed_shapes, dtype=np.int64).reshape(len(sample_ids), 2)
    return BatchFacts(sample_ids=tuple(sample_ids), routed_shapes=shapes if shapes.any() else None, **arrays)


def _own_facts(
    samples: Sequence[Sample],
    groups: Sequence[int],
    order: Sequence[int],
    num_experts: int = 0,
    *,
    trains_by_engine: bool = True,
) -> dict[str, list]:
    """Return {name of a fact, such as ``loss_tokens``: its values for this rank's samples}.

    groups, order: for each local sample, its prompt's index and its position in the batch.
    num_experts, trains_by_engine: see ``gather_facts``.

    The fact ``faults`` is a message about a sample's wrong routed experts; None if there is no fault.
    """
    chosen = [np.flatnonzero(s.loss_mask) for s in samples]
    faults = [_routed_fault(s, num_experts) for s in samples]
    return {
        "places": [int(place) for _, place in zip(samples, order, strict=False)],
        "groups": [int(group) for _, group in zip(samples, groups, strict=False)],
        "sample_ids": [s.sample_id for s in samples],
        "prompt_tokens": [int(s.prompt_tokens) for s in samples],
        "response_tokens": [len(s.token_ids) - int(s.prompt_tokens) for s in samples],
        "loss_tokens": [len(tokens) for tokens in chosen],
        "response_inputs": [int(tokens[-1]) if len(tokens) else 0 for tokens in chosen],
        "weight_versions": [int(s.weight_version) for s in samples],
        "prompt_keys": [_prompt_digest(s) for s in samples],
        "sample_keys": [_sample_digest(s, trains_by_engine=trains_by_engine) for s in samples],
        "routed_shapes": [
            (0, 0) if s.routed_experts is None or fault else s.routed_experts.shape[1:]
            for s, fault in zip(samples, faults, strict=True)
        ],
        "faults": faults,
    }


def _prompt_digest(sample: Sample) -> int:
    prompt = np.ascontiguousarray(sample.token_ids[: sample.prompt_tokens], dtype=np.int64).tobytes()
    return _digest(prompt)  # packing compares the tokens themselves


def _sample_digest(sample: Sample, *, trains_by_engine: bool) -> int:
    """Return a number that is equal for samples of one content. It covers all fields but ``sample_id``.

    trains_by_engine: whether it covers the engine's log-probs.
    """
    parts = [sample.token_ids.astype(np.int64), sample.loss_mask.astype(bool)]
    parts += [sample.logprobs.astype(np.float32)] if trains_by_engine else []
    routed = sample.routed_experts
    parts += [] if routed is None else [routed]
    sizes = (sample.prompt_tokens, sample.weight_version, *(size for part in parts for size in part.shape))
    return _digest(np.array(sizes, dtype=np.int64).tobytes() + b"".join(part.tobytes() for part in parts))


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=KEY_BYTES).digest(), "little")


def _check_facts(columns: Mapping[str, Sequence]) -> None:
    """Raise ValueError for the first faulty sample of the batch.

    Every rank checks all ranks' samples, so that all raise together.

    columns: {fact: its values for all samples}.
    """
    if len(set(columns["places"])) != len(columns["places"]):
        raise ValueError("two samples claim the same place in the batch: ranks disagree on which rank makes which")
    names = ("sample_ids", "prompt_tokens", "response_tokens", "faults")
    for name, prompt, response, fault in zip(*(columns[x] for x in names), strict=True):
        if fault is not None:
            raise ValueError(fault)
        if prompt < 1 or response < 1:
            raise ValueError(
                f"sample {name} has {prompt} prompt and {response} response tokens; both must be at least 1, since a "
                "token is predicted from the one before it"
            )


def refuse_too_long(facts: BatchFacts, context_tokens: int) -> None:
    """Raise ValueError if a sample has more tokens than the model's context."""
    longest = int(facts.total_tokens.max(initial=0))
    if longest > context_tokens:
        name = facts.sample_ids[int(facts.total_tokens.argmax())]
        raise ValueError(f"sample {name} has {longest} tokens and the model's context is {context_tokens}")


def needed_rows(plan: BatchPlan, topology: Topology, *, every_stage: bool = False) -> list[np.ndarray]:
    """Return, for each global rank, the sorted indices of the samples whose rows it needs.

    A rank needs the samples of its data-parallel replica if it is on the first or the last pipeline
    stage.

    every_stage: whether ranks of the other stages need them too, for an optional feature
        (backend/part.py).
    """
    per_replica = []
    for rank in range(topology.data_size):
        parts = [m.rank_samples(rank) for m in plan.mini_batches]
        per_replica.append(np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64))
    nothing = np.empty(0, dtype=np.int64)
    ends = (0, topology.pipeline_size - 1)
    return [
        per_replica[topology.data_rank_of(rank)] if every_stage or topology.pipeline_rank_of(rank) in ends else nothing
        for rank in range(topology.world_size)
    ]


def _routed_fault(sample: Sample, num_experts: int) -> str | None:
    """Return a message that says what is wrong with a sample's routed experts; None if they fit or there are none.

    num_experts: the model's number of experts; 0 skips the check of the experts' numbers.
    """
    routed, tokens = sample.routed_experts, len(sample.token_ids)
    if routed is None:
        return None
    if routed.dtype == np.int16 and routed.ndim == 3 and len(routed) == tokens and 0 not in routed.shape:
        return _expert_fault(sample, num_experts) if num_experts else None
    return (
        f"routed_experts of sample {sample.sample_id} is {routed.dtype} {list(routed.shape)}; it must be int16 "
        f"[{tokens}, layers, top_k], a row for each of its {tokens} tokens (−1 where an expert is not known), or None"
    )


def _expert_fault(sample: Sample, num_experts: int) -> str | None:
    """Return a message about the first wrong expert number in ``sample.routed_experts``; None if all are right.

    The array's shape was checked before.
    """
    ordered = np.sort(sample.routed_experts, axis=2)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=2)
    faulty = (ordered[..., -1] >= num_experts) | (ordered[..., 0] < 0) | twice
    faulty &= (ordered != -1).any(axis=2)  # only −1: the token's experts are not known
    if not faulty.any():
        return None
    token, layer = np.argwhere(faulty)[0].tolist()
    return (
        f"routed_experts of sample {sample.sample_id} sends token {token} in layer {layer} to experts "
        f"{sample.routed_experts[token, layer].tolist()}; each must be another one of 0 to {num_experts - 1}, or all "
        "of them −1 where they are not known. Look at the engine that gave them, or set rollout.routing_replay=off"
    )


def _row_words(facts: BatchFacts) -> np.ndarray:
    """Return the number of int32 words in which each sample's row is sent, int64 [S]."""
    words = facts.total_tokens + 2 * facts.response_tokens
    if facts.routed_shapes is not None:
        words = words + (facts.total_tokens * facts.routed_shapes.prod(axis=1) + 1) // 2
    return words


def _encode(sample: Sample) -> np.ndarray:
    parts = [
        sample.token_ids.astype(np.int32),
        sample.loss_mask.astype(np.int32),
        sample.logprobs.astype(np.float32).view(np.int32),
    ]
    if sample.routed_experts is not None:
        flat = sample.routed_experts.reshape(-1)
        parts.append(np.concatenate([flat, np.zeros(flat.size % 2, dtype=np.int16)]).view(np.int32))
    return np.concatenate(parts)


def _decode(row: np.ndarray, index: int, facts: BatchFacts) -> Sample:
    prompt, response = int(facts.prompt_tokens[index]), int(facts.response_tokens[index])
    tokens, mask, logprobs, routed = np.split(row, np.cumsum([prompt + response, response, response]))
    experts = None
    if len(routed):
        shape = (prompt + response, *facts.routed_shapes[index].tolist())
        experts = routed.view(np.int16)[: math.prod(shape)].reshape(shape)
    return Sample(
        sample_id=facts.sample_ids[index],
        prompt_tokens=prompt,
        token_ids=tokens.astype(np.int64),
        loss_mask=mask.astype(bool),
        logprobs=logprobs.view(np.float32),
        routed_experts=experts,
        weight_version=int(facts.weight_versions[index]),
    )


def exchange_rows(
    facts: BatchFacts, local: Sequence[Sample], needed: list[np.ndarray], topology: Topology
) -> Mapping[int, Sample]:
    """Return {sample index: sample} for the samples that this rank needs, its own included. A collective.

    local: this rank's samples. Those that this rank needs itself are not sent.
    needed: for each global rank, the indices of the samples that it needs.
    """
    # which samples go where, and how many words
    rank = topology.rank
    outgoing = [
        wanted[facts.owners[wanted] == rank] if peer != rank else wanted[:0] for peer, wanted in enumerate(needed)
    ]
    incoming = [
        needed[rank][facts.owners[needed[rank]] == peer] if peer != rank else needed[rank][:0]
        for peer in range(len(needed))
    ]
    sizes = _row_words(facts)
    send_sizes = [int(sizes[x].sum()) for x in outgoing]
    receive_sizes = [int(sizes[x].sum()) for x in incoming]
    # exchange, and decode
    encoded = [_encode(local[facts.owner_rows[i]]) for part in outgoing for i in part]
    send = torch.from_numpy(np.concatenate(encoded) if encoded else np.empty(0, dtype=np.int32)).to(HOST.device)
    receive = torch.empty(sum(receive_sizes), dtype=torch.int32, device=HOST.device)
    if topology.world_size > 1:
        dist.all_to_all_single(receive, send, receive_sizes, send_sizes)
    rows = {int(i): local[facts.owner_rows[i]] for i in needed[rank] if facts.owners[i] == rank}
    indices = [int(i) for part in incoming for i in part]
    parts = np.split(receive.cpu().numpy(), np.cumsum(sizes[indices])[:-1]) if indices else []
    rows.update({i: _decode(part, i, facts) for i, part in zip(indices, parts, strict=True)})
    return rows


def gather_flat(
    facts: BatchFacts, local: Sequence[Sample], rank: int, of: Callable[[Sample], np.ndarray]
) -> np.ndarray:
    """Return one number for each response token of the batch, float32 [T] sample after sample, on every rank.

    A collective.

    local: this rank's samples.
    rank: this rank's global number.
    of: a function of a sample that returns its response tokens' numbers; called for ``local`` alone.
    """
    offsets = facts.response_offsets
    flat = torch.zeros(int(offsets[-1]), dtype=torch.float32)
    for i in np.flatnonzero(facts.owners == rank):
        flat[offsets[i] : offsets[i + 1]] = torch.from_numpy(of(local[facts.owner_rows[i]]).astype(np.float32))
    flat = flat.to(HOST.device)
    dist.all_reduce(flat)
    return flat.cpu().numpy()


def gather_scores(
    scores: Sequence[Score], places: Sequence[int], num_functions: int, *, sample_ids: Sequence[str] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Return (total rewards, float64 [S]; rewards by function, float64 [S, F]) of all samples. A collective.

    The samples are ordered by ``places``. In the result, NaN stands for a reward that a score lacks.

    places: the positions of this rank's samples among all samples.
    sample_ids: the ids of this rank's samples, for messages; without ids, messages give the
        position.

    Raises NonFiniteAdvantage on every rank if a score itself holds NaN or infinity: such a NaN would
    be taken for a missing reward.
    """
    called = sample_ids or [f"at place {place}" for place in places]
    local = [
        [place, fault] if (fault := _score_fault(score, name)) else [place, None, score.total, score.by_function]
        for place, score, name in zip(places, scores, called, strict=True)
    ]
    rows = sorted((row for part in gather_json(local) for row in part), key=lambda row: row[0])
    # every rank checks all rows, so that all raise together
    faults = [row[1] for row in rows if row[1]]
    if faults:
        raise NonFiniteAdvantage(f"{faults[0]} ({len(faults)} such samples)")
    totals = np.array([row[2] for row in rows], dtype=np.float64)  # None becomes NaN
    by_function = np.array([row[3] for row in rows], dtype=np.float64).reshape(len(rows), num_functions)
    return totals, by_function


def _score_fault(score: Score, name: str) -> str | None:
    """Return a message if a reward in ``score`` is not finite, else None; ``name`` is the sample's name in it."""
    if all(value is None or math.isfinite(value) for value in (score.total, *score.by_function)):
        return None
    values = ", ".join("none" if value is None else f"{value:g}" for value in score.by_function)
    total = "none" if score.total is None else f"{score.total:g}"
    return (
        f"the total reward of sample {name} is {total}, of reward.functions that gave ({values}): it must be finite; "
        "mend the functions, or lower reward.weights"
    )
