"""The verdict of megatron-rl verify: the rows of the table of checks, and a sentence on the first difference."""

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
    """Holds the result of the comparison.

    rows: the rows of the printed table, one for each check.
    diagnosis: a sentence on the first difference; "" if all checks pass.
    tensors: {tensor's name: relative error} of the gradient over all samples.
    skip_tensors: the same of the gradient with samples dropped, against the one over all samples.
    activations: the relative error of one sample's activations, for each compared tensor of the
        forward pass and each data-parallel replica.
    samples: {sample id: relative error of its log-probs}.
    """

    rows: tuple[Row, ...]
    diagnosis: str
    tensors: Mapping[str, float]
    skip_tensors: Mapping[str, float]
    activations: tuple[ActivationError, ...]
    samples: Mapping[str, float]
    passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Holds the errors of all measurements, except the gradient norm and the weights.

    activations: the errors of one sample's activations, for each compared tensor of the forward
        pass and each data-parallel replica.
    samples: {sample id: error of its log-probs}.
    classes: {class of tensors: error of the gradient over all samples, against the reference's}.
    skip: {class of tensors: error of the gradient with samples dropped, against the one over all
        samples}; {} if it was not measured.
    """

    activations: Sequence[ActivationError]
    samples: Mapping[str, float]
    classes: Mapping[str, ClassError]
    skip: Mapping[str, ClassError]


def judge(
    measured: Measured, wanted: Measured, tolerance: float, *, counts: Mapping[str, int], no_skip: str
) -> Verdict:
    """Compare the measurements with the reference's, and return the verdict.

    wanted: the reference's measurements.
    tolerance: the largest relative error that passes.
    counts: {name: number}, such as the numbers of micro-batches and of tensor-parallel ranks. If
        all gradients are wrong by one factor, the diagnosis names the counts that equal it.
    no_skip: why the gradient with samples dropped was not measured; not used if it was.
    """
    errors = _errors_of(measured, wanted, tolerance)
    norm = abs(measured.grad_norm - wanted.grad_norm) / wanted.grad_norm
    # One row for each check, with the tensor or sample that differs the most.
    worst_point = max(errors.activations, key=lambda x: x.error)
    worst_sample = max(errors.samples, key=lambda name: errors.samples[name])
    rows = [
        Row(check="activations of one sample", error=worst_point.error, where=str(worst_point.point)),
        Row(check="log-probs per sample", error=errors.samples[worst_sample], where=f"sample {worst_sample}"),
        *(
            Row(
                check=f"gradient: {kind}",
                error=x.error,
                where=x.worst,
                note=f"that tensor alone {x.tensors[x.worst]:.1e}",
            )
            for kind, x in errors.classes.items()
        ),
        Row(
            check="gradient norm of optim_step",
            error=norm,
            note=f"{measured.grad_norm:.6g}, reference {wanted.grad_norm:.6g}",
        ),
        Row(
            check="weights after 3 AdamW steps",
            error=total_error(measured.weights, wanted.weights),
            note="all weights together",
        ),
        _skip_row(measured, errors.skip, no_skip),
    ]
    all_pass = all(row.passes(tolerance) for row in rows)
    return Verdict(
        rows=tuple(rows),
        diagnosis="" if all_pass else diagnose(rows, measured, wanted, errors, tolerance, counts),
        tensors={name: error for x in errors.classes.values() for name, error in x.tensors.items()},
        skip_tensors={name: error for x in errors.skip.values() for name, error in x.tensors.items()},
        activations=tuple(errors.activations),
        samples=errors.samples,
        passed=all_pass,
    )


def _errors_of(measured: Measured, wanted: Measured, tolerance: float) -> Errors:
    skip = {}
    if measured.skip_gradient is not None:
        skip = class_errors(measured.skip_gradient, measured.gradient, tolerance)
    return Errors(
        activations=activation_errors(measured.traces, wanted.traces[0], tolerance),
        samples=logprob_errors(measured.logprobs, wanted.logprobs),
        classes=class_errors(measured.gradient, wanted.gradient, tolerance),
        skip=skip,
    )


def _skip_row(measured: Measured, skip: Mapping[str, ClassError], no_skip: str) -> Row:
    if measured.skip_gradient is None:
        return Row(check="skip against dense", error=None, note=no_skip)
    dense, less = (sum(measured.facts[name]) for name in ("microbatches", "skip_microbatches"))
    note = f"{measured.facts['dropped']} samples dropped, {dense} -> {less} micro-batches"
    worst = max(skip.values(), key=lambda x: x.error).worst
    return Row(
        check="skip against dense", error=total_error(measured.skip_gradient, measured.gradient), where=worst, note=note
    )


def diagnose(
    rows: Sequence[Row],
    measured: Measured,
    wanted: Measured,
    errors: Errors,
    tolerance: float,
    counts: Mapping[str, int],
) -> str:
    """Return a sentence on the first difference, looked for in the order of a training step.

    The order is forward pass, backward pass, gradient norm, weights after the steps, and last the
    gradient with samples dropped against the one over all samples.

    rows, errors: the table of checks, and the errors of the measurements.
    measured, wanted, tolerance, counts: the arguments of ``judge``.
    """
    # The forward pass.
    forward = next((x for x in errors.activations if not x.error <= tolerance), None)
    if forward is not None:
        holders = measured.facts.get("holders", [0] * forward.num_tokens)
        return f"the first difference appears at the {say_activation(forward, len(measured.traces), holders)}."
    sample = next((name for name, error in errors.samples.items() if not error <= tolerance), None)
    if sample is not None:
        return (
            f"one sample alone gives the same activations, and the log-probs of sample {sample} among others do not "
            f"agree ({errors.samples[sample]:.1e}): look at packing, at padding and at the vocabulary-parallel "
            "log-probs."
        )
    # The backward pass.
    if any(not x.error <= tolerance for x in errors.classes.values()):
        return _diagnose_gradient(measured, wanted, errors.classes, tolerance, counts)
    # The optimizer's steps, and skip against dense.
    failed = {row.check for row in rows if not row.passes(tolerance)}
    if "gradient norm of optim_step" in failed:
        ratio = measured.grad_norm / wanted.grad_norm
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
    name, error = first_gradient(errors.skip) or ("", float("nan"))
    return (
        f"dense agrees with the reference and skip does not agree with dense: first, in backward order, {name} "
        f"({error:.1e})."
    )


def _diagnose_gradient(
    measured: Measured, wanted: Measured, classes: Mapping[str, ClassError], tolerance: float, counts: Mapping[str, int]
) -> str:
    forward = "activations and log-probs agree"
    factor = common_factor(measured.gradient, wanted.gradient, tolerance)
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
