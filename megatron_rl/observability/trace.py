"""The files that a run records for a simulation: trace.jsonl with its samples, and coefficients.json with fitted costs.

trace.jsonl gets one line per rollout, and coefficients.json is replaced after every optimizer step.
Both lie in the run's folder, and only the main rank writes them. ``megatron-rl simulate --from-run
FOLDER`` reads them by simulator/workload.py and simulator/machine.py, which a run does not import.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.distributed.atomic_file import replace_text, set_aside
from megatron_rl.distributed.platform import HOST
from megatron_rl.planning.tokens import read_tokens
from megatron_rl.types import BatchFacts
from megatron_rl.weights.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedRollout:
    """Holds one rollout's samples as arrays [S], under the names of ``Workload`` (simulator/workload.py).

    prompt_tokens, response_tokens, loss_tokens: as in BatchFacts.
    read_response_tokens: how many response tokens the model gets as input: those before the last loss
        token.
    rewards: NaN for a sample without a reward.
    groups: the index of each sample's prompt.
    by_function: {reward function's name: its rewards}; {} with only one function.
    """

    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    read_response_tokens: np.ndarray
    loss_tokens: np.ndarray
    rewards: np.ndarray
    groups: np.ndarray
    by_function: Mapping[str, np.ndarray]


class Recorder:
    """Writes trace.jsonl and coefficients.json on the main rank, and nothing on other ranks.

    reward_functions: the names of the reward functions.
    resumed: whether the run resumes from a checkpoint; otherwise existing files in the folder are
        renamed.
    """

    def __init__(
        self, backend: MegatronBackend, folder: pathlib.Path, reward_functions: Sequence[str], *, resumed: bool = False
    ) -> None:
        self.backend = backend
        self.reward_functions = reward_functions
        self.is_main = backend.topology.is_main
        self.num_rollouts = 0
        self.trace, self.coefficients = folder / "trace.jsonl", folder / "coefficients.json"
        if self.is_main and not resumed:
            for path in (self.trace, self.coefficients):
                if path.exists():
                    set_aside(path)

    def rollout(self, facts: BatchFacts, rewards: np.ndarray, by_function: np.ndarray) -> None:
        """Write the samples of one rollout as a line of trace.jsonl, numbered as ``rollout`` in the metrics.

        rewards: [S], NaN for a sample without a reward.
        by_function: [S, F], the rewards of each function, NaN where it gave none.
        """
        self.num_rollouts += 1
        if not self.is_main:
            return
        names = self.reward_functions
        traced = TracedRollout(
            prompt_tokens=facts.prompt_tokens,
            response_tokens=facts.response_tokens,
            loss_tokens=facts.loss_tokens,
            read_response_tokens=read_tokens(facts),
            rewards=rewards,
            groups=facts.groups,
            by_function=dict(zip(names, by_function.T, strict=True)) if len(names) > 1 else {},
        )
        prompts = dict.fromkeys(sample_id.rpartition("#")[0] for sample_id in facts.sample_ids)
        append_trace(self.trace, self.num_rollouts, traced, list(prompts))

    def fit(self) -> None:
        """Replace coefficients.json by the costs that the backend has fitted so far; do nothing before the first fit.

        The file is replaced at once, so that no reader sees half of it.
        """
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
            "fitted_with": fitted_with(backend.shape, backend.config.model.dtype, backend.topology),
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


def append_trace(path: str | pathlib.Path, rollout: int, samples: TracedRollout, prompts: Sequence[str] = ()) -> None:
    """Append one rollout to a trace file, in one write; ``read_trace`` (simulator/workload.py) reads it.

    rollout: the number of the rollout.
    samples: its samples; with several reward functions, a sample's reward is their weighted sum.
    prompts: the name of each group's prompt, in the order of the groups, for people who read the
        file.
    """

    def plain(values: np.ndarray) -> list[float | None]:
        return [None if np.isnan(x) else x for x in values.tolist()]

    row = {
        "rollout": rollout,
        "group": samples.groups.tolist(),
        "prompt_tokens": samples.prompt_tokens.tolist(),
        "response_tokens": samples.response_tokens.tolist(),
        "loss_tokens": samples.loss_tokens.tolist(),
        "response_inputs": samples.read_response_tokens.tolist(),
        "reward": plain(samples.rewards),
    }
    if samples.by_function:
        row["reward_functions"] = {name: plain(x) for name, x in samples.by_function.items()}
    if prompts:
        row["prompts"] = list(prompts)
    with pathlib.Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n")


class Grid(Protocol):
    """Holds the degrees of parallelism on which a pipeline stage's fitted costs depend; a Topology has these fields."""

    tensor_size: int
    context_size: int
    expert_size: int
    expert_tensor_size: int


def fitted_with(shape: ModelShape, dtype: str, degrees: Grid) -> dict[str, object]:
    """Return {name: value} of the settings that the fitted costs of a pipeline stage depend on.

    The machine and the number of replicas are not among them.
    """
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "dtype": dtype,
        "tensor": degrees.tensor_size,
        "context": degrees.context_size,
        "expert": degrees.expert_size,
        "expert_tensor": degrees.expert_tensor_size,
        "stage_layers": list(shape.stage_layers),
    }
