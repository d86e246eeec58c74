"""The collective loop of all ranks: rank 0 sends a message, every rank runs it, and all agree on its outcome.

A message is a header in JSON and a body of bytes. Rank 0 broadcasts it in host memory. While no
message waits, rank 0 sends a tick, a message that does nothing, every TICK_S seconds. So no
collective waits longer than ``run.deadline_s``.

An operation may fail on every rank alike, because of a request that cannot be served, a file, or a
gradient that is not finite. Then the error is the answer to its client, and the server goes on. The
model is as before, without the gradient accumulated since its last step.

After an error within a collective, the ranks may have stopped at different points of the work. So
the server ends, and the watchdog names the failed rank. A restart goes on from the saved state.
"""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Callable, Mapping

import numpy as np
import torch

from megatron_rl.backend.optimizer import AdamStep
from megatron_rl.config.serve import ServeConfig
from megatron_rl.distributed.collectives import broadcast_on_host, gather_json
from megatron_rl.distributed.lost_rank import is_peer_failure
from megatron_rl.distributed.watchdog import Watchdog
from megatron_rl.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    LockstepError,
    NonFiniteAdvantage,
    NonFiniteGradient,
)
from megatron_rl.rollout.engines.sampling import SampleRequest
from megatron_rl.serve.codec import parse_training
from megatron_rl.serve.models import Models
from megatron_rl.serve.samplers import Samplers
from megatron_rl.serve.updates import prepare, run
from megatron_rl.serve.values import AdapterSpec, Fault, Message, Outcome, RequestError
from megatron_rl.types import StepKind

log = logging.getLogger(__name__)
# Errors that are raised on every rank alike.
ANSWERS = (RequestError, ConfigError, CheckpointError, EngineError, NonFiniteAdvantage, NonFiniteGradient)


def share_message(message: Message | None) -> Message:
    """Return rank 0's message on every rank. A collective.

    message: the message on rank 0; None on the other ranks.
    """
    header = b"" if message is None else json.dumps(message.header).encode()
    body = b"" if message is None else message.body
    sizes = broadcast_on_host(torch.tensor([len(header), len(body)], dtype=torch.int64)).tolist()
    content = torch.frombuffer(bytearray(header + body or b"\0"), dtype=torch.uint8) if message is not None else None
    if content is None:
        content = torch.empty(max(1, sum(sizes)), dtype=torch.uint8)
    content = broadcast_on_host(content)
    if message is not None:
        return message
    received = content.numpy().tobytes()
    return Message(header=json.loads(received[: sizes[0]]), body=received[sizes[0] : sum(sizes)])


