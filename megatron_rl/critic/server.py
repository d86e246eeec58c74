"""The service of a separate critic: its ranks build the critic and answer critic/client.py's requests."""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch.distributed as dist

from megatron_rl.backend.batch import Batch
from megatron_rl.checkpoint.folder import DamagedCheckpoint, folder_of
from megatron_rl.checkpoint.manager import SIGNALS
from megatron_rl.checkpoint.writer import PendingSave
from megatron_rl.config import Config
from megatron_rl.critic.critic import Critic
from megatron_rl.critic.link import PolicyCriticLink, joined
from megatron_rl.distributed import collectives
from megatron_rl.errors import CheckpointError
from megatron_rl.types import Sample

log = logging.getLogger(__name__)
Answer = tuple[dict, dict[str, np.ndarray]]


def serve(config: Config) -> bool:
    """Serve the critic on each of its ranks until the run ends, in place of the training loop.

    Returns True if the run reached its end, and False if it was preempted.
    """
    with joined(config.separate_critic_ranks, config.run.deadline_s, of_critic=True) as link:
        if config.saves_checkpoints:
            for number in SIGNALS:
                signal.signal(number, lambda *_: vars(link).update(is_told_to_leave=True))
        service = Service(link, functools.partial(Critic, config, alone=True))
        while service.answer_next():
            pass
    return not service.preempted


class Service:
    """Answers the policy's requests on the critic's ranks. Methods are collectives over these ranks."""

    def __init__(self, link: PolicyCriticLink, build: Callable[..., Critic]) -> None:
        """Keep the link to the policy's ranks, and the function that makes the critic.

        build: makes the critic. Its keyword ``total_steps`` is the number of optimizer steps until the
            critic's learning rate stops decaying.
        """
        self.link, self.build = link, build
        self.number = 0
        self.preempted = False
        self.critic: Critic | None = None
        self.batch: Batch | None = None
        self.pending: PendingSave | None = None

    def answer_next(self) -> bool:
        """Wait for the policy's next request and answer it; return whether more requests will come.

        If one rank fails, the policy's ranks are told, and then every rank here raises the error.
        """
        self.number += 1
        request = self.link.hear(f"request/{self.number}")
        arrays = self.link.arrays(request)
        error, answer, results = None, {}, {}
        try:
            answer, results = self._answer(request, arrays)
        except Exception as raised:  # noqa: BLE001 (reported at once: peers may wait in a collective without end)
            error = raised
            log.error(
                "the critic's rank %d failed on %r: %s: %s",
                dist.get_rank(),
                request["request"],
                type(raised).__name__,
                raised,
            )
            self.link.say_failed(f"{request['request']!r} met {type(raised).__name__}: {raised}")
        collectives.raise_on_all_ranks(error)
        is_told_to_leave = any(collectives.gather_json(self.link.is_told_to_leave))
        if self.link.is_first:
            self.link.tell(f"answer/{self.number}", {**answer, "is_told_to_leave": is_told_to_leave}, results)
        return request["request"] != "close"

    def _answer(self, message: Mapping, arrays: Mapping[str, np.ndarray]) -> Answer:
        match message["request"]:
            case "build":
                self.critic = self.build(total_steps=message["total_steps"])
                log.info("critic: %d ranks, %s", self.critic.topology.world_size, self.critic.topology.degrees)
            case "values":
                self.batch = self._batch(message["sample_ids"], arrays)
                return {}, {"values": self.critic.values(self.batch)}
            case "train":
                return {"metrics": self.critic.train(self.batch, arrays["returns"], arrays["old_values"])}, {}
            case "save" | "finish" | "check" | "load" as request:
                return self._checkpoint(request, message), {}
            case "abandon":
                self.pending.abandon()
            case "close":
                self.preempted = message["preempted"]
                self.critic.close()
            case other:
                raise ValueError(
                    f"unknown request {other!r}: the policy's ranks run another release; start all ranks from one "
                    "release"
                )
        return {}, {}

    def _checkpoint(self, request: str, message: Mapping) -> dict:
        """Carry out a request about a checkpoint, and return the answer.

        request: ``save``, ``finish``, ``check`` or ``load``.

        A CheckpointError is not raised but becomes part of the answer, for the policy's ranks.
        """
        try:
            match request:
                case "save":
                    self.pending = self.critic.save(folder_of(message["root"]), message["iteration"])
                case "finish":
                    folder = self.pending.finish()
                    return {"refused": "", "folder": str(folder), "written_s": self.pending.written_s}
                case "check":
                    self.critic.check(folder_of(message["folder"]))
                case "load":
                    self.critic.load(folder_of(message["folder"]))
        except CheckpointError as error:  # raised on every rank
            return {"refused": str(error), "damaged": isinstance(error, DamagedCheckpoint)}
        return {"refused": ""}

    def _batch(self, sample_ids: Sequence[str], arrays: Mapping[str, np.ndarray]) -> Batch:
        """Return the policy's batch, with its samples spread over the critic's ranks.

        sample_ids: the ids of the batch's samples, in its order.
        arrays: the request's arrays, as ``batch_arrays`` of critic/client.py made them.
        """
        totals = arrays["prompt_tokens"] + arrays["response_tokens"]
        tokens = np.split(arrays["token_ids"].astype(np.int64), np.cumsum(totals)[:-1])
        masks = np.split(arrays["loss_mask"], np.cumsum(arrays["response_tokens"])[:-1])
        topology = self.critic.topology
        own_indices = range(topology.rank, len(sample_ids), topology.world_size)
        samples = [
            Sample(
                sample_id=sample_ids[i],
                prompt_tokens=int(arrays["prompt_tokens"][i]),
                token_ids=tokens[i],
                loss_mask=masks[i],
                logprobs=np.zeros(len(masks[i]), dtype=np.float32),
            )
            for i in own_indices
        ]
        return self.critic.gather(samples, [int(arrays["groups"][i]) for i in own_indices], list(own_indices))
