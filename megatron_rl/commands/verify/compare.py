"""The comparison of two sets of measurements, for megatron-rl verify. Its functions are pure: tensors in, errors out.

An error is ‖measured − wanted‖ / ‖wanted‖. A check passes or fails by the joint error of all tensors
of one class, such as all norms. So a tensor whose gradient is only rounding noise cannot fail the
check; the bias of a key projection often is such a tensor. If a check fails, the errors of the
single tensors show which tensor is at fault.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

CLASSES = (
    "embedding",
    "attention qkv",
    "attention output",
    "delta net projection",
    "delta net decay",
    "delta net output",
    "norms",
    "mlp gate/up",
    "mlp down",
    "router",
    "experts",
    "lm head",
)
# The order of the forward pass within one layer, and of the points before and after the layers.
POINTS = (
    "embedding",
    "layer input",
    "attention core",
    "attention output",
    "delta net core",
    "delta net output",
    "router",
    "experts output",
    "mlp output",
    "layer output",
    "final norm",
)
TENSOR_OF_POINT = {
    "embedding": "model.embed_tokens",
    "layer input": "",
    "attention core": "self_attn, before o_proj",
    "attention output": "self_attn.o_proj",
    "delta net core": "linear_attn, before out_proj",
    "delta net output": "linear_attn.out_proj",
    "router": "gate",
    "experts output": "experts",
    "mlp output": "mlp.down_proj",
    "layer output": "",
    "final norm": "model.norm",
}
LOOK_AT = {
    "embedding": "the vocabulary-parallel embedding and its reduction over tensor ranks",
    "layer input": "what the pipeline stage before it has sent",
    "attention core": "the shards of q, k and v, the positions of the tokens that a rank holds, "
    "and the keys gathered over context ranks",
    "attention output": "the tensor-parallel reduction behind this projection "
    "(all-reduce; reduce-scatter under sequence parallelism)",
    "delta net core": "the shards of the projection, the tokens gathered over context ranks, "
    "and the states that responses continue",
    "delta net output": "the tensor-parallel reduction behind this projection "
    "(all-reduce; reduce-scatter under sequence parallelism)",
    "router": "the router's weights, the same on every rank, and the order of its tokens",
    "experts output": "the all-to-all that takes tokens to their experts and back, "
    "and the experts' tensor-parallel reduction",
    "mlp output": "the tensor-parallel reduction behind this projection "
    "(all-reduce; reduce-scatter under sequence parallelism)",
    "layer output": "the residual connection",
    "final norm": "the final norm's weight",
}
FACTOR_SLACK = 2.0  # a common factor explains a difference if the rest is within so many tolerances
FAINT = 0.1  # a tensor is named only if its difference exceeds this share of its class's allowed difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Names a point in the forward pass at which activations are compared.

    layer: the number of the layer, from 0 over the whole model, as in ``model.layers.0``; −1
        outside the layers.
    name: the name of the point, such as ``attention output`` (POINTS).
    """

    layer: int
    name: str

    @property
    def order(self) -> tuple[int, int, int]:
        return (2 if self.name == "final norm" else int(self.layer >= 0), self.layer, POINTS.index(self.name))

    def __str__(self) -> str:
        prefix = f"model.layers.{self.layer}" if self.layer >= 0 else ""
        inside = ".".join(x for x in (prefix, TENSOR_OF_POINT[self.name]) if x)
        return f"{self.name} ({inside})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Holds one line of the printed table of checks.

    check: the check's name.
    error: the relative error; None if nothing was compared, for the reason in ``note``.
    where: the tensor, sample or point with the largest error.
    """

    check: str
    error: float | None
    where: str = ""
    note: str = ""

    def passes(self, tolerance: float) -> bool:
        return self.error is None or self.error <= tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Holds the measurements of one topology: unsharded tensors on the host, under Hugging Face names.

    logprobs: {sample id: [response] float32}.
    gradient: {name: gradient} of the dense step, which drops no sample.
    grad_norm: the gradient norm of the first optimizer step.
    weights: {name: weight after the last optimizer step}.
    traces: for each data-parallel replica, {Point: list of [tokens, columns]}, the activations of
        one sample. If several ranks hold a copy, the list has one element for each of them.
    skip_gradient: the gradient of the step that drops samples without signal; None if it is not
        compared.
    facts: other JSON-able values, such as the numbers of micro-batches.
    """

    logprobs: Mapping[str, np.ndarray]
    gradient: Mapping[str, torch.Tensor]
    grad_norm: float
    weights: Mapping[str, torch.Tensor]
    traces: Sequence[Mapping[Point, Sequence[torch.Tensor]]]
    skip_gradient: Mapping[str, torch.Tensor] | None = None
    facts: Mapping[str, object] = field(default_factory=dict)


