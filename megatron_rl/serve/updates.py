"""The work of a training request on every rank: make its data a batch, plan and run the batch, return the answer.

Every rank holds the whole request, so that ranks exchange nothing before the forward pass. If the
loss's coefficients of a datum are all 0, the datum trains nothing. As in the trainer, its backward
pass is then skipped: it runs only forward, for its log-probs. Under ``serve.logprobs=trained`` it
does not run at all. Gradients add up in the backend until ``optim_step``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch, TargetSample
from megatron_rl.planning.plan import plan_steps
from megatron_rl.planning.tokens import tokens_of
from megatron_rl.serve.losses import (
    ServedInputs,
    ServedLoss,
    coefficients,
    loss_sum,
    ratio_mask,
    served_loss,
    without_least,
)
from megatron_rl.serve.values import Datum, RequestError, TrainingAnswer, TrainingCall
from megatron_rl.types import Sample, StepKind, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """Holds a training request of S data in the backend's form. T is the number of targets in its batch.

    starts: int64 [S], for each datum the index of the first input token whose target is in the
        batch: the first whose log-prob is needed. It is 0 under ``serve.logprobs=all``.
    sequences: int64 [T], the index of the datum to which each target in the batch belongs.
    signal: bool [S], True for data whose gradient may be non-zero.
    trained: bool [S], True for data that run backward: the data with signal, or all under
        ``skip.mode=off``.
    wanted: bool [S], True for data whose log-probs are in the answer.
    """

    call: TrainingCall
    loss: ServedLoss
    batch: Batch
    inputs: ServedInputs
    starts: np.ndarray
    sequences: np.ndarray
    signal: np.ndarray
    trained: np.ndarray
    wanted: np.ndarray


def prepare(backend: MegatronBackend, call: TrainingCall, *, logprobs: str, least_advantage: float = 0.0) -> Prepared:
    """Return a training request in the backend's form: its batch, and its loss's inputs. Not a collective.

    logprobs: ``serve.logprobs``.
    least_advantage: ``serve.least_advantage``.
    """
    # Find the targets whose log-probs are read, and make the batch from there on.
    loss = served_loss(call.loss, call.settings)
    call = dataclasses.replace(call, data=[without_least(loss, datum, least_advantage) for datum in call.data])
    skips = backend.config.skip.mode != "off"
    everything = logprobs == "all" or call.forward_only or not skips
    read = [_read_targets(loss, datum, everything) for datum in call.data]
    starts = np.array([0 if everything else _start(places) for places in read])
    rows = zip(call.data, read, starts.tolist(), strict=True)
    batch = backend.replicate([_sample(i, *row) for i, row in enumerate(rows)])
    # Flatten the loss's inputs, and find the data with signal.
    parts = [_flat_inputs(loss, datum, start) for datum, start in zip(call.data, starts.tolist(), strict=True)]
    signal = np.array([loss.trains_all or bool(coefficients(loss, datum).any()) for datum in call.data])
    signal &= not call.forward_only
    return Prepared(
        call=call,
        loss=loss,
        batch=batch,
        inputs=ServedInputs(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]}),
        starts=starts,
        sequences=np.repeat(np.arange(len(call.data)), np.diff(batch.facts.response_offsets)),
        signal=signal,
        trained=signal if skips else np.full_like(signal, not call.forward_only),
        wanted=np.ones(len(call.data), dtype=bool) if everything else signal,
    )


def _read_targets(loss: ServedLoss, datum: Datum, everything: bool) -> np.ndarray:
    """Return bool [N], one for each input token of a datum: True if its target's log-prob is needed.

    It is needed for the loss or for the answer.

    everything: whether the answer has the log-probs of all targets.
    """
    if everything or loss.trains_all:
        return np.ones(len(datum.tokens), dtype=bool)
    read = coefficients(loss, datum) != 0
    if loss.reads_mask:  # also the targets of gspo's mean, unless the datum trains nothing
        read = read | ((ratio_mask(loss, datum) != 0) & read.any())
    return read.any(axis=1)


def _start(read: np.ndarray) -> int:
    """Return the index of a datum's first input token whose target's log-prob is needed; 0 if there is none.

    The tokens up to and including this index become the sample's prompt. Equal prompts may be run
    once for several samples.

    read: bool [N], True for each such token.
    """
    return int(read.argmax()) if read.any() else 0


def _sample(number: int, datum: Datum, read: np.ndarray, start: int) -> Sample:
    """Return a datum as the backend's Sample. Its prompt ends with the token at index ``start``; its response follows.

    The last target is appended as the last token. The result is a plain Sample if each target whose
    log-prob is needed is the next token of the sequence. Otherwise it is a TargetSample, which holds
    the targets.

    number: the datum's index in the request.
    read: bool [N], True for each input token whose target's log-prob is needed.
    """
    fields = dict(
        sample_id=f"data[{number}]",
        prompt_tokens=start + 1,
        loss_mask=read[start:],
        logprobs=np.zeros(len(datum.tokens) - start, dtype=np.float32),
    )
    targets = datum.targets[start:]
    tokens = np.append(datum.tokens, targets[-1, 0])
    if targets.shape[1] == 1 and np.array_equal(np.where(read[start:], targets[:, 0], 0), _next(tokens, read, start)):
        return Sample(token_ids=tokens, **fields)
    return TargetSample(token_ids=tokens, targets=targets, **fields)


def _next(tokens: np.ndarray, read: np.ndarray, start: int) -> np.ndarray:
    return np.where(read[start:], tokens[start + 1 :], 0)


def _flat_inputs(loss: ServedLoss, datum: Datum, start: int) -> dict[str, np.ndarray]:
    """Return the loss's inputs at a datum's targets from index ``start`` on: name → float32, flat over the targets.

    Old log-probs that the loss does not read are 0.
    """
    coefficient, mask = coefficients(loss, datum)[start:], ratio_mask(loss, datum)[start:]
    old = datum.inputs["logprobs"][start:] if "logprobs" in loss.reads else np.zeros_like(coefficient)
    read = np.ones_like(coefficient) if loss.trains_all else (coefficient != 0) | (mask != 0) & loss.reads_mask
    return {
        "advantages": coefficient.reshape(-1),
        "weights": mask.reshape(-1),
        "old_logprobs": np.where(read, old, 0.0).astype(np.float32).reshape(-1),
    }


def run(backend: MegatronBackend, prepared: Prepared) -> TrainingAnswer:
    """Run a request forward and backward, and add its gradient to the accumulated gradient. A collective.

    Returns the answer: log-probs and metrics.
    """
    # Run the data that train forward and backward.
    batch, signal = prepared.batch, prepared.trained
    tokens = tokens_of(batch.facts, share_prompts=backend.rules.share_prompts)
    members = np.arange(batch.facts.num_samples)
    plan = plan_steps("serve", [members], tokens, signal, backend.rules, drops=True)
    (step,) = plan.mini_batches
    flat = np.zeros(int(batch.facts.response_offsets[-1]), dtype=np.float32)
    ran = np.zeros_like(signal)
    executed = _executed(step, tokens)
    if step.kind is StepKind.REAL:
        objective = backend.objective_of(prepared.loss.term)
        flat = backend.forward_backward_logprobs(
            batch, step, prepared.inputs, fingerprint=plan.fingerprints()[0], objective=objective
        )
        ran[step.ran] = True
    # Run the other data forward, if their log-probs are wanted.
    rest = prepared.wanted & ~ran
    if rest.any():
        plan = plan_steps("logprob", [members], tokens, rest, backend.rules, drops=True)
        flat = flat + backend.forward(batch, plan).flat
        executed += _executed(plan.mini_batches[0], tokens)
    return _answer(prepared, flat, executed)


def _executed(step: StepPlan, tokens) -> int:
    return int(tokens.sums(step.order, step.microbatch_offsets)[0].sum()) if len(step.order) else 0


def _answer(prepared: Prepared, flat: np.ndarray, executed: int) -> TrainingAnswer:
    data, offsets = prepared.call.data, prepared.batch.facts.response_offsets
    if not np.isfinite(flat).all():
        raise RequestError(
            "the model's log-probs are not finite: an earlier optim_step has broken its weights (a large learning_rate "
            "or weight_decay?); load a checkpoint, or make the model anew"
        )
    total, clipped = loss_sum(prepared.loss, flat, prepared.inputs, prepared.sequences, len(data))
    return TrainingAnswer(
        logprobs=[
            _in_shape(datum, int(start), flat[first:last])
            for datum, start, first, last in zip(data, prepared.starts, offsets, offsets[1:], strict=False)
        ],
        metrics={
            "loss:sum": total,
            "num_data:sum": float(len(data)),
            "num_data_without_gradient:sum": float((~prepared.signal).sum()),
            "num_tokens:sum": float(sum(len(datum.tokens) for datum in data)),
            "num_tokens_executed:sum": float(executed),
            "num_targets_clipped:sum": float(clipped),
        },
    )


def _in_shape(datum: Datum, start: int, values: np.ndarray) -> np.ndarray:
    """Return a datum's log-probs in the shape of its targets, with 0 before index ``start``.

    values: float32, the log-probs from ``start`` on, flat.
    """
    whole = np.zeros(datum.targets.shape, dtype=np.float32)
    whole[start:] = values.reshape(-1, datum.targets.shape[1])
    return whole[:, 0] if datum.flat else whole
