"""Runs rollouts' updates under a plan, and measures their cost and the final weights.

Every policy trains the same samples with the same advantages from the same initial weights under a fresh AdamW, so that
policies differ at the end only by the optimizer step in which a sample was trained. Old log-probs are the trainer's
own, taken at each rollout's start over all of its samples under one plan for every policy.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import skip as benchmark_skip
import torch
from policies_plans import POLICIES

from megatron_rl.algorithm.advantage import reduction_weights
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.distributed.collectives import gather_json
from megatron_rl.planning.cost import plan_seconds
from megatron_rl.planning.plan import PlanRules
from megatron_rl.planning.tokens import tokens_of
from megatron_rl.types import BatchPlan, LossInputs, StepKind

REDUCTION = "token_mean"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """Holds one batch and its training data.

    values: float64 [S], advantages.
    mini_batches: members of each of the dense run's steps.
    """

    batch: Batch
    values: np.ndarray
    mini_batches: list[np.ndarray]

    @property
    def signal(self) -> np.ndarray:
        return has_signal(self.values, self.batch.facts.loss_tokens)

    @property
    def weights(self) -> np.ndarray:
        """Return float64 [S], each sample's weight in the dense run, whose denominator counts its own mini-batch."""
        return sum(self._weights(members) for members in self.mini_batches)

    def _weights(self, counted: np.ndarray) -> np.ndarray:
        return reduction_weights(REDUCTION, self.batch.facts, counted, max_response_tokens=1)

    @property
    def lengths(self) -> np.ndarray:
        """Return int64 [S], the tokens that each sample runs."""
        return tokens_of(self.batch.facts, share_prompts=False).whole

    def plan(self, policy: str, rules: PlanRules) -> BatchPlan:
        return POLICIES[policy](self.mini_batches, self.lengths, self.signal, rules)

    def inputs(
        self, plan: BatchPlan, old_logprobs: np.ndarray | None, *, renormalised: bool = False
    ) -> list[LossInputs]:
        """Return the inputs of each step.

        renormalised: count the denominator over the samples that the step runs; otherwise use the dense run's weights.
        """
        original = self.weights
        weights_by_step = [self._weights(np.unique(x.order)) if renormalised else original for x in plan.mini_batches]
        return [LossInputs(advantages=self.values * w, weights=w, old_logprobs=old_logprobs) for w in weights_by_step]


def with_cap(rules: PlanRules, max_tokens: int) -> PlanRules:
    return dataclasses.replace(rules, max_tokens=max_tokens)


def update(
    backend: MegatronBackend, batch: Batch, plan: BatchPlan, inputs: Sequence[LossInputs]
) -> tuple[float, float]:
    """Return the seconds of all the plan's updates, and of their optimizer steps; rows must have been loaded."""
    timed = [
        benchmark_skip.update(backend, batch, mini_batch, fingerprint, step_inputs)
        for mini_batch, fingerprint, step_inputs in zip(plan.mini_batches, plan.fingerprints(), inputs, strict=True)
    ]
    return sum(whole for whole, _ in timed), sum(step for _, step in timed)


def costs(
    backend: MegatronBackend, rollout: Rollout, rules: PlanRules, caps: Sequence[int], repeats: int
) -> dict[str, list[dict]]:
    """Return per policy a row per cap: medians over updates that alternate between all of them, after one to warm up.

    A time is the slowest rank's, so that every rank picks the same best setting.
    """
    plans = {(name, cap): rollout.plan(name, with_cap(rules, cap)) for name in POLICIES for cap in caps}
    batches = {key: backend.fetch_rows(rollout.batch, plan) for key, plan in plans.items()}
    inputs = {key: rollout.inputs(plan, None) for key, plan in plans.items()}
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in plans}
    for repeat in range(repeats + 1):
        for key, plan in plans.items():
            timed = update(backend, batches[key], plan, inputs[key])
            if repeat:
                seconds[key].append(timed)
    slowest = np.array(gather_json([[list(x) for x in timed] for timed in seconds.values()])).max(0)
    medians = dict(zip(plans, np.median(slowest, axis=1).tolist(), strict=True))
    step_s = statistics.median(medians["dense", cap][1] for cap in caps) / len(rollout.mini_batches)
    padded = tokens_of(rollout.batch.facts, share_prompts=False).padded(rules.pad_multiple)
    model = backend.fit.model()
    rows: dict[str, list[dict]] = {name: [] for name in POLICIES}
    for (name, cap), plan in plans.items():
        whole, step = medians[name, cap]
        sizes = describe(plan, rollout.lengths)
        predicted = sum(plan_seconds(model, x, padded) for x in plan.mini_batches) + step_s * len(plan.mini_batches)
        rows[name].append({"max_tokens": cap, "seconds": whole, "optimizer_s": step, "predicted_s": predicted, **sizes})
    return rows


def describe(plan: BatchPlan, tokens: np.ndarray) -> dict:
    """Count the tokens, samples, micro-batches and steps that a plan runs.

    tokens: [S], without pads; fillers are counted.
    """
    steps = plan.mini_batches
    return {
        "tokens": int(sum(tokens[x.order].sum() for x in steps)),
        "samples": int(sum(len(x.order) for x in steps)),
        "microbatches": int(sum(x.num_microbatches.sum() for x in steps)),
        "real_steps": sum(x.kind is StepKind.REAL for x in steps),
        "ghost_steps": sum(x.kind is StepKind.GHOST for x in steps),
    }


def train(
    backend: MegatronBackend,
    rollouts: Sequence[Rollout],
    policy: str,
    rules: PlanRules,
    *,
    lr: float,
    weight_decay: float = 0.0,
    renormalised: bool = False,
) -> dict[str, torch.Tensor]:
    """Train all rollouts from the reference weights with a fresh AdamW; return the final weights.

    They are whole, by Hugging Face names, float64 on the host. ``backend.keep_reference()`` must have been called at
    the trajectory's start. The backend's own weights are unchanged; its optimizer is not: it belongs to the trajectory.
    """
    with backend.reference_weights():
        settings = dataclasses.replace(backend.config.optimizer, lr=lr, weight_decay=weight_decay)
        backend.reset_optimizer(total_steps=sum(len(x.mini_batches) for x in rollouts), settings=settings)
        for rollout in rollouts:
            old = backend.logprobs(rollout.batch, np.ones(rollout.batch.facts.num_samples, dtype=bool)).flat
            plan = rollout.plan(policy, rules)
            batch = backend.fetch_rows(rollout.batch, plan)
            inputs = rollout.inputs(plan, old, renormalised=renormalised)
            for mini_batch, fingerprint, step_inputs in zip(
                plan.mini_batches, plan.fingerprints(), inputs, strict=True
            ):
                backend.forward_backward(batch, mini_batch, step_inputs, fingerprint=fingerprint)
                backend.optim_step(mini_batch.kind)
        return exported(backend)


def exported(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", torch.float64, copy=True) for name, tensor in backend.export()}


def errors(
    found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]
) -> dict:
    """Return ‖w − truth‖ over ‖truth − start‖ and over ‖truth‖, all weights together.

    The first is None if the truth has not moved.
    """
    apart, moved = distance(found, truth), distance(truth, start)
    norm = sum(float(x.square().sum()) for x in truth.values()) ** 0.5
    return {"error_of_movement": apart / moved if moved else None, "error_of_weights": apart / norm}


def distance(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    return sum(float((a[name] - b[name]).square().sum()) for name in b) ** 0.5
