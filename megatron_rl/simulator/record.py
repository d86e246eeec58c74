"""Writes a run's files for a simulation: trace.jsonl, a line per rollout, and coefficients.json, the latest fit.

Both lie in the run's folder and are written by the main rank alone; the fit is that after the last optimizer step.
``megatron-rl simulate --from-run FOLDER`` reads them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics

import numpy as np
import torch

from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.config import Config
from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.distributed.platform import HOST
from megatron_rl.observability.metrics import set_aside
from megatron_rl.planning.tokens import read_tokens
from megatron_rl.simulator.machine import fitted_with
from megatron_rl.simulator.workload import Workload, append_trace
from megatron_rl.types import BatchFacts


class Recorder:
    """Writes both files on the main rank, and nothing on the others.

    An earlier run's files in the folder are renamed, unless this run resumes from a checkpoint (``resumed``).
    """

    def __init__(self, config: Config, backend: MegatronBackend, *, resumed: bool = False) -> None:
        self.config = config
        self.backend = backend
        self.is_main = backend.topology.is_main
        self.num_rollouts = 0
        folder = config.run.path
        self.trace, self.coefficients = folder / "trace.jsonl", folder / "coefficients.json"
        if self.is_main and not resumed:
            for path in (self.trace, self.coefficients):
                if path.exists():
                    set_aside(path)

    def rollout(self, facts: BatchFacts, rewards: np.ndarray, by_function: np.ndarray) -> None:
        """Write one line of the trace, numbered as ``rollout`` in the metrics.

        rewards: [S], by_function: [S, F], NaN for a sample without a reward.
        """
        self.num_rollouts += 1
        if not self.is_main:
            return
        names = self.config.reward.functions
        workload = Workload(
            prompt_tokens=facts.prompt_tokens,
            response_tokens=facts.response_tokens,
            loss_tokens=facts.loss_tokens,
            response_inputs=read_tokens(facts),
            rewards=rewards,
            groups=facts.groups,
            by_function=dict(zip(names, by_function.T, strict=True)) if len(names) > 1 else {},
        )
        prompts = dict.fromkeys(sample_id.rpartition("#")[0] for sample_id in facts.sample_ids)
        append_trace(self.trace, self.num_rollouts, workload, list(prompts))

    def fit(self) -> None:
        """Replace coefficients.json by the current measurement, at once: a reader never sees half of it."""
        backend = self.backend
        if not self.is_main or not backend.fit.is_fitted or not backend.optimizer_s:
            return
        model = backend.fit.model()
        forward_s, backward_s = backend.fit.sums[:, -2:].sum(0)
        content = {
            "stages": [dataclasses.asdict(stage) for stage in model.stages],
            "virtual": model.virtual,
            "optimizer_s": statistics.median(backend.optimizer_s),
            "forward_share": float(forward_s / (forward_s + backward_s)),
            "fitted_with": fitted_with(backend.shape, self.config, backend.topology),
            "measured_on": self._where(),
        }
        replace_text(self.coefficients, json.dumps(content, indent=1, allow_nan=False) + "\n")

    def _where(self) -> str:
        topology = self.backend.topology
        device = torch.cuda.get_device_name() if HOST.is_cuda else f"{platform.machine()} CPU of {os.cpu_count()} cores"
        return (
            f"{device}, {topology.world_size} process(es), {topology.degrees}, torch {torch.__version__}, "
            f"{self.backend.step_index} step(s)"
        )
