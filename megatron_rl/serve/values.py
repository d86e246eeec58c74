"""The values that travel between the stages of the server, and the errors that are answers to a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

TICK_S = 10.0  # between two messages to the ranks, while nothing is to be done


class Fault(Enum):
    """Says whose fault an operation's error is, in the SDK's words."""

    USER = "user"
    SERVER = "server"


class RequestError(ValueError):
    """Reports a request that cannot be served: the message names the field, the value and the way out.

    status: HTTP's code where the request is refused at once.
    """

    def __init__(self, message: str, *, status: int = 400, fault: Fault = Fault.USER) -> None:
        super().__init__(message)
        self.status, self.fault = status, fault


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """Holds one sequence to train on: N input tokens, and K targets after each of them.

    tokens: int64 [N].
    targets: int64 [N, K].
    inputs: float32 [N, K] by name: ``weights``, or ``logprobs`` and ``advantages``,
        ``sequence_ratio_mask``.
    flat: whether the client gave targets [N], and gets log-probs of that shape back.

    Example: the sequence 5, 7, 9, of which 9 is trained: ``tokens=[5, 7], targets=[[7], [9]],
    inputs={"weights": [[0], [1]]}``.
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]
    flat: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingCall:
    """Holds one request of ``forward_backward``.

    loss: the loss's name as Tinker has it. settings: its ``loss_fn_config``.
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

    logprobs: of each datum, float32 [N] or [N, K], in the shape of its targets.
    metrics: by names that end with the reduction by which the SDK combines several requests of one
        call.
    """

    logprobs: Sequence[np.ndarray]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Describes the adapters that a client asks for.

    rank: of A and B; at most ``lora.rank``. seed: of A's start. attention, mlp: whether those
        layers have adapters.
    """

    rank: int
    seed: int
    attention: bool = True
    mlp: bool = True

    @property
    def targets(self) -> tuple[str, ...]:
        """Return Megatron-Core's names of the layers that train."""
        return ("linear_qkv", "linear_proj") * self.attention + ("linear_fc1", "linear_fc2") * self.mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailed:
    """Says why the engine could not answer a sampling request."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Message:
    """Holds what every rank runs next. parsed: the body's values where this rank has them already."""

    header: Mapping[str, object]
    body: bytes = b""
    parsed: object = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """Holds how a message ended: a value, or an error's text and whose fault it is."""

    value: object = None
    error: str | None = None
    fault: Fault = Fault.USER
