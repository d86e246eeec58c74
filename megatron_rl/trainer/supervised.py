"""The supervised start: optimizer steps on the data set's solutions, by the same plan and schedule as RL's."""

from __future__ import annotations

import numpy as np

from megatron_rl.algorithm.advantage import reduction_weights
from megatron_rl.backend.batch import Batch
from megatron_rl.observability.throughput import performance
from megatron_rl.planning.plan import plan_steps
from megatron_rl.rollout.worker import to_sample
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.types import LossInputs, Rollout


def supervised_start(trainer: Trainer) -> None:
    """Take ``sft.steps`` steps on the data set's solutions, then start a fresh optimizer for RL. A collective."""
    settings, backend = trainer.config.sft, trainer.backend
    if not settings.steps:
        return
    backend.reset_optimizer(
        total_steps=settings.steps, lr=settings.lr, weight_decay=settings.weight_decay, constant=True
    )
    for number in range(settings.steps):
        trainer.timer.restart()
        batch = next_batch(trainer, settings.samples_per_step)
        facts = batch.facts
        members = np.arange(facts.num_samples)
        plan = plan_steps("warmup", [members], facts.total_tokens, facts.loss_tokens > 0, backend.rules, drops=False)
        batch = backend.fetch_rows(batch, plan)
        (step,) = plan.mini_batches
        weights = reduction_weights("token_mean", facts, step.members, max_response_tokens=1)
        inputs = LossInputs(advantages=weights, weights=weights)
        with trainer.timer.measure("update"):
            backend.forward_backward(batch, step, inputs, fingerprint=plan.fingerprints()[0], supervised=True)
            result = backend.optim_step(step.kind)
        values = performance(backend, facts, step, trainer.timer.seconds["update"]) | trainer.timer.take()
        if number + 1 == settings.steps and trainer.evaluation.due_at_start():
            values |= trainer.evaluate()
        trainer.write("warmup", result, values)
    backend.reset_optimizer(total_steps=trainer.total_steps)


def next_batch(trainer: Trainer, count: int) -> Batch:
    """Make a batch of the next ``count`` solutions, spread over all ranks. A collective."""
    topology, version = trainer.backend.topology, trainer.backend.weight_version
    solutions = trainer.prompts.next_solutions(count)
    places = list(range(topology.rank, count, topology.world_size))
    samples = []
    for place in places:
        solution, num_tokens = solutions[place], len(solutions[place].response_ids)
        rollout = Rollout(
            prompt=solution.prompt,
            sample_index=0,
            response_ids=solution.response_ids,
            logprobs=(0.0,) * num_tokens,
            text="",
            finish_reason="stop",
            weight_versions=((version, num_tokens),),
            loss_mask=solution.loss_mask,
        )
        samples.append(to_sample(rollout, included=True))
    return trainer.backend.gather(samples, places, places)
