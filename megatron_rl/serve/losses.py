"""Tinker's losses, as terms of the trainer's own loss over tokens (algorithm/policy_loss.py).

Each loss is a sum over all targets of a request, without a division by their number. A client that
wants a mean puts the division into its coefficients, here as in Tinker. A loss's coefficients are
the client's input that weighs each target. Clip thresholds are ``clip_low_threshold`` and
``clip_high_threshold``.

| Tinker's loss | the trainer's loss | coefficients | defaults |
|---|---|---|---|
| cross_entropy | reinforce, with the weights as advantages | weights | |
| importance_sampling | importance_sampling | advantages | |
| ppo | ppo | advantages | clip thresholds 0.8 and 1.2 |
| cispo | cispo | advantages | clip thresholds 0.0 and 4.0 |
| gspo | gspo, with ratios averaged over sequence_ratio_mask | advantages | clip thresholds 1 − 3e-4 and 1 + 4e-4 |
| dro | dro, with a weight of 1 at every target | advantages | beta 0.05 |

No published defaults of Tinker were found for gspo and dro. gspo's thresholds are its paper's, and
beta is this server's own.

A target whose coefficient is 0 has no gradient, except under dro. Its old log-prob is not read, and
may be anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.algorithm.own_policy import PolicyTokens
from megatron_rl.algorithm.policy_loss import PolicyTerm, cispo, dro, gspo, importance_sampling, ppo, reinforce
from megatron_rl.errors import quoted
from megatron_rl.serve.values import Datum, RequestError

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
THRESHOLDS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (1 - 3e-4, 1 + 4e-4)}
BETA = 0.05
MOST_NUMBER = 3.4e38  # the largest float32, since losses are computed in float32
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLoss:
    """Holds one request's loss.

    term: a function of PolicyTokens that returns the policy term: loss and clipped targets.
    reads: the names of the inputs that it needs from a datum. The last one is each target's weight
        in the loss: "advantages" or "weights".
    reads_mask: whether it reads ``sequence_ratio_mask`` if a datum has one.
    trains_all: whether a target trains even if its advantage is 0.
    """

    name: str
    term: Callable[[PolicyTokens], PolicyTerm]
    reads: tuple[str, ...] = ("logprobs", "advantages")
    reads_mask: bool = False
    trains_all: bool = False

    @property
    def coefficient(self) -> str:
        """Return the name of the input that weighs each target, "advantages" or "weights"; weight 0 trains nothing."""
        return self.reads[-1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedInputs:
    """Holds the inputs of a request's loss, each float32 [T]: one value for each target in the batch.

    The values of datum i begin at index ``Batch.facts.response_offsets[i]``.

    advantages: the loss's coefficients.
    weights: 1 at every target. For the loss gspo, the client's mask: 1 at targets that count.
    old_logprobs: the client's ``logprobs``; 0 for a loss that does not use them.
    """

    advantages: np.ndarray
    weights: np.ndarray
    old_logprobs: np.ndarray

    def gather(self, samples: np.ndarray, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return {input's name: its values [N]} at N targets.

        samples: not read.
        flat: [N], the targets' indices into the inputs.
        """
        return {
            "advantages": self.advantages[flat],
            "weights": self.weights[flat],
            "old_logprobs": self.old_logprobs[flat],
        }


def served_loss(name: str, settings: Mapping[str, float | str]) -> ServedLoss:
    """Return the loss function that a request names. Raises RequestError for an unknown name or setting.

    name: the request's ``loss_fn``, such as "ppo".
    settings: the request's ``loss_fn_config``, such as ``{"clip_low_threshold": 0.8}``.
    """
    if name == "stable_reinforce":
        raise RequestError(
            "loss_fn='stable_reinforce' has no published formula, so it is not served; pass one of "
            "'importance_sampling', 'ppo', 'cispo', 'gspo' as loss_fn (in tinker-cookbook: loss_fn=importance_sampling)"
        )
    if name not in LOSSES:
        raise RequestError(f"loss_fn={quoted(name)} is not served; pass one of {', '.join(LOSSES)}")
    known = {_LOW, _HIGH} if name in THRESHOLDS else {"beta"} if name == "dro" else set()
    if unknown := sorted(set(settings) - known):
        raise RequestError(
            f"loss_fn_config has {quoted(unknown[0])}, which loss_fn={name!r} does not read; it reads "
            f"{', '.join(sorted(known)) or 'nothing'}"
        )
    numbers = {key: _number(key, value) for key, value in settings.items()}
    match name:
        case "cross_entropy":
            return ServedLoss(name=name, term=_of(reinforce), reads=("weights",))
        case "importance_sampling":
            return ServedLoss(name=name, term=_of(importance_sampling))
        case "dro":
            beta = numbers.get("beta", BETA)
            return ServedLoss(name=name, term=_dro(beta), trains_all=beta != 0)
    low, high = (numbers.get(key, default) for key, default in zip((_LOW, _HIGH), THRESHOLDS[name], strict=True))
    if low > high:
        raise RequestError(f"{_LOW}={low:g} is above {_HIGH}={high:g}")
    if name == "gspo":
        return ServedLoss(name=name, term=_gspo(low, high), reads_mask=True)
    return ServedLoss(name=name, term=_of({"ppo": ppo, "cispo": cispo}[name], low=low, high=high))


