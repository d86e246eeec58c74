"""The loop: prompts → rollout → reward → advantage → signal → plan → schedule → optimizer step → weights.

Start it by: torchrun --nproc_per_node 2 -m megatron_rl.train --config FILE [--run-dir DIR] [section.key=value ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from megatron_rl import cli
from megatron_rl.config import Config

if TYPE_CHECKING:
    from megatron_rl.trainer.trainer import Trainer


def train(config: Config) -> bool:
    """Run the supervised start, if one is configured, and then RL; or continue a run from its newest checkpoint.

    Returns True if the run reached its end, False if it was preempted and has saved everything.
    Raises ConfigError before any weight is read.
    """
    from megatron_rl.critic.link import holds_critic, joined  # Megatron-Core is imported from here on
    from megatron_rl.critic.server import serve
    from megatron_rl.trainer.build import build_trainer
    from megatron_rl.trainer.preference import supervised_task
    from megatron_rl.trainer.supervised import supervised_start

    if holds_critic(config):
        return serve(config)
    with joined(config, of_critic=False) as critic_link, build_trainer(config, critic_link) as trainer:
        if trainer.rollouts_done is None and supervised_start(trainer, supervised_task(trainer)):
            return False
        trainer.evaluate_at_start()
        if trainer.rollouts_done is None:
            trainer.begin_rl()
            if trainer.save_if_due(0):
                return False
        index = trainer.rollouts_done or 0
        while trainer.rollouts.has(index):
            train_on_rollout(trainer, index)
            index += 1
            trainer.export_if_due(index)
            if trainer.save_if_due(index):
                return False
        if config.train.num_rollouts == 0:  # a supervised run keeps its policy too
            trainer.export_if_due(0)
    return True


def train_on_rollout(trainer: Trainer, index: int) -> None:
    """Train on one rollout, with an optimizer step for each of its mini-batches in each of its epochs."""
    taken = trainer.take_rollout(index)  # facts and rewards, on every rank
    result = trainer.compute_advantages(taken, index)
    update = trainer.prepare_update(taken, result, index)
    trainer.train_critic(update, result)
    for number, (step, fingerprint) in enumerate(update.steps):
        with trainer.timer.measure("update"):
            trainer.backend.forward_backward(update.batch, step, update.inputs(step), fingerprint=fingerprint)
            outcome = trainer.backend.optim_step(step.kind)  # REAL, GHOST or HELD
        trainer.log_step(index, update, number, outcome)
    trainer.end_rollout(index, update)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (cli.main)."""
    return cli.main(train, arguments)


def command_line() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    cli.end_process(main)


if __name__ == "__main__":
    command_line()
