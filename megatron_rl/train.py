"""The training loop: prompts → rollout → rewards → advantages → drop → plan → forward, backward → optimizer step.

"drop" removes samples that give no gradient, and "plan" divides the others into micro-batches.

Start it by: torchrun --nproc_per_node 2 -m megatron_rl.train --config FILE [--run-dir DIR]
[section.key=value ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from megatron_rl import cli
from megatron_rl.config import Config

if TYPE_CHECKING:
    from megatron_rl.trainer.run import Run


def train(config: Config) -> bool:
    """Run training to its end or preemption: the supervised steps, if any are configured, then RL's rollouts.

    A run with a checkpoint continues from the newest one. Returns True if the run reached its end,
    False if it was preempted and has saved everything. Raises ConfigError, for a configuration that
    cannot work, before any weight is read.
    """
    from megatron_rl.trainer.build import build_run  # Megatron-Core is imported from here on
    from megatron_rl.trainer.critic_part import serve_critic

    if (ended := serve_critic(config)) is not None:
        return ended
    with build_run(config) as run:
        if run.begin():
            return False
        index = run.rollouts_done or 0
        while run.queue.has(index):
            train_on_rollout(run, index)
            index += 1
            run.exports.write_if_due(index)
            if run.save_if_due(index):
                return False
        if config.train.num_rollouts == 0:  # a supervised run keeps its policy too
            run.exports.write_if_due(0)
    return True


def train_on_rollout(run: Run, index: int) -> None:
    """Train on one rollout: wait for its scored groups, compute advantages, and take the optimizer steps.

    Samples that give no gradient are dropped before the steps.

    index: the rollout's number in the run, from 0.
    """
    taken = run.take(index)  # scored groups, on every rank
    passes = run.passes.before_advantages(taken, index)  # log-probs or values that the advantages need
    result = run.advantages(taken.scored, passes)
    run.records.rollout(index, taken, result)
    update = run.planner.prepare(taken, passes, result, index)  # signal, other passes, importance weights, plan
    run.records.update(update)
    run.records.add(run.critic.train(update))
    for step in update.steps:
        with run.timer.measure("update"):
            run.backend.forward_backward(update.batch, step.plan, update.inputs(step), fingerprint=step.fingerprint)
            outcome = run.backend.optim_step(step.plan.kind)  # REAL, GHOST or HELD
        run.end_step(update, step, outcome)
    run.reference.after_rollout(index, update.batch.facts.num_samples, update.kl)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of training, by ``cli.main``, and return its exit code."""
    return cli.main(train, arguments)


def command_line() -> NoReturn:
    """Run the command line of training and end the process with its exit code."""
    cli.end_process(main)


if __name__ == "__main__":
    command_line()
