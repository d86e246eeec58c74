"""Judges two topologies' measurements: the table's rows, and the sentence that names the first difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.commands.verify.compare import (
    ActivationError,
    ClassError,
    Measured,
    Row,
    activation_errors,
    class_errors,
    common_factor,
    explain_factor,
    first_gradient,
    logprob_errors,
    say_activation,
    total_error,
)

SMALL_RATIO = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Holds the table's rows and the diagnosis.

    diagnosis: "" if all checks pass.
    tensors, skip_tensors, activations, samples: every single error, for --json.
    """

    rows: tuple[Row, ...]
    diagnosis: str
    tensors: Mapping[str, float]
    skip_tensors: Mapping[str, float]
    activations: tuple[ActivationError, ...]
    samples: Mapping[str, float]
    passed: bool


def judge(found: Measured, wanted: Measured, tolerance: float, *, counts: Mapping[str, int], no_skip: str) -> Verdict:
    """Compare the measurements and judge every check.

    counts: numbers of micro-batches and of each kind of ranks, the possible origins of a common factor.
    no_skip: the reason why skip is not compared.
    """
    # Errors of every measurement.
    activations = activation_errors(found.traces, wanted.traces[0], tolerance)
    samples = logprob_errors(found.logprobs, wanted.logprobs)
    classes = class_errors(found.gradient, wanted.gradient, tolerance)
    skip = class_errors(found.skip_gradient, found.gradient, tolerance) if found.skip_gradient is not None else {}
    norm = abs(found.grad_norm - wanted.grad_norm) / wanted.grad_norm
    # One row for each check, with its worst point.
    worst_point = max(activations, key=lambda x: x.error)
    worst_sample = max(samples, key=lambda name: samples[name])
    rows = [
        Row(check="activations of one sample", error=worst_point.error, where=str(worst_point.point)),
        Row(check="log-probs per sample", error=samples[worst_sample], where=f"sample {worst_sample}"),
        *(
            Row(
                check=f"gradient: {kind}",
                error=x.error,
                where=x.worst,
                note=f"that tensor alone {x.tensors[x.worst]:.1e}",
            )
            for kind, x in classes.items()
        ),
        Row(
            check="gradient norm of optim_step",
            error=norm,
            note=f"{found.grad_norm:.6g}, reference {wanted.grad_norm:.6g}",
        ),
        Row(
            check="weights after 3 AdamW steps",
            error=total_error(found.weights, wanted.weights),
            note="all weights together",
        ),
        _skip_row(found, skip, no_skip),
    ]
    all_pass = all(row.passes(tolerance) for row in rows)
    return Verdict(
        rows=tuple(rows),
        diagnosis=""
        if all_pass
        else diagnose(rows, found, wanted, activations, samples, classes, skip, tolerance, counts),
        tensors={name: error for x in classes.values() for name, error in x.tensors.items()},
        skip_tensors={name: error for x in skip.values() for name, error in x.tensors.items()},
        activations=tuple(activations),
        samples=samples,
        passed=all_pass,
    )


def _skip_row(found: Measured, skip: Mapping[str, ClassError], no_skip: str) -> Row:
    if found.skip_gradient is None:
        return Row(check="skip against dense", error=None, note=no_skip)
    dense, less = (sum(found.facts[name]) for name in ("microbatches", "skip_microbatches"))
    note = f"{found.facts['dropped']} samples dropped, {dense} -> {less} micro-batches"
    worst = max(skip.values(), key=lambda x: x.error).worst
    return Row(
        check="skip against dense", error=total_error(found.skip_gradient, found.gradient), where=worst, note=note
    )


def diagnose(
    rows: Sequence[Row],
    found: Measured,
    wanted: Measured,
    activations: Sequence[ActivationError],
    samples: Mapping[str, float],
    classes: Mapping[str, ClassError],
    skip: Mapping[str, ClassError],
    tolerance: float,
    counts: Mapping[str, int],
) -> str:
    """Name the first difference: in the forward pass, then in the backward pass, then after it."""
    forward = next((x for x in activations if not x.error <= tolerance), None)
    if forward is not None:
        holders = found.facts.get("holders", [0] * forward.num_tokens)
        return f"the first difference appears at the {say_activation(forward, len(found.traces), holders)}."
    sample = next((name for name, error in samples.items() if not error <= tolerance), None)
    if sample is not None:
        return (
            f"one sample alone gives the same activations, and the log-probs of sample {sample} among others do not "
            f"agree ({samples[sample]:.1e}): look at packing, at padding and at the vocabulary-parallel log-probs."
        )
    if any(not x.error <= tolerance for x in classes.values()):
        return _diagnose_gradient(found, wanted, classes, tolerance, counts)
    failed = {row.check for row in rows if not row.passes(tolerance)}
    if "gradient norm of optim_step" in failed:
        ratio = found.grad_norm / wanted.grad_norm
        small = (
            "rounding in a float32 sum, or a small tensor"
            if abs(ratio - 1) < SMALL_RATIO
            else "a shard or a replicated tensor"
        )
        return (
            f"every gradient agrees and their norm is {ratio:.6g} times the reference's: {small} counted twice or not "
            "at all; clipping uses this norm."
        )
    if "weights after 3 AdamW steps" in failed:
        return (
            "gradients and norm agree and the weights after 3 steps do not: look at the optimizer's shards and its "
            "parameter gather."
        )
    name, error = first_gradient(skip) or ("", float("nan"))
    return (
        f"dense agrees with the reference and skip does not agree with dense: first, in backward order, {name} "
        f"({error:.1e})."
    )


def _diagnose_gradient(
    found: Measured, wanted: Measured, classes: Mapping[str, ClassError], tolerance: float, counts: Mapping[str, int]
) -> str:
    forward = "activations and log-probs agree"
    factor = common_factor(found.gradient, wanted.gradient, tolerance)
    if factor is not None:
        return f"{forward}, and {explain_factor(factor, counts)}."
    first = first_gradient(classes)
    if first is None:
        worst = max(classes.values(), key=lambda x: x.error)
        return (
            f"{forward}, and gradients differ a little everywhere, most in {worst.worst}: accumulated rounding, or "
            "too tight a tolerance."
        )
    name, error = first
    return (
        f"{forward}, and gradients do not: the first tensor of the backward pass that differs is {name}, relative "
        f"error {error:.1e}. Look at the reduction of its gradient, and at what the backward pass hands to it."
    )
