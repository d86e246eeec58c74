"""The log-probs of on-policy distillation's teacher, from a second model on the policy's ranks or from servers."""

from __future__ import annotations

import numpy as np

from megatron_rl.backend import batch_exchange
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.backend.teacher_weights import TeacherWeights
from megatron_rl.config import TeacherConfig
from megatron_rl.distributed import collectives
from megatron_rl.rollout.vllm.teacher import TeacherServers


class Teacher:
    """Computes the teacher's log-probs of the policy's samples. Methods are collectives."""

    def __init__(self, settings: TeacherConfig, backend: MegatronBackend, deadline_s: float) -> None:
        """Load the weights of ``teacher.hf_path``, or keep the addresses of ``teacher.servers``.

        deadline_s: ``run.deadline_s``: the most seconds that other ranks wait while one rank asks a
            server.

        Raises ConfigError if the teacher's model cannot read the policy's samples, or for an
        invalid address.
        """
        self.backend, self.deadline_s = backend, deadline_s
        self.weights = TeacherWeights(backend) if settings.hf_path else None
        self.servers = TeacherServers(settings) if self.weights is None else None

    def logprobs(self, batch: Batch) -> np.ndarray:
        """Return log π_T of every sample, float32 [T] over the response tokens, sample after sample, on every rank.

        Raises EngineError on every rank if a server returns no log-probs.
        """
        if self.weights is not None:
            with self.weights.reading():
                return self.backend.logprobs(batch, np.ones(batch.facts.num_samples, dtype=bool)).flat
        error, logprobs = None, []
        try:
            logprobs = self.servers.logprobs(
                batch.local, self.deadline_s / 2
            )  # the other ranks wait in a collective meanwhile
        except Exception as caught:  # noqa: BLE001 (raised on every rank by the next line, this one's first)
            error = caught
        collectives.raise_on_all_ranks(error)
        by_id = {sample.sample_id: values for sample, values in zip(batch.local, logprobs, strict=True)}
        return batch_exchange.gather_flat(
            batch.facts, batch.local, self.backend.topology.rank, lambda sample: by_id[sample.sample_id]
        )
