"""The comparison of two sets of measurements for megatron-rl verify; pure: tensors in, errors and sentences out.

An error is ‖measured − wanted‖ / ‖wanted‖. A check is judged per class of tensors. So a single
tensor whose gradient is only cancelled rounding (a key's bias, often) cannot fail it. The errors of
single tensors name the culprit.
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
    """Names a point in the forward pass.

    layer: counted from 0 over the whole model, as in ``model.layers.0``; −1 outside the layers.
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
    """Holds one line of the table.

    error: None if the check was not compared; ``note`` then gives the reason.
    """

    check: str
    error: float | None
    where: str = ""
    note: str = ""

    def passes(self, tolerance: float) -> bool:
        return self.error is None or self.error <= tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Holds one topology's measurements, whole, under Hugging Face names, with tensors on the host.

    logprobs: per sample id, [response] float32.
    gradient: the dense step's gradient.
    grad_norm: the first step's norm, as ``optim_step`` reports it.
    weights: the weights after the last step.
    traces: per replica, the activations of one sample, [tokens, columns] each; several if ranks
        hold copies.
    skip_gradient: the skip step's gradient; None if skip is not compared.
    """

    logprobs: Mapping[str, np.ndarray]
    gradient: Mapping[str, torch.Tensor]
    grad_norm: float
    weights: Mapping[str, torch.Tensor]
    traces: Sequence[Mapping[Point, Sequence[torch.Tensor]]]
    skip_gradient: Mapping[str, torch.Tensor] | None = None
    facts: Mapping[str, object] = field(default_factory=dict)


def relative_error(measured: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return ‖measured − wanted‖ / ‖wanted‖; inf if it is no number or the shapes differ, 0 if both are zero."""
    if measured.shape != wanted.shape:
        return math.inf
    return _ratio(float((measured.double() - wanted.double()).norm()), float(wanted.double().norm()))


def _ratio(difference: float, norm: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / norm if math.isfinite(difference) and norm > 0 else math.inf


def tensor_class(name: str) -> str:
    """Return the class (of CLASSES) of a Hugging Face name; biases belong to their weights' classes.

    Example: ``model.layers.0.self_attn.k_proj.bias`` → "attention qkv".
    """
    for kind, pattern in (
        ("embedding", r"embed_tokens"),
        ("lm head", r"lm_head"),
        ("experts", r"\.experts?\."),
        ("attention qkv", r"\.[qkv]_proj\.|\.sinks|\.(q_a|q_b|kv_b)_proj\.|\.kv_a_proj_with_mqa\."),
        ("attention output", r"\.o_proj\."),
        ("norms", r"norm"),
        ("router", r"\.(gate|router)\."),
        ("mlp gate/up", r"\.(gate|up|gate_up)_proj"),
        ("mlp down", r"\.down_proj"),
    ):
        if re.search(pattern, name):
            return kind
    raise ValueError(f"{name} belongs to no class of tensors that megatron-rl verify knows; add it to tensor_class")


_BACKWARD = (
    r"experts|(mlp|feed_forward)\.down_proj",
    r"(mlp|feed_forward)\.(gate|up)_proj",
    r"\.(gate|router)\.",
    r"post_attention_layernorm",
    r"\.o_proj\.",
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
    """Return names sorted from the head to the embedding, in the backward pass's order.

    A tied embedding comes last, though it is also the head.
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
    """Holds the error of all tensors of one class together.

    worst: the tensor with the largest error of its own.
    tensors: each tensor's own error.
    judged: True for a tensor that differs enough to be named.
    """

    error: float
    worst: str
    tensors: Mapping[str, float]
    judged: Mapping[str, bool]


def class_errors(
    measured: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float
) -> dict[str, ClassError]:
    """Return the errors by class, in the order of CLASSES; a tensor that one side lacks has an infinite error."""
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
    """Return the relative error of all tensors together."""
    if {k: x.shape for k, x in measured.items()} != {k: x.shape for k, x in wanted.items()}:
        return math.inf
    difference = math.sqrt(sum(float((measured[k].double() - wanted[k].double()).norm()) ** 2 for k in wanted))
    return _ratio(difference, math.sqrt(sum(float(x.double().norm()) ** 2 for x in wanted.values())))


def common_factor(
    measured: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float
) -> float | None:
    """Return f if every class of ``measured`` is f · ``wanted`` and f is not 1.

    Returns None if no single factor explains the difference.
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
    """Describe a factor in words, by the counts that could explain it.

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
    """Return the first tensor of the backward pass that is beyond tolerance, with its error."""
    tensors = {name: x for kind in errors.values() for name, x in kind.tensors.items()}
    judged = {name: x for kind in errors.values() for name, x in kind.judged.items()}
    return next(((name, tensors[name]) for name in backward_order(tensors) if judged[name]), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationError:
    """Holds the worst copy's error at one point of one replica.

    tokens: indices of the tokens that differ at the point, of the sample's ``num_tokens``.
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
    """Describe one activation error in words.

    holders: per token of the sample, the context rank that held it ([0, 0, …] without context
        parallelism).
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
