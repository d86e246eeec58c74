"""The values that the server's modules pass to one another, and the errors that become answers to a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

TICK_S = 10.0  # seconds between two messages to the ranks while there is nothing to do


class Fault(Enum):
    """Names who is at fault for an operation's error, the client or the server, in the SDK's words."""

    USER = "user"
    SERVER = "server"


class RequestError(ValueError):
    """Raised for a request that cannot be served. The message names the field, its value and the fix.

    status: the HTTP status of the answer, if the request is refused before it becomes an operation.
    fault: who is at fault.
    """

    def __init__(self, message: str, *, status: int = 400, fault: Fault = Fault.USER) -> None:
        super().__init__(message)
        self.status, self.fault = status, fault


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """Holds one sequence to train on: N input tokens, and K targets after each of them.

    tokens: int64 [N].
    targets: int64 [N, K].
    inputs: name → float32 [N, K]. The names are ``weights``, or ``logprobs``, ``advantages`` and
        ``sequence_ratio_mask``.
    flat: whether the client gave targets of shape [N]. Its log-probs then have the same shape.

    Example: in the sequence 5, 7, 9 only 9 is trained. Then ``tokens=[5, 7]``, ``targets=[[7],
    [9]]`` and ``inputs={"weights": [[0], [1]]}``.
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]
    flat: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingCall:
    """Holds one request of ``forward_backward``.

    seq_id: the request's number among the requests to its model.
    loss: Tinker's name of the loss.
    settings: the request's ``loss_fn_config``.
    forward_only: whether only log-probs and the loss are wanted, and no gradient.
    """

    model_id: str
    seq_id: int
    loss: str
    settings: Mapping[str, float | str]
    forward_only: bool
    data: Sequence[Datum]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingAnswer:
    """Holds the answer to a TrainingCall.

    logprobs: for each datum, float32 [N] or [N, K], in the shape of its targets.
    metrics: name → value. The SDK may split one call into several requests; a name such as
        "loss:sum" ends with the reduction by which the SDK combines their values.
    """

    logprobs: Sequence[np.ndarray]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Holds which adapters a client requests for a model.

    rank: the rank of the LoRA matrices, at most ``lora.rank``.
    seed: the seed of the adapters' random initial values.
    attention, mlp: whether the attention layers and the MLP layers have adapters.
    """

    rank: int
    seed: int
    attention: bool = True
    mlp: bool = True

    @property
    def targets(self) -> tuple[str, ...]:
        """Return Megatron-Core's names of the layers that have adapters."""
        return ("linear_qkv", "linear_proj") * self.attention + ("linear_fc1", "linear_fc2") * self.mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailed:
    """Holds the reason why the engine could not answer a sampling request."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Message:
    """Holds a message from rank 0 with the work that every rank runs next.

    header: JSON-able values: the work's name under "do", and its arguments.
    body: the client's data.
    parsed: the values of ``body`` if this rank has them already; None if it must parse the body.
    """

    header: Mapping[str, object]
    body: bytes = b""
    parsed: object = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """Holds the outcome of a message: a value if it succeeded, or an error's text and who is at fault."""

    value: object = None
    error: str | None = None
    fault: Fault = Fault.USER
