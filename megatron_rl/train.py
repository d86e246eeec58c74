"""The loop: prompts → rollout → reward → advantage → signal → plan → schedule → step → weights.

torchrun --nproc_per_node 2 -m megatron_rl.train --config FILE [--run-dir DIR] [section.key=value ...]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_rl import cli
from megatron_rl.algorithm.advantage import loss_inputs, reduction_weights
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.config import Config
from megatron_rl.observability.metrics import skip_metrics
from megatron_rl.planning.plan import plan_steps
from megatron_rl.types import BatchPlan, LossInputs


def train(config: Config) -> bool:
    """A whole run: supervised warm-up where asked for, then RL; or what a checkpoint has left of it. Whether it came to its end: a
    preempted one has saved all and is to be started again. Raises ConfigError before any weight is read."""
    from megatron_rl.critic.link import holds_critic, joined
    from megatron_rl.critic.server import serve
    from megatron_rl.trainer.trainer import build_trainer

    if holds_critic(config):
        return serve(config)
    with joined(config, of_critic=False) as bridge, build_trainer(config, bridge) as run:
        if run.rollouts_done is None and config.sft.steps:
            warm_up(run)
        done = run.rollouts_done or 0
        at_start = run.evaluation.due_at_start() and not (config.sft.steps or done)
        before = run.evaluate(suffix="_before") if at_start else {}
        if run.rollouts_done is None:
            if run.critic is not None and config.critic.init == "policy":
                run.critic.take_weights(run.backend.export())
            run.reference.keep()
            if run.checkpoints.after(run, 0):
                return False
        index = done
        while run.feed.has(index):
            train_on_rollout(run, index, before if index == 0 else {})
            index += 1
            last = not run.feed.has(index)
            run.export(index, last=last)
            if run.checkpoints.after(run, index, last=last):
                return False
        if config.train.num_rollouts == 0:  # a supervised run keeps its policy too
            run.export(0, last=True)
    return True


def warm_up(run) -> None:
    """Supervised steps on the solutions, by the same plan and schedule; then a fresh optimizer for RL."""
    config, backend = run.config, run.backend
    backend.reset_optimizer(total_steps=config.sft.steps, lr=config.sft.lr, weight_decay=config.sft.weight_decay, constant=True)
    for step in range(config.sft.steps):
        run.clock.restart()
        batch = backend.gather(*run.supervised_samples(config.sft.samples_per_step))
        plan = _whole_plan(run, batch, batch.facts.loss_tokens > 0)
        backend.load_rows(batch, plan)
        (mini_batch,) = plan.mini_batches
        weights = reduction_weights("token_mean", batch.facts, mini_batch.members, max_response_tokens=1)
        inputs = LossInputs(advantages=weights, weights=weights)
        with run.clock.measure("update"):
            backend.forward_backward(batch, mini_batch, inputs, fingerprint=plan.fingerprints()[0], supervised=True)
            result = backend.optim_step(mini_batch.kind)
        values = {**run.performance(batch, mini_batch), **run.clock.take()}
        if step + 1 == config.sft.steps and run.evaluation.due_at_start():
            values |= run.evaluate()
        run.write("warmup", result, values)
    backend.reset_optimizer(total_steps=run.total_steps)


def _whole_plan(run, batch, signal: np.ndarray) -> BatchPlan:
    """The batch as one mini-batch, nothing dropped: a supervised step's plan."""
    return plan_steps("warmup", [np.arange(batch.facts.num_samples)], batch.facts.total_tokens, signal, run.backend.rules, drops=False)


def train_on_rollout(run, index: int, extra: Mapping[str, float]) -> None:
    """One rollout: generate, score, decide what has signal, plan, and take its optimizer steps. ``extra`` joins its first row."""
    config, backend, clock = run.config, run.backend, run.clock
    clock.restart()
    intake = run.feed.take(index, clock)
    run.feed.start(index, clock)  # those ahead, which are generated from here on
    batch, facts = intake.batch, intake.batch.facts
    run.recorder.rollout(facts, intake.totals, intake.by_function)
    paid = run.kl_penalty(intake, index)
    estimate = run.estimate(intake, paid)
    advantages, held = estimate.advantages, run.holds_policy(index)
    signal = has_signal(advantages.largest(facts.response_tokens), facts.loss_tokens, advantage_epsilon=run.rule.advantage_epsilon)
    trained, drops = np.zeros_like(signal) if held else signal, run.rule.drops or held
    with clock.measure("plan"):
        plan = backend.plan("train", batch, trained, drops=drops)
    with clock.measure("logprob"):
        runs = samples_of(plan, facts.num_samples)
        old, measured = run.old_logprobs(intake, runs, index) if paid is None else (paid.old, paid.metrics)
        verdict = run.decide(batch, advantages, trained, runs, old)
        if not np.array_equal(verdict.signal, trained):  # masks took samples away: fewer run, none that was not passed
            signal = trained = verdict.signal
            plan = backend.plan("train", batch, trained, drops=drops)
        reference = run.reference_logprobs(batch, samples_of(plan, facts.num_samples)) if paid is None else paid.reference
    values = {**extra, **intake.metrics, **measured, **run.generation.take_metrics(), **verdict.metrics}
    values |= run.train_critic(batch, estimate)
    with clock.measure("plan"):
        backend.load_rows(batch, plan)
    run.save_plan(plan, index)
    steps = [*zip(plan.mini_batches, plan.fingerprints(), strict=True)] * config.train.epochs_per_rollout
    for number, (mini_batch, fingerprint) in enumerate(steps, start=1):
        with clock.measure("update"):
            inputs = loss_inputs(
                config, facts, mini_batch, advantages, trained, old=old, reference=reference, importance=verdict.weights,
                kl_coefficient=run.reference.loss_coefficient,
            )  # fmt: skip
            backend.forward_backward(batch, mini_batch, inputs, fingerprint=fingerprint)
            result = backend.hold_step() if held else backend.optim_step(mini_batch.kind)
        run.reference.measure(result)
        last = number == len(steps)
        values |= {**skip_metrics(mini_batch, facts, signal), **run.performance(batch, mini_batch), **clock.take()}
        if last and run.evaluation.due(index + 1, last=not run.feed.has(index + 1)):
            values |= run.evaluate()
        run.write("rl", result, {**values, "rollout": index + 1})
        values = {}
    run.reference.after_rollout(index, batch.facts.num_samples)


def samples_of(plan: BatchPlan, num_samples: int) -> np.ndarray:
    """[S] bool: what the plan runs. Without ``plan.repack`` that includes samples without signal that share a micro-batch with
    one that has it; their KL term needs true log-probs."""
    runs = np.zeros(num_samples, dtype=bool)
    for mini_batch in plan.mini_batches:
        runs[mini_batch.order] = True
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (cli.main)."""
    return cli.main(train, arguments)


if __name__ == "__main__":
    cli.end_process(main)