def relative_error(measured: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return ‖measured − wanted‖ / ‖wanted‖, 0 if the two are equal.

    Returns inf if the shapes differ, if the difference is not finite, or if only ``wanted`` is
    zero.
    """
    if measured.shape != wanted.shape:
        return math.inf
    return _ratio(float((measured.double() - wanted.double()).norm()), float(wanted.double().norm()))


def _ratio(difference: float, norm: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / norm if math.isfinite(difference) and norm > 0 else math.inf


def tensor_class(name: str) -> str:
    """Return the class of a tensor by its Hugging Face name, such as "norms"; a bias has its weight's class.

    Example: ``model.layers.0.self_attn.k_proj.bias`` → "attention qkv".
    """
    for kind, pattern in (
        ("embedding", r"embed_tokens"),
        ("lm head", r"lm_head"),
        ("experts", r"\.experts?\."),
        ("attention qkv", r"\.[qkv]_proj\.|\.sinks|\.(q_a|q_b|kv_b)_proj\.|\.kv_a_proj_with_mqa\."),
        ("attention output", r"\.o_proj\."),
        ("delta net projection", r"\.linear_attn\.in_proj"),
        ("delta net decay", r"\.linear_attn\.(conv1d|A_log|dt_bias)"),
        ("delta net output", r"\.linear_attn\.out_proj"),
        ("norms", r"norm"),
        ("router", r"\.(gate|router|shared_expert_gate)\."),
        ("mlp gate/up", r"\.(gate|up|gate_up)_proj"),
        ("mlp down", r"\.down_proj"),
    ):
        if re.search(pattern, name):
            return kind
    raise ValueError(f"{name} belongs to no class of tensors that megatron-rl verify knows; add it to tensor_class")


_BACKWARD = (
    r"experts|(mlp|feed_forward)\.down_proj",
    r"(mlp|feed_forward)\.(gate|up)_proj",
    r"\.(gate|router|shared_expert_gate)\.",
    r"post_attention_layernorm",
    r"\.(o|out)_proj\.",
    r"linear_attn\.(norm|A_log|dt_bias)",
    r"linear_attn\.conv1d",
    r"\.sinks",
    r"\.[qk]_norm\.",
    r"\.v_proj\.",
    r"\.k_proj\.",
    r"\.q_proj\.",
    r"\.kv_b_proj\.",
    r"\.kv_a_layernorm\.",
    r"\.kv_a_proj_with_mqa\.",
    r"\.q_b_proj\.",
    r"\.q_a_layernorm\.",
    r"\.q_a_proj\.",
)


def backward_order(names: Iterable[str]) -> list[str]:
    """Return tensor names in the order in which the backward pass reaches them, from the LM head to the embedding.

    An embedding that is tied to the LM head comes last.
    """

    def key(name: str) -> tuple[int, int, int, str]:
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer is None:
            return (0 if "lm_head" in name else 3 if "embed" in name else 1, 0, 0, name)
        inside = next((i for i, pattern in enumerate(_BACKWARD) if re.search(pattern, name)), len(_BACKWARD))
        return (2, -int(layer[1]), inside, name)

    return sorted(names, key=key)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassError:
    """Holds the error of all tensors of one class together, and each tensor's error.

    error: the relative error of the class, as if its tensors were one vector.
    worst: the name of the tensor with the largest error of its own.
    tensors: {name: the tensor's own relative error}.
    judged: {name: whether the tensor may be blamed}: its own error exceeds the tolerance, and its
        difference is not negligible within the class.
    """

    error: float
    worst: str
    tensors: Mapping[str, float]
    judged: Mapping[str, bool]


def class_errors(
    measured: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float
) -> dict[str, ClassError]:
    """Compare tensors; return {class of tensors: ClassError}, from "embedding" to "lm head".

    measured, wanted: {name: tensor}.
    tolerance: the largest relative error that passes.

    A tensor that only one side has gets an infinite error.
    """
    members: dict[str, list[str]] = {}
    for name in [*wanted, *(x for x in measured if x not in wanted)]:
        members.setdefault(tensor_class(name), []).append(name)
    result = {}
    for kind in (x for x in CLASSES if x in members):
        names = members[kind]
        shared = [x for x in names if x in measured and x in wanted and measured[x].shape == wanted[x].shape]
        differences = {x: float((measured[x].double() - wanted[x].double()).norm()) for x in shared}
        norm = math.sqrt(sum(float(wanted[x].double().norm()) ** 2 for x in names if x in wanted))
        tensors = {x: relative_error(measured[x], wanted[x]) if x in shared else math.inf for x in names}
        total = (
            _ratio(math.sqrt(sum(x**2 for x in differences.values())), norm) if len(shared) == len(names) else math.inf
        )
        judged = {
            x: tensors[x] > tolerance and not differences.get(x, math.inf) <= FAINT * tolerance * norm for x in names
        }
        result[kind] = ClassError(
            error=total, worst=max(names, key=lambda x: tensors[x]), tensors=tensors, judged=judged
        )
    return result


def total_error(measured: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Return the relative error of all tensors together, as if they were one vector; inf if names or shapes differ."""
    if {k: x.shape for k, x in measured.items()} != {k: x.shape for k, x in wanted.items()}:
        return math.inf
    difference = math.sqrt(sum(float((measured[k].double() - wanted[k].double()).norm()) ** 2 for k in wanted))
    return _ratio(difference, math.sqrt(sum(float(x.double().norm()) ** 2 for x in wanted.values())))


def common_factor(
    measured: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float
) -> float | None:
    """Return the factor f ≠ 1 by which all tensors are too large: ``measured`` ≈ f · ``wanted``; None if there is none.

    measured, wanted: {name: tensor}.
    tolerance: the relative error that each class of tensors may have.
    """
    if set(measured) != set(wanted) or any(measured[k].shape != wanted[k].shape for k in wanted):
        return None
    square = sum(float((wanted[k].double() ** 2).sum()) for k in wanted)
    dot = sum(float((measured[k].double() * wanted[k].double()).sum()) for k in wanted)
    if square == 0.0 or not math.isfinite(dot) or dot == 0.0:
        return None
    factor = dot / square
    scaled = {name: x.double() * factor for name, x in wanted.items()}
    left = max(x.error for x in class_errors(measured, scaled, tolerance).values())
    return factor if left <= FACTOR_SLACK * tolerance and abs(factor - 1) > FACTOR_SLACK * tolerance else None


def explain_factor(factor: float, counts: Mapping[str, int]) -> str:
    """Return a sentence on the factor by which all gradients are wrong.

    counts: {name: number} of micro-batches, ranks and the like. The sentence names those that equal
        the factor or its inverse.

    Example: 0.25 and {"micro-batches": 4} → "every gradient is 1/4 of the reference: divided by the
    4 micro-batches".
    """
    small = abs(factor) < 1
    number = 1 / factor if small else factor
    whole = round(number)
    if abs(number - whole) > 0.01 * abs(number):
        return f"every gradient is {factor:.6g} times the reference: one common factor, and no count of this topology"
    size = f"1/{whole} of" if small else f"{whole} times"
    behind = [f"the {count} {name}" for name, count in counts.items() if count == whole]
    verb = "divided by" if small else "summed over"
    return f"every gradient is {size} the reference" + (f": {verb} {' or '.join(behind)}" if behind else "")


def first_gradient(errors: Mapping[str, ClassError]) -> tuple[str, float] | None:
    """Return (name, relative error) of the first tensor, in backward order, that differs; None if none does.

    A tensor differs if its error exceeds the tolerance and is not negligible within its class
    (``ClassError.judged``).
    """
    tensors = {name: x for kind in errors.values() for name, x in kind.tensors.items()}
    judged = {name: x for kind in errors.values() for name, x in kind.judged.items()}
    return next(((name, tensors[name]) for name in backward_order(tensors) if judged[name]), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationError:
    """Holds the relative error of the activations at one point of one replica.

    replica: the number of the data-parallel replica.
    error: the largest error of the copies that ranks hold.
    tokens: the indices of the tokens whose own relative error exceeds the tolerance.
    num_tokens: the number of tokens of the sample.
    """

    replica: int
    point: Point
    error: float
    tokens: tuple[int, ...]
    num_tokens: int


def activation_errors(
    traces: Sequence[Mapping[Point, Sequence[torch.Tensor]]],
    wanted: Mapping[Point, Sequence[torch.Tensor]],
    tolerance: float,
) -> list[ActivationError]:
    """Return the error at every point of every replica, in the order of the forward pass.

    traces: for each replica, {Point: copies of the activations, [tokens, columns]}.
    wanted: the reference's activations, one copy for each Point.
    tolerance: the largest relative error that passes.

    A point that a replica lacks has an infinite error.
    """
    rows = []
    for replica, trace in enumerate(traces):
        for point, (truth,) in wanted.items():
            copies = trace.get(point, ())
            errors = [relative_error(copy, truth) for copy in copies]
            worst = max(range(len(errors)), key=lambda i: errors[i]) if errors else None
            tokens: tuple[int, ...] = ()
            if worst is not None and copies[worst].shape == truth.shape:
                gap = (copies[worst].double() - truth.double()).norm(dim=-1)
                far = ~(gap <= tolerance * truth.double().norm(dim=-1))
                tokens = tuple(far.nonzero().flatten().tolist())
            error = errors[worst] if worst is not None else math.inf
            rows.append(
                ActivationError(replica=replica, point=point, error=error, tokens=tokens, num_tokens=len(truth))
            )
    return sorted(rows, key=lambda row: (row.point.order, row.replica))


def say_activation(row: ActivationError, replicas: int, holders: Sequence[int]) -> str:
    """Return a sentence on an activation error: the point, the replica, the tokens, and where to look for the cause.

    row: the error.
    replicas: the number of replicas.
    holders: [tokens], the context-parallel rank that held each token of the sample; [0, 0, …]
        without context parallelism.
    """
    where = f", replica {row.replica}" if replicas > 1 else ""
    tokens = ""
    if row.tokens:
        first = row.tokens[0]
        holder = f", held by context rank {holders[first]}" if len(set(holders)) > 1 else ""
        tokens = f"; {len(row.tokens)} of {row.num_tokens} tokens differ, the first is token {first}{holder}"
    return f"{row.point}{where}: relative error {row.error:.1e}{tokens}. Look at {LOOK_AT[row.point.name]}"


def logprob_errors(measured: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> dict[str, float]:
    return {name: relative_error(torch.from_numpy(measured[name]), torch.from_numpy(x)) for name, x in wanted.items()}
