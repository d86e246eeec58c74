"""The teacher of on-policy distillation: a second model on the policy's ranks, or servers; both give log-probs."""

from __future__ import annotations

import numpy as np

from megatron_rl.backend import batch_exchange
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.backend.teacher_weights import TeacherWeights
from megatron_rl.config import Config
from megatron_rl.distributed import collectives
from megatron_rl.rollout.vllm.teacher import TeacherServers


class Teacher:
    """Gives a teacher's log-probs of samples. Methods are collectives."""

    def __init__(self, config: Config, backend: MegatronBackend) -> None:
        """Load the weights of ``teacher.hf_path``, or take the addresses of ``teacher.servers``. Raises ConfigError."""
        self.backend, self.deadline_s = backend, config.run.deadline_s
        self.weights = TeacherWeights(backend) if config.teacher.hf_path else None
        self.servers = TeacherServers(config.teacher) if self.weights is None else None

    def logprobs(self, batch: Batch) -> np.ndarray:
        """Return log π_T of every sample, float32 [T] flat over the batch's response tokens, on every rank.

        Raises EngineError on every rank where servers do not give them.
        """
        if self.weights is not None:
            with self.weights.reading():
                return self.backend.logprobs(batch, np.ones(batch.facts.num_samples, dtype=bool)).flat
        error, found = None, []
        try:
            found = self.servers.logprobs(batch.local, self.deadline_s / 2)  # the others wait in a collective meanwhile
        except Exception as caught:  # noqa: BLE001 (raised on every rank by the next line, this one's first)
            error = caught
        collectives.raise_on_all_ranks(error)
        by_id = {sample.sample_id: values for sample, values in zip(batch.local, found, strict=True)}
        return batch_exchange.gather_flat(
            batch.facts, batch.local, self.backend.topology.rank, lambda sample: by_id[sample.sample_id]
        )


def build_teacher(config: Config, backend: MegatronBackend) -> Teacher | None:
    """Build the run's teacher; None for an estimator without one. A collective."""
    return Teacher(config, backend) if config.has_teacher else None
