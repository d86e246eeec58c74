"""What the ranks of a separate critic do: build it, and answer critic/client.py's requests, one after the other, until
the run is at its end."""

from __future__ import annotations

import logging
import pathlib
import signal
from collections.abc import Mapping, Sequence

import numpy as np
import torch.distributed as dist

from megatron_rl.backend.batch import Batch
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
    """Runs on every rank of the critic, in place of the loop. Whether the run came to its end, as train.py's
    ``train``."""
    with joined(config, of_critic=True) as bridge:
        if config.checkpoint.save_every_rollouts:
            for number in SIGNALS:
                signal.signal(number, lambda *_: vars(bridge).update(is_told_to_leave=True))
        service = Service(config, bridge)
        while service.answer_next():
            pass
    return not service.preempted


class Service:
    """Methods are collectives over the critic's ranks."""

    def __init__(self, config: Config, bridge: PolicyCriticLink) -> None:
        self.config, self.bridge = config, bridge
        self.number = 0
        self.preempted = False
        self.critic: Critic | None = None
        self.batch: Batch | None = None
        self.pending: PendingSave | None = None

    def answer_next(self) -> bool:
        """Whether there is more to come. Raises on every rank what one of them met, after the policy's ranks were
        told."""
        self.number += 1
        asked = self.bridge.hear(f"request/{self.number}")
        arrays = self.bridge.arrays(asked)
        error, answer, found = None, {}, {}
        try:
            answer, found = self._answer(asked, arrays)
        except Exception as met:  # noqa: BLE001 (told at once, since peers may be in a collective that nothing ends; raised below)
            error = met
            log.error(
                "the critic's rank %d failed on %r: %s: %s", dist.get_rank(), asked["request"], type(met).__name__, met
            )
            self.bridge.say_failed(f"{asked['request']!r} met {type(met).__name__}: {met}")
        collectives.raise_on_all_ranks(error)
        told = any(collectives.gather_json(self.bridge.is_told_to_leave))
        if self.bridge.is_first:
            self.bridge.tell(f"answer/{self.number}", {**answer, "is_told_to_leave": told}, found)
        return asked["request"] != "close"

    def _answer(self, asked: Mapping, arrays: Mapping[str, np.ndarray]) -> Answer:
        match asked["request"]:
            case "build":
                self.critic = Critic(self.config, total_steps=asked["total_steps"], alone=True)
                log.info("critic: %d ranks, %s", self.critic.topology.world_size, self.critic.topology.degrees)
            case "values":
                self.batch = self._batch(asked["sample_ids"], arrays)
                return {}, {"values": self.critic.values(self.batch)}
            case "train":
                return {"metrics": self.critic.train(self.batch, arrays["returns"], arrays["old_values"])}, {}
            case "save" | "finish" | "check" | "load" as request:
                return self._checkpoint(request, asked), {}
            case "abandon":
                self.pending.abandon()
            case "close":
                self.preempted = asked["preempted"]
                self.critic.close()
            case other:
                raise ValueError(
                    f"{other!r} is asked for, and this release does not know it; start all ranks from one release"
                )
        return {}, {}

    def _checkpoint(self, request: str, asked: Mapping) -> dict:
        """What becomes of a checkpoint that cannot be written or read is the policy's to decide
        (``checkpoint.on_error``)."""
        try:
            match request:
                case "save":
                    self.pending = self.critic.save(pathlib.Path(asked["root"]), asked["iteration"])
                case "finish":
                    folder = self.pending.finish()
                    return {"refused": "", "folder": str(folder), "written_s": self.pending.written_s}
                case "check":
                    self.critic.check(pathlib.Path(asked["folder"]))
                case "load":
                    self.critic.load(pathlib.Path(asked["folder"]))
        except CheckpointError as error:  # raised on every rank
            return {"refused": str(error)}
        return {"refused": ""}

    def _batch(self, sample_ids: Sequence[str], arrays: Mapping[str, np.ndarray]) -> Batch:
        """The policy's batch, its rows spread over the critic's ranks."""
        totals = arrays["prompt_tokens"] + arrays["response_tokens"]
        tokens = np.split(arrays["token_ids"].astype(np.int64), np.cumsum(totals)[:-1])
        masks = np.split(arrays["loss_mask"], np.cumsum(arrays["response_tokens"])[:-1])
        place = self.critic.topology
        mine = range(place.rank, len(sample_ids), place.world_size)
        samples = [
            Sample(
                sample_id=sample_ids[i],
                prompt_tokens=int(arrays["prompt_tokens"][i]),
                token_ids=tokens[i],
                loss_mask=masks[i],
                logprobs=np.zeros(len(masks[i]), dtype=np.float32),
            )
            for i in mine
        ]
        return self.critic.gather(samples, [int(arrays["groups"][i]) for i in mine], list(mine))