class Worker:
    """Runs messages on this rank. Methods are collectives unless they say otherwise."""

    def __init__(self, settings: ServeConfig, models: Models, samplers: Samplers, watchdog: Watchdog) -> None:
        self.settings, self.models, self.samplers, self.watchdog = settings, models, samplers, watchdog

    def run(self, message: Message) -> Outcome:
        """Run a message that every rank has received; return the outcome on which all ranks have agreed."""
        header = message.header
        kind = str(header["do"])
        with self.watchdog.stage(kind):
            prepared, error = self._prepare(message)
            if failed := self._agreed(error):
                return self._ended(header, failed)
            outcome = Outcome()
            try:
                outcome = Outcome(value=_RUN[kind](self, header, prepared))
                error = None
            except ANSWERS as raised:
                if isinstance(raised, LockstepError) or is_peer_failure(raised):
                    raise
                error = raised
            if failed := self._agreed(error):
                return self._ended(header, failed)
            return outcome

    def _prepare(self, message: Message) -> tuple[object, Exception | None]:
        """Return (prepared work, error) of a message, before any rank enters a collective. Not a collective.

        The work is a training request's Prepared, and None for any other message. The error is None
        if there is none.
        """
        if message.header["do"] != "forward_backward":
            return None, None
        try:
            call = message.parsed or parse_training(message.body)
            settings = self.settings
            prepared = prepare(
                self.models.backend, call, logprobs=settings.logprobs, least_advantage=settings.least_advantage
            )
            return prepared, None
        except Exception as error:  # noqa: BLE001 (agreed on, and an answer to the client)
            return None, error

    def _agreed(self, error: Exception | None) -> Outcome | None:
        """Return the outcome with the error of the lowest rank that has one; None if no rank has an error.

        error: this rank's error; None if it has none.
        """
        fault = error.fault if isinstance(error, RequestError) else Fault.SERVER
        own = None if error is None else [f"{error}" if isinstance(error, ANSWERS) else repr(error), fault.value]
        errors = [x for x in gather_json(own) if x is not None]
        return Outcome(error=errors[0][0], fault=Fault(errors[0][1])) if errors else None

    def _ended(self, header: Mapping[str, object], failed: Outcome) -> Outcome:
        """Discard the model's gradient after a failed operation, so that no half of a step is left.

        failed: the operation's outcome, which is returned.
        """
        if header["do"] in ("forward_backward", "optim_step", "load"):
            self.models.discard_gradient(str(header["model"]))
        return failed

    # ---- the operations ---------------------------------------------------------------------------------------------

    def _create(self, header: Mapping, _: object) -> None:
        self.models.create(header["model"], _spec(header["spec"]))

    def _load(self, header: Mapping, _: object) -> dict:
        spec = self.models.load(header["model"], pathlib.Path(header["folder"]), with_adam=header["with_adam"])
        return {"spec": None if spec is None else _spec_to_json(spec)}

    def _forward_backward(self, header: Mapping, prepared: object):
        return run(self.models.activate(header["model"]), prepared)

    def _optim_step(self, header: Mapping, _: object) -> dict[str, float]:
        backend = self.models.activate(header["model"])
        adam = header["adam"]
        kind = StepKind.REAL if backend.has_gradient else StepKind.GHOST
        result = backend.optim_step(
            kind,
            AdamStep(
                learning_rate=adam["learning_rate"],
                betas=(adam["beta1"], adam["beta2"]),
                epsilon=adam["eps"],
                weight_decay=adam["weight_decay"],
                clip_grad=adam["grad_clip_norm"],
            ),
        )
        if not np.isfinite(result.grad_norm):
            raise RequestError(
                f"the gradient's norm is {result.grad_norm}, so that nothing was moved; look for infinite advantages, "
                "weights or log-probs in the data since the last optim_step"
            )
        return {
            "grad_norm:mean": result.grad_norm,
            "learning_rate:mean": result.learning_rate,
            "ghost_steps:sum": float(kind is StepKind.GHOST),
        }

    def _save(self, header: Mapping, _: object) -> None:
        folder, spec = pathlib.Path(header["folder"]), _spec(header["spec"])
        self.models.save(header["model"], folder, spec, with_adam=header["with_adam"])

    def _snapshot(self, header: Mapping, _: object) -> None:
        self.samplers.snapshot(header["weights"], header["model"])

    def _sample(self, header: Mapping, _: object) -> list:
        if header["folder"] is not None and not self.samplers.has(header["weights"]):
            self.samplers.read(header["weights"], pathlib.Path(header["folder"]))
        requests = [SampleRequest(**_tuples(fields)) for fields in header["requests"]]
        return self.samplers.sample(header["weights"], requests)

    def _drop(self, header: Mapping, _: object) -> None:
        for name in header["models"]:
            self.models.drop(name)
        for name in header["weights"]:
            self.samplers.drop(name)

    def _discard(self, header: Mapping, _: object) -> None:
        self.models.discard_gradient(header["model"])

    def _tick(self, header: Mapping, _: object) -> None:
        """Do nothing: the message itself shows that rank 0 lives."""


_RUN: dict[str, Callable[[Worker, Mapping, object], object]] = {
    "create": Worker._create,
    "load": Worker._load,
    "forward_backward": Worker._forward_backward,
    "optim_step": Worker._optim_step,
    "save": Worker._save,
    "snapshot": Worker._snapshot,
    "sample": Worker._sample,
    "drop": Worker._drop,
    "discard": Worker._discard,
    "tick": Worker._tick,
}


def _spec(value: Mapping | None) -> AdapterSpec | None:
    return None if value is None else AdapterSpec(**value)


def _spec_to_json(spec: AdapterSpec) -> dict[str, object]:
    return {"rank": spec.rank, "seed": spec.seed, "attention": spec.attention, "mlp": spec.mlp}


def _tuples(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