def _number(key: str, value: float | str) -> float:
    if isinstance(value, str) or not abs(value) <= MOST_NUMBER:
        raise RequestError(f"loss_fn_config[{quoted(key)}]={quoted(value)} must be a number of float32's range")
    return float(value)


def _of(function: Callable[..., PolicyTerm], **bounds: float) -> Callable[[PolicyTokens], PolicyTerm]:
    def term(tokens: PolicyTokens) -> PolicyTerm:
        return function(tokens.logprobs, tokens.old_logprobs, tokens.advantages, **bounds)

    return term


def _dro(beta: float) -> Callable[[PolicyTokens], PolicyTerm]:
    def term(tokens: PolicyTokens) -> PolicyTerm:
        return dro(tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.weights, beta=beta)

    return term


def _gspo(low: float, high: float) -> Callable[[PolicyTokens], PolicyTerm]:
    def term(tokens: PolicyTokens) -> PolicyTerm:
        return gspo(
            tokens.logprobs,
            tokens.old_logprobs,
            tokens.advantages,
            tokens.sequences,
            tokens.num_sequences,
            low=low,
            high=high,
            whole=tokens.complete_sums,
            counted=tokens.weights,
        )

    return term


def check_inputs(loss: ServedLoss, data: Sequence[Datum], vocab_size: int, longest: int) -> None:
    """Raise RequestError if the loss or the model cannot read one of the data.

    longest: the maximum of tokens of a datum.
    """
    allowed = {*loss.reads, *(["sequence_ratio_mask"] if loss.reads_mask else [])}
    for number, datum in enumerate(data):
        where = f"data[{number}]"
        if len(datum.tokens) > longest:
            raise RequestError(f"{where} has {len(datum.tokens)} tokens, and this model reads {longest} at most")
        if datum.targets.shape[1] > vocab_size:
            raise RequestError(
                f"{where}.target_tokens has {datum.targets.shape[1]} targets after each token, and the vocabulary has "
                f"{vocab_size} tokens"
            )
        for name, tokens in (("model_input", datum.tokens), ("target_tokens", datum.targets)):
            if tokens.min() < 0 or tokens.max() >= vocab_size:
                outside = tokens.max() if tokens.max() >= vocab_size else tokens.min()
                raise RequestError(f"{where}.{name} holds token {outside}, and the vocabulary has {vocab_size} tokens")
        if missing := [name for name in loss.reads if name not in datum.inputs]:
            if missing == ["weights"]:
                continue
            raise RequestError(f"{where} has no {missing[0]}, which loss_fn={loss.name!r} reads")
        if loss.name != "cross_entropy" and not datum.flat:
            raise RequestError(f"{where}.target_tokens is [N, K], which cross_entropy alone takes")
        if unread := sorted(set(datum.inputs) - allowed):
            if unread == ["weights"] and _says_nothing(datum):
                continue
            way_out = "multiply the advantages by them" if unread[0] == "weights" else "leave it out"
            raise RequestError(f"{where}.{quoted(unread[0])[1:-1]} is not read by loss_fn={loss.name!r}; {way_out}")


def _says_nothing(datum: Datum) -> bool:
    """Return whether a datum's input ``weights`` change nothing: they are 1 wherever the advantage is not 0."""
    return bool(((datum.inputs["weights"] == 1) | (datum.inputs["advantages"] == 0)).all())


def coefficients(loss: ServedLoss, datum: Datum) -> np.ndarray:
    """Return float32 [N, K], the weight in the loss of each of K targets after each of a datum's N tokens.

    It is the input named by ``loss.coefficient``; all are 1 if the datum lacks it.
    """
    return datum.inputs.get(loss.coefficient, np.ones(datum.targets.shape, dtype=np.float32))


def without_least(loss: ServedLoss, datum: Datum, least: float) -> Datum:
    """Return the datum with advantages of at most ``least`` in absolute value set to 0.

    The weights of cross_entropy are not changed.
    """
    if not least or loss.coefficient != "advantages" or "advantages" not in datum.inputs:
        return datum
    sent = datum.inputs["advantages"]
    return dataclasses.replace(datum, inputs={**datum.inputs, "advantages": np.where(abs(sent) <= least, 0, sent)})


def ratio_mask(loss: ServedLoss, datum: Datum) -> np.ndarray:
    """Return float32 [N, K], 1 at the targets over which gspo averages its ratios. Without a mask all are 1."""
    mask = datum.inputs.get("sequence_ratio_mask") if loss.reads_mask else None
    return np.ones(datum.targets.shape, dtype=np.float32) if mask is None else (mask != 0).astype(np.float32)


def loss_sum(
    loss: ServedLoss, logprobs: np.ndarray, inputs: ServedInputs, sequences: np.ndarray, num_sequences: int
) -> tuple[float, int]:
    """Return (sum of the loss over a request's targets, number of clipped targets), in float64.

    logprobs: float32 [T], the model's log-probs.
    sequences: int64 [T], the number of each target's datum.
    num_sequences: the number of data.
    """
    flat = torch.from_numpy(logprobs).double()
    term = loss.term(
        PolicyTokens(
            logprobs=flat,
            old_logprobs=torch.from_numpy(inputs.old_logprobs).double(),
            rollout_logprobs=flat,
            advantages=torch.from_numpy(inputs.advantages).double(),
            weights=torch.from_numpy(inputs.weights).double(),
            sequences=torch.from_numpy(sequences),
            num_sequences=num_sequences,
        )
    )
    return float(term.loss.sum()), int(term.clipped.sum())
